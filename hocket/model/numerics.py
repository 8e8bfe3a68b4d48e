"""The few operations whose bits depend on how many rows they are given, in two flavours.

`FastNumerics` takes PyTorch's own kernels. `InvariantNumerics` gives a row the same bits whatever
rows it is computed with, so that a token's result is bit-equal whatever its company:
- matrix products take kernels that were seen to do so (`row_products`); where there are none, they
  run in tiles of `ROW_TILE` rows, so that there is only one shape;
- PyTorch's own sigmoid and silu treat the last few elements of a buffer, or of a thread's part of
  it, with another instruction than the rest: silu is called so that there are none, sigmoids are
  built from `exp`, negation, addition and division.
The model is written once against `Numerics`; `attention` has one kernel for each flavour.

Shape letters: T rows, K inputs, N outputs, H heads, D and E a head's inputs and outputs, I width,
V vocabulary.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F

from hocket.model.packed_head import PackedHead, can_pack_head
from hocket.model.row_products import (
    SharedRows,
    agreement_of,
    agreement_of_heads,
    as_multiplied,
    can_share_rows,
    fill_outputs,
    multiply_each,
    share_rows,
)
from hocket.model.row_tables import START_BYTES, RowTable, can_tabulate

ROW_TILE = 8
SILU_ELEMENTS = 64
"""Silu of so many elements, or a multiple, needs no other instruction for the last ones."""
SILU_CALL_ELEMENTS = 2**15
"""PyTorch does not share a call of so many elements among threads."""
MAX_HEAD_ROWS = 2
"""Up to this many rows tables are faster for the heads' products than a batched product."""


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [N, K] laid out for a CPU's products."""

    packed: torch.Tensor
    """oneDNN's own layout."""
    table: RowTable | None
    """For few rows, where the matrix is small and the mode is fast."""
    max_table_rows: int = 0


Weight = torch.Tensor | PackedWeight | SharedRows
"""What `Numerics.linear` multiplies by."""
Head = Weight | PackedHead
"""An output head [V, H]; a weight is fp32."""


@dataclass(frozen=True)
class HeadWeights:
    """One matrix per head, made by `Numerics.pack_heads`."""

    weight_HDE: torch.Tensor
    """fp32 on a CPU, where the batched product is fastest in it, and in batch-invariant mode."""
    table: RowTable | None
    """For up to `MAX_HEAD_ROWS` rows, as in `PackedWeight`."""
    least_rows: int | None = None
    """In batch-invariant mode: from how many rows on a row's bits are its own; None: only in
    tiles."""
    num_outputs: int | None = None
    """In batch-invariant mode: as many of E count (`row_products.fill_outputs`)."""


class Numerics(Protocol):
    """How weights are laid out, rows multiplied and activated."""

    row_tile: int
    """Rows come in multiples of this."""
    is_batch_invariant: bool

    def pack(self, weight_NK: torch.Tensor, with_table: bool = True) -> Weight:
        """The weight laid out for `linear`; `with_table` adds a table if that pays."""
        ...

    def pack_heads(self, weight_HED: torch.Tensor) -> HeadWeights:
        """One matrix [E, D] per head, laid out for `per_head`."""
        ...

    def pack_head(self, head_VH: torch.Tensor) -> Head:
        """The output head, whose logits are fp32."""
        ...

    def can_tabulate(self, weight_NK: torch.Tensor) -> bool:
        """Whether a table may take the place of this matrix, packed."""
        ...

    def as_multiplied(self, weight_NK: torch.Tensor) -> torch.Tensor:
        """The matrix that `linear` multiplies by once this one is packed, for tables."""
        ...

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        """x @ weight.T, [T, N]. The weight may have been through `pack`."""
        ...

    def linear_each(
        self, x_RK: torch.Tensor, sizes: Sequence[int], weights: Sequence[Weight]
    ) -> torch.Tensor:
        """`linear` of runs of so many rows, each with its own weight, [R, N]."""
        ...

    def per_head(self, x_THD: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        """Each head's own product, [T, H, E], in the dtype of `x_THD` or the weights'."""
        ...

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        """1 / (1 + exp(-x)), any shape."""
        ...

    def gated(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half, [T, I]."""
        ...


class FastNumerics:
    """PyTorch's own kernels; bits may depend on the number of rows."""

    row_tile = 1
    is_batch_invariant = False

    def pack(self, weight_NK: torch.Tensor, with_table: bool = True) -> Weight:
        """Laid out for oneDNN, once, instead of at every call: twice as fast for few rows and equal
        bit for bit. Returned as it is where oneDNN does not serve."""
        if not can_pack(weight_NK):
            return weight_NK
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), ROW_TILE)
        if not (with_table and can_tabulate(weight_NK)):
            return PackedWeight(packed, None)
        max_rows = max_table_rows(weight_NK)
        return PackedWeight(packed, RowTable([weight_NK], max_rows), max_rows)

    def pack_heads(self, weight_HED: torch.Tensor) -> HeadWeights:
        table = None
        if can_tabulate(weight_HED[0]):
            table = RowTable(list(weight_HED), MAX_HEAD_ROWS * weight_HED.shape[0])
        is_fp32 = weight_HED.device.type == "cpu"
        weight_HDE = weight_HED.float() if is_fp32 else weight_HED
        return HeadWeights(weight_HDE.transpose(1, 2).contiguous(), table)

    def pack_head(self, head_VH: torch.Tensor) -> Head:
        return PackedHead(head_VH) if can_pack_head(head_VH) else head_VH.float()

    def can_tabulate(self, weight_NK: torch.Tensor) -> bool:
        return can_tabulate(weight_NK)

    def as_multiplied(self, weight_NK: torch.Tensor) -> torch.Tensor:
        return weight_NK

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        if isinstance(weight_NK, torch.Tensor):
            return F.linear(x_TK, weight_NK)
        assert isinstance(weight_NK, PackedWeight), "packed for batch-invariant mode"
        if weight_NK.table is not None and x_TK.shape[0] <= weight_NK.max_table_rows:
            return weight_NK.table.linear(x_TK)
        return torch.ops.mkldnn._linear_pointwise(x_TK, weight_NK.packed, None, "none", [], "")

    def linear_each(
        self, x_RK: torch.Tensor, sizes: Sequence[int], weights: Sequence[Weight]
    ) -> torch.Tensor:
        parts = zip(x_RK.split(list(sizes)), weights, strict=True)
        return torch.cat([self.linear(part, weight) for part, weight in parts])

    def per_head(self, x_THD: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        if weights.table is not None and x_THD.shape[0] <= MAX_HEAD_ROWS:
            return weights.table.each(x_THD)
        weight_HDE = weights.weight_HDE
        x_HTD = x_THD.transpose(0, 1).to(weight_HDE.dtype)
        return torch.bmm(x_HTD, weight_HDE).transpose(0, 1)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def gated(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)


class InvariantNumerics:
    """A row's bits depend on the row alone."""

    is_batch_invariant = True

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.row_tile = 1 if can_share_rows(dtype, device) else ROW_TILE

    def pack(self, weight_NK: torch.Tensor, with_table: bool = True) -> Weight:
        """Returned as it is where rows can't share a product."""
        max_rows = max_table_rows(weight_NK) if with_table else 0
        return share_rows(weight_NK, max_rows) or weight_NK

    def pack_heads(self, weight_HED: torch.Tensor) -> HeadWeights:
        weight_HED = weight_HED.float()
        weight_HDE = fill_outputs(weight_HED).transpose(1, 2).contiguous()
        num_outputs = weight_HED.shape[1]
        if weight_HED.device.type != "cpu":
            return HeadWeights(weight_HDE, None, num_outputs=num_outputs)
        agreement = agreement_of_heads(weight_HDE.shape)
        table = None
        if agreement.of_tables and can_tabulate(weight_HED[0]):
            table = RowTable(list(weight_HED), MAX_HEAD_ROWS * weight_HED.shape[0])
        return HeadWeights(weight_HDE, table, agreement.least_rows, num_outputs)

    def pack_head(self, head_VH: torch.Tensor) -> Head:
        if can_pack_head(head_VH) and agreement_of(head_VH).of_rows:
            return PackedHead(head_VH)
        return self.pack(head_VH.float(), with_table=False)

    def can_tabulate(self, weight_NK: torch.Tensor) -> bool:
        return agreement_of(weight_NK).of_tables

    def as_multiplied(self, weight_NK: torch.Tensor) -> torch.Tensor:
        return as_multiplied(weight_NK)

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        if isinstance(weight_NK, SharedRows):
            return weight_NK.linear(x_TK)
        assert isinstance(weight_NK, torch.Tensor), "packed for fast mode"
        num_rows = x_TK.shape[0]
        tiles = _tiles(x_TK)
        if x_TK.dtype == torch.float32:
            # One product per tile: the batched kernel never splits a product over threads.
            weights = weight_NK.t().expand(tiles.shape[0], -1, -1)
            return torch.bmm(tiles, weights).flatten(0, 1)[:num_rows]
        return torch.cat([F.linear(tile, weight_NK) for tile in tiles])[:num_rows]

    def linear_each(
        self, x_RK: torch.Tensor, sizes: Sequence[int], weights: Sequence[Weight]
    ) -> torch.Tensor:
        shared = [weight for weight in weights if isinstance(weight, SharedRows)]
        if len(shared) == len(weights):
            return multiply_each(x_RK, sizes, shared)
        parts = zip(x_RK.split(list(sizes)), weights, strict=True)
        return torch.cat([self.linear(part, weight) for part, weight in parts])

    def per_head(self, x_THD: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        num_rows = x_THD.shape[0]
        x_THD = x_THD.float()
        if weights.table is not None and num_rows <= MAX_HEAD_ROWS:
            return weights.table.each(x_THD)
        if weights.least_rows is None:
            products = [torch.bmm(t.transpose(0, 1), weights.weight_HDE) for t in _tiles(x_THD)]
            products_HTE = torch.cat(products, 1)
        else:
            if num_rows < weights.least_rows:
                x_THD = F.pad(x_THD, (0, 0, 0, 0, 0, weights.least_rows - num_rows))
            products_HTE = torch.bmm(x_THD.transpose(0, 1), weights.weight_HDE)
        return products_HTE.transpose(0, 1)[:num_rows, :, : weights.num_outputs]

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.neg().float().exp_().add_(1.0).reciprocal_()

    def gated(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        width = gate_TI.shape[1]
        if width % SILU_ELEMENTS:
            inverse_TI = gate_TI.neg().float().exp_().add_(1.0)
            return torch.div(gate_TI, inverse_TI).mul_(up_TI).to(gate_up_T2I.dtype)
        # Every row begins and ends where PyTorch's own does, and no call is shared by threads.
        if gate_TI.numel() <= SILU_CALL_ELEMENTS:
            return F.silu(gate_TI).mul_(up_TI)
        rows = max(1, SILU_CALL_ELEMENTS // width)
        return torch.cat([F.silu(part_RI) for part_RI in gate_TI.split(rows)]).mul_(up_TI)


def numerics_for(batch_invariant: bool, dtype: torch.dtype, device: torch.device) -> Numerics:
    """The flavour that a mode asks for."""
    return InvariantNumerics(dtype, device) if batch_invariant else FastNumerics()


def numerics_revision(batch_invariant: bool, device: torch.device) -> str:
    """Names the arithmetic; two workers may pair only when it is equal.

    The leading number is raised when a change of ours changes bits. In batch-invariant mode the
    kernels enter too (CPU family and instruction set, or GPU; PyTorch's minor version): bits are
    promised there, and libraries choose kernels by them.
    The thread count does not: no product is split over threads in a way that its bits show.
    """
    if not batch_invariant:
        return "2-fast"
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        kernels = " ".join(["cpu", platform.machine(), *_cpu_family(), capability])
    else:
        kernels = torch.cuda.get_device_name(device)
    version = ".".join(torch.__version__.split(".")[:2])
    return f"4-invariant ({kernels}, torch {version})"


@cache
def _cpu_family() -> list[str]:
    """Its maker and family as Linux tells them, the maker alone on Arm; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    pairs = [line.partition(":") for line in lines]
    told = {name.strip(): value.strip() for name, _, value in pairs}
    names = ("vendor_id", "cpu family", "CPU implementer")
    return [told[name] for name in names if name in told]


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a layout of its own for it: bf16 on an x86 CPU that it serves."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and not torch.ops.mkldnn._is_mkldnn_acl_supported()
    )


def max_table_rows(weight_NK: torch.Tensor) -> int:
    """A table reads the matrix once a row; in the time oneDNN takes to start, START_BYTES of it."""
    return min(1 + START_BYTES // weight_NK.nbytes, ROW_TILE)


def _tiles(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, ...] as tiles [*, ROW_TILE, ...], the last one filled up with zero rows."""
    missing = -x.shape[0] % ROW_TILE
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return x.unflatten(0, (-1, ROW_TILE))
