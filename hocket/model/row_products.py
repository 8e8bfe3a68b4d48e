"""Matrix products on an x86 CPU that give a row the same bits whatever the number of rows.

Batch-invariant mode could compute every product in tiles of one shape, and does where it must. But
the kernels taken here compute a row's product with a column as one chain of fused multiply-adds,
input by input, and differ only in how many chains they keep in registers at once: FBGEMM for bf16
weights (in fp16, see `packed_head`), oneDNN and MKL for fp32 ones, and the sums of table rows
(`row_tables`), which are faster for very few rows. So all of them give a row the same bits.

Nobody promises that. `agreement_of` tries it, once for each shape of a matrix.

Shape letters: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F

from hocket.model.packed_head import PackedHead, as_packed, can_pack_head
from hocket.model.row_tables import RowTable, can_tabulate

MAX_PROBED_OUTPUTS = 2048
"""More outputs are more of the same."""
MAX_LEAST_ROWS = 16
"""Kernels for fewer rows add in another order; up to this many are filled up with zeros."""
_ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16, 17, 33, 64, 200)
"""A row is tried in so many rows, and in few of them at other places, too: kernels take some rows
at a time, and may add in another order where outputs do not fill a register."""
_MAX_MOVED_ROWS, _MOVES = 33, (0, 1, 2, 3)
_HEAD_ROW_COUNTS = (*range(1, 18), 24, 33, 64, 100, 512, 2048)


def fill_outputs(weight_NK: torch.Tensor) -> torch.Tensor:
    """With zeros for outputs, [..., N, K], up to a multiple of a register's 16. What MKL's batched
    product makes of 1, 5 to 7 or 9 to 11 depends, on some CPUs, on a row's place among others."""
    missing = -weight_NK.shape[-2] % 16
    return F.pad(weight_NK, (0, 0, 0, missing)) if missing else weight_NK


class RowProduct(Protocol):
    """x @ weight.T of one matrix, [T, K] to [T, N], in the dtype of `x_TK`."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor: ...


class HalfProduct:
    """By FBGEMM, of a bf16 matrix: fp32 sums, rounded once, and as `RowTable`'s sums are: a value
    half way between two goes away from zero. A last bit that is set makes it more than half."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._packed = PackedHead(weight_NK)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.rounded(self._packed(x_TK))

    @staticmethod
    def rounded(sums_TN: torch.Tensor) -> torch.Tensor:
        """The sums in bf16; they are spent."""
        sums_TN.view(torch.int32).bitwise_or_(1)
        return sums_TN.to(torch.bfloat16)

    @staticmethod
    def each(parts: Sequence[torch.Tensor], products: Sequence[HalfProduct]) -> torch.Tensor:
        """Every part, fp32, by its own matrix, one behind the other."""
        sums = [product._packed(part) for part, product in zip(parts, products, strict=True)]
        return HalfProduct.rounded(torch.cat(sums))


class SmallProduct:
    """By MKL's batched product, of an fp32 matrix that is small: it starts fastest."""

    MAX_ELEMENTS = 2**16

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._num_outputs = weight_NK.shape[0]
        self._weight_1KN = fill_outputs(weight_NK).t().contiguous()[None]

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        num_rows = x_TK.shape[0]
        if num_rows < MAX_LEAST_ROWS:
            x_TK = F.pad(x_TK, (0, 0, 0, MAX_LEAST_ROWS - num_rows))
        return torch.bmm(x_TK[None], self._weight_1KN)[0, :num_rows, : self._num_outputs]


class FloatProduct:
    """By oneDNN, of an fp32 matrix."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), 8)

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] == 1:
            # A single row has a kernel of its own, which adds in another order.
            return self(x_TK.expand(2, -1).contiguous())[:1]
        return torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, None, "none", [], "")


def can_share_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for a model of this dtype; its router is fp32 in any case."""
    is_served = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    is_served = is_served and device.type == "cpu"
    return is_served and (dtype == torch.float32 or can_pack_head(torch.empty(1, 1, dtype=dtype)))


def product_of(weight_NK: torch.Tensor) -> RowProduct | None:
    """The kernel for this matrix; None where there is none."""
    if not can_share_rows(weight_NK.dtype, weight_NK.device):
        return None
    if weight_NK.dtype != torch.float32:
        return HalfProduct(weight_NK)
    is_small = weight_NK.numel() <= SmallProduct.MAX_ELEMENTS
    return SmallProduct(weight_NK) if is_small else FloatProduct(weight_NK)


def as_multiplied(weight_NK: torch.Tensor) -> torch.Tensor:
    """The matrix that the kernel multiplies by, for a table beside it."""
    return as_packed(weight_NK) if can_pack_head(weight_NK) else weight_NK


def rows_to_try(row_counts: Sequence[int]) -> Iterator[slice]:
    """Rows that must have the same bits as among all."""
    for count in row_counts:
        for first in _MOVES if count <= _MAX_MOVED_ROWS else _MOVES[:1]:
            yield slice(first, first + count)


def least_that_agrees(row_counts: Sequence[int], agrees: Callable[[slice], bool]) -> int:
    """From how many rows on all of these agree."""
    fail = [rows.stop - rows.start for rows in rows_to_try(row_counts) if not agrees(rows)]
    return 1 + max(fail, default=0)


@dataclass(frozen=True)
class Agreement:
    """What was found for a shape."""

    of_rows: bool
    """A row has the same bits in any number of rows."""
    of_tables: bool
    """And in a table."""


def agreement_of(weight_NK: torch.Tensor) -> Agreement:
    """What holds for matrices of this shape and dtype here."""
    num_outputs, num_inputs = weight_NK.shape
    return _try(min(num_outputs, MAX_PROBED_OUTPUTS), num_inputs, weight_NK.dtype)


@cache
def _try(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Agreement:
    generator = torch.Generator().manual_seed(num_outputs)
    weight_NK = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator).to(dtype)
    x_TK = torch.randn(_ROW_COUNTS[-1], num_inputs, generator=generator)
    # The order of additions shows in these rows; in sums of whole numbers the rounding shows, many
    # lie half way between two values.
    x_TK[::2] = (2.0 * x_TK[::2]).round()
    x_TK = x_TK.to(dtype)
    product = product_of(weight_NK)
    if product is None:
        return Agreement(False, False)
    expected_TN = product(x_TK)
    of_rows = all(
        torch.equal(product(x_TK[rows]), expected_TN[rows]) for rows in rows_to_try(_ROW_COUNTS)
    )
    if not (of_rows and can_tabulate(weight_NK)):
        return Agreement(of_rows, False)
    found_TN = RowTable([as_multiplied(weight_NK)], x_TK.shape[0]).linear(x_TK)
    return Agreement(of_rows, torch.equal(found_TN, expected_TN))


@dataclass(frozen=True)
class HeadAgreement:
    """What was found for one matrix per head."""

    least_rows: int | None
    """From so many rows on a row has the same bits in the batched product; None: never."""
    of_tables: bool
    """And in a table."""


@cache
def agreement_of_heads(shape_HDE: tuple[int, ...]) -> HeadAgreement:
    """What holds for fp32 matrices [D, E] of H heads on this CPU."""
    generator = torch.Generator().manual_seed(shape_HDE[1])
    weight_HDE = torch.randn(shape_HDE, generator=generator)
    x_HTD = torch.randn(shape_HDE[0], _HEAD_ROW_COUNTS[-1], shape_HDE[1], generator=generator)
    expected_HTE = torch.bmm(x_HTD, weight_HDE)

    def agrees(rows: slice) -> bool:
        # Laid out as in a step: token by token.
        x_THD = x_HTD[:, rows].transpose(0, 1).contiguous()
        found_HTE = torch.bmm(x_THD.transpose(0, 1), weight_HDE)
        return torch.equal(found_HTE, expected_HTE[:, rows])

    least = least_that_agrees(_HEAD_ROW_COUNTS, agrees)
    if least > MAX_LEAST_ROWS:
        return HeadAgreement(None, False)
    of_tables = False
    if can_tabulate(weight_HDE[0]):
        table = RowTable(list(weight_HDE.transpose(1, 2)), shape_HDE[0])
        found_1HE = table.each(x_HTD[:, :1].transpose(0, 1))
        of_tables = torch.equal(found_1HE[0], expected_HTE[:, 0])
    return HeadAgreement(least, of_tables)


@dataclass(frozen=True)
class SharedRows:
    """A matrix ready to multiply any number of rows, every row as if it were alone."""

    product: RowProduct
    table: RowTable | None
    max_table_rows: int

    def linear(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x @ weight.T, [T, N]."""
        if self.table is not None and x_TK.shape[0] <= self.max_table_rows:
            return self.table.linear(x_TK)
        return self.product(x_TK)


def multiply_each(
    x_RK: torch.Tensor, sizes: Sequence[int], weights: Sequence[SharedRows]
) -> torch.Tensor:
    """Runs of so many rows, each by its own matrix, one behind the other, [R, N]."""
    halves = [w.product for w in weights if isinstance(w.product, HalfProduct)]
    if len(halves) == len(weights):
        # Dtypes are changed once for all.
        return HalfProduct.each(x_RK.float().split(list(sizes)), halves)
    parts = zip(x_RK.split(list(sizes)), weights, strict=True)
    return torch.cat([weight.linear(part) for part, weight in parts])


def share_rows(weight_NK: torch.Tensor, max_table_rows: int) -> SharedRows | None:
    """The matrix packed, with a table for up to so many rows if one gives the same bits; None where
    rows cannot share a product."""
    agreement = agreement_of(weight_NK)
    product = product_of(weight_NK) if agreement.of_rows else None
    if product is None:
        return None
    if not (max_table_rows and agreement.of_tables):
        return SharedRows(product, None, 0)
    table = RowTable([as_multiplied(weight_NK)], max_table_rows)
    return SharedRows(product, table, max_table_rows)
