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
from typing import Protocol

import torch
import torch.nn.functional as F

ROW_TILE = 8


class Numerics(Protocol):
    """How rows are multiplied and activated."""

    row_tile: int
    """Rows come in multiples of this."""
    is_batch_invariant: bool

    def linear(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        """x @ weight.T, [T, N]. The weight may have been through `pack`."""
        ...

    def per_head(self, x_THD: torch.Tensor, weight_HDE: torch.Tensor) -> torch.Tensor:
        """Each head's own product, [T, H, E]."""
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

    def linear(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        if weight_NK.is_mkldnn:
            return _packed_linear(x_TK, weight_NK)
        return F.linear(x_TK, weight_NK)

    def per_head(self, x_THD: torch.Tensor, weight_HDE: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x_THD.transpose(0, 1), weight_HDE).transpose(0, 1)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def gated(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)


class InvariantNumerics:
    """Fixed row tiles: a row's bits depend on the row alone."""

    row_tile = ROW_TILE
    is_batch_invariant = True

    def linear(self, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        num_tiles, rest = divmod(x_TK.shape[0], ROW_TILE)
        assert rest == 0, f"{x_TK.shape[0]} rows are no multiple of {ROW_TILE}"
        if x_TK.dtype == torch.float32:
            # One product per tile: the batched kernel never splits a product over threads.
            tiles = x_TK.reshape(num_tiles, ROW_TILE, -1)
            return torch.bmm(tiles, weight_NK.t().expand(num_tiles, -1, -1)).flatten(0, 1)
        product = _packed_linear if weight_NK.is_mkldnn else F.linear
        if num_tiles == 1:
            return product(x_TK, weight_NK)
        return torch.cat([product(tile, weight_NK) for tile in x_TK.split(ROW_TILE)])

    def per_head(self, x_THD: torch.Tensor, weight_HDE: torch.Tensor) -> torch.Tensor:
        assert x_THD.shape[0] % ROW_TILE == 0, f"{x_THD.shape[0]} rows, tile {ROW_TILE}"
        tiles = [
            torch.bmm(tile_RHD.transpose(0, 1), weight_HDE).transpose(0, 1)
            for tile_RHD in x_THD.split(ROW_TILE)
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
        return "1-fast"
    if device.type == "cpu":
        kernels = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        kernels = torch.cuda.get_device_name(device)
    version = ".".join(torch.__version__.split(".")[:2])
    return f"1-invariant ({kernels}, torch {version})"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether `pack` would change this weight: bf16 on an x86 CPU that oneDNN serves."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and not torch.ops.mkldnn._is_mkldnn_acl_supported()
    )


def pack(weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight laid out for oneDNN, once, instead of at every call: twice as fast for few rows
    and equal bit for bit. Returned as it is where that is not possible. Only `Numerics.linear`
    can use the result."""
    if not can_pack(weight_NK):
        return weight_NK
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), ROW_TILE)


def _packed_linear(x_TK: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TK, weight, None, "none", [], "")
