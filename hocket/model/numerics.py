"""The few operations whose bits depend on how many rows they are given, in two flavours.

`FastNumerics` takes PyTorch's own kernels. `InvariantNumerics` computes every row by one kernel
shape whatever the number of rows, so that a token's result is bit-equal whatever its company:
- matrix products run in tiles of `ROW_TILE` rows (callers pad rows to a multiple of it);
- sigmoids are built from `exp`, negation, addition and division: PyTorch's own sigmoid and silu
  treat the last few elements of a buffer with another instruction than the rest.
The model is written once against `Numerics`; `attention` has one kernel for each flavour.

Shape letters: T rows, K inputs, N outputs, H heads, D and E a head's inputs and outputs, I width.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from hocket.model.row_tables import START_BYTES, RowTable, can_tabulate

ROW_TILE = 8
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


Weight = torch.Tensor | PackedWeight
"""What `Numerics.linear` multiplies by."""


@dataclass(frozen=True)
class HeadWeights:
    """One matrix per head, made by `pack_heads`."""

    weight_HDE: torch.Tensor
    """fp32 on a CPU, where the batched product is fastest in it, and in batch-invariant mode."""
    table: RowTable | None
    """For up to `MAX_HEAD_ROWS` rows, as in `PackedWeight`."""


class Numerics(Protocol):
    """How rows are multiplied and activated."""

    row_tile: int
    """Rows come in multiples of this."""
    is_batch_invariant: bool

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        """x @ weight.T, [T, N]. The weight may have been through `pack`."""
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

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        if isinstance(weight_NK, torch.Tensor):
            return F.linear(x_TK, weight_NK)
        if weight_NK.table is not None and x_TK.shape[0] <= weight_NK.max_table_rows:
            return weight_NK.table.linear(x_TK)
        return _packed_linear(x_TK, weight_NK.packed)

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
    """Fixed row tiles: a row's bits depend on the row alone."""

    row_tile = ROW_TILE
    is_batch_invariant = True

    def linear(self, x_TK: torch.Tensor, weight_NK: Weight) -> torch.Tensor:
        num_tiles, rest = divmod(x_TK.shape[0], ROW_TILE)
        assert rest == 0, f"{x_TK.shape[0]} rows are no multiple of {ROW_TILE}"
        if isinstance(weight_NK, torch.Tensor) and x_TK.dtype == torch.float32:
            # One product per tile: the batched kernel never splits a product over threads.
            tiles = x_TK.reshape(num_tiles, ROW_TILE, -1)
            return torch.bmm(tiles, weight_NK.t().expand(num_tiles, -1, -1)).flatten(0, 1)
        tiles = x_TK.split(ROW_TILE)
        if isinstance(weight_NK, torch.Tensor):
            products = [F.linear(tile, weight_NK) for tile in tiles]
        else:
            products = [_packed_linear(tile, weight_NK.packed) for tile in tiles]
        return products[0] if num_tiles == 1 else torch.cat(products)

    def per_head(self, x_THD: torch.Tensor, weights: HeadWeights) -> torch.Tensor:
        assert x_THD.shape[0] % ROW_TILE == 0, f"{x_THD.shape[0]} rows, tile {ROW_TILE}"
        tiles = [
            torch.bmm(tile_RHD.transpose(0, 1), weights.weight_HDE).transpose(0, 1)
            for tile_RHD in x_THD.to(weights.weight_HDE.dtype).split(ROW_TILE)
        ]
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().neg().exp_().add_(1.0).reciprocal_()

    def gated(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
        return self.sigmoid(gate_TI).mul_(gate_TI).mul_(up_TI).to(gate_up_T2I.dtype)


def numerics_for(batch_invariant: bool) -> Numerics:
    """The flavour that a mode asks for."""
    return InvariantNumerics() if batch_invariant else FastNumerics()


def numerics_revision(batch_invariant: bool, device: torch.device) -> str:
    """Names the arithmetic; two workers may pair only when it is equal.

    The leading number is raised when a change of ours changes bits. In batch-invariant mode the
    kernels enter too (instruction set or GPU, PyTorch's minor version): bits are promised there.
    The thread count does not: no product is ever split over threads.
    """
    if not batch_invariant:
        return "2-fast"
    if device.type == "cpu":
        kernels = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        kernels = torch.cuda.get_device_name(device)
    version = ".".join(torch.__version__.split(".")[:2])
    return f"2-invariant ({kernels}, torch {version})"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack` would change this weight: bf16 on an x86 CPU that oneDNN serves."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and not torch.ops.mkldnn._is_mkldnn_acl_supported()
    )


def pack(weight_NK: torch.Tensor, with_table: bool = False) -> Weight:
    """The weight laid out for oneDNN, once, instead of at every call: twice as fast for few rows
    and equal bit for bit; `with_table` adds a table if that pays. Returned as it is where oneDNN
    does not serve. Only `Numerics.linear` can use the result."""
    if not can_pack(weight_NK):
        return weight_NK
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), ROW_TILE)
    if not (with_table and can_tabulate(weight_NK)):
        return PackedWeight(packed, None)
    # A table reads the matrix once a row; in the time oneDNN takes to start, START_BYTES of it.
    max_rows = min(1 + START_BYTES // weight_NK.nbytes, ROW_TILE)
    return PackedWeight(packed, RowTable([weight_NK], max_rows), max_rows)


def pack_heads(weight_HED: torch.Tensor, is_fp32: bool, with_table: bool) -> HeadWeights:
    """One matrix [E, D] per head, in fp32 if so wanted; `with_table` as in `pack`."""
    weight_HDE = weight_HED.transpose(1, 2)
    table = None
    if with_table and can_tabulate(weight_HED[0]):
        table = RowTable(list(weight_HED), MAX_HEAD_ROWS * weight_HED.shape[0])
    dtype = torch.float32 if is_fp32 else weight_HED.dtype
    return HeadWeights(weight_HDE.to(dtype).contiguous(), table)


def _packed_linear(x_TK: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TK, packed, None, "none", [], "")
