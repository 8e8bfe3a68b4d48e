"""Matrix products of very few rows on a CPU: one call for any number of small matrices.

A oneDNN product takes 20 us to start, a small matrix 10 us to read, and a token of an MoE layer
meets many small matrices. But x @ W.T is a sum of W's columns weighted by x, and weighted sums of
table rows are what `embedding_bag` computes, in fp32, reading each row once. So all experts'
matrices, transposed, form one table, and one call multiplies every token by all experts it chose.
Nothing is shared between rows of x: from a few rows per matrix on, real products are faster.

Shape letters: B sums, C matrices that enter a sum, K inputs and N outputs of a matrix, E matrices
of a table, P pieces of a row, T rows of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

MAX_MATRIX_BYTES = 2**21
"""Above this the reading outweighs the start, and the memory is not worth it."""
START_BYTES = 2**19
"""What a table reads in the 20 us that a oneDNN product takes to start."""
MAX_ROW_WIDTH = 384
"""Sums of this many elements stay in registers (of 512 bits, a few left for the rows)."""


def can_tabulate(weight_NK: torch.Tensor) -> bool:
    """Whether a matrix is small enough, and lies where tables are faster."""
    return weight_NK.device.type == "cpu" and weight_NK.nbytes <= MAX_MATRIX_BYTES


class RowTable:
    """Matrices [N, K] of one shape, cut into pieces of a few hundred outputs, each stored input
    by input: a sum reads memory in order. Threads share a call's sums and pieces."""

    def __init__(self, matrices_NK: Sequence[torch.Tensor], max_products: int) -> None:
        """`max_products` bounds B * C of a call."""
        self._num_outputs, self._num_inputs = matrices_NK[0].shape
        self._pieces = max(-(-self._num_outputs // MAX_ROW_WIDTH), torch.get_num_threads())
        self._width = -(-self._num_outputs // (16 * self._pieces)) * 16
        missing = self._pieces * self._width - self._num_outputs
        self._is_padded = missing > 0
        self._rows = torch.cat(
            [
                F.pad(matrix, (0, 0, 0, missing)).unflatten(0, (self._pieces, -1)).transpose(1, 2)
                for matrix in matrices_NK
            ]
        ).flatten(0, 1)
        self._ids = torch.arange(self._rows.shape[0], dtype=torch.int32)
        self._ids_EX = self._ids.view(len(matrices_NK), -1)
        self._starts = torch.arange(max_products * self._pieces, dtype=torch.int32)
        self._starts *= self._num_inputs
        self._starts_of_each = self._starts[: len(matrices_NK) * self._pieces]

    def linear(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x @ W.T with the table's only matrix, [T, N]."""
        return self._every(x_TK, x_TK.shape[0])

    def each(self, x_TEK: torch.Tensor) -> torch.Tensor:
        """x[:, e] @ matrix[e].T for every matrix, [T, E, N]."""
        num_rows, num_matrices, _ = x_TEK.shape
        sums = self._every(x_TEK.reshape(num_rows * num_matrices, -1), num_rows)
        return sums.unflatten(0, (num_rows, num_matrices))

    def sums(self, x_BCK: torch.Tensor, matrices_BC: torch.Tensor) -> torch.Tensor:
        """sum over c of x[b, c] @ matrix[b, c].T, added in fp32, rounded once; [B, N]."""
        num_sums, num_matrices = matrices_BC.shape
        ids = torch.embedding(self._ids_EX, matrices_BC)
        if self._pieces > 1:
            ids = ids.view(num_sums, num_matrices, self._pieces, -1).transpose(1, 2)
            x_BCK = x_BCK[:, None].expand(-1, self._pieces, -1, -1)
        num_products = num_sums * self._pieces * num_matrices
        starts = self._starts[:num_products:num_matrices]
        return self._weighted_sums(x_BCK, ids.reshape(-1), starts)

    def _every(self, x_RK: torch.Tensor, num_rows: int) -> torch.Tensor:
        """All matrices in turn, `num_rows` times over."""
        ids, starts = self._ids, self._starts_of_each
        if num_rows > 1:
            ids = ids.expand(num_rows, -1).reshape(-1)
            starts = self._starts[: num_rows * starts.shape[0]]
        if self._pieces > 1:
            x_RK = x_RK[:, None].expand(-1, self._pieces, -1)
        return self._weighted_sums(x_RK, ids, starts)

    def _weighted_sums(
        self, weights: torch.Tensor, ids: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        found = torch.embedding_bag(self._rows, ids, starts, False, 0, False, weights.reshape(-1))
        sums = found[0].view(-1, self._pieces * self._width)
        return sums[:, : self._num_outputs] if self._is_padded else sums
