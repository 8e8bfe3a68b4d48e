"""How tokens reach the experts that they chose, and how the results come back.

The MoE layer takes a `TokenDispatcher` and does not know how many ranks exist: it dispatches,
runs its own experts on the rows it is given, and combines. `LocalDispatcher` is the case of one
rank that owns all experts.

Shape letters: T tokens of this rank, K experts per token, H hidden size, R rows given to the
experts of this rank, sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class ExpertRows:
    """Rows for this rank's experts. Experts without rows have no segment."""

    hidden_RH: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    """(expert, first row, row behind the last); each a multiple of the row tile."""
    rows_of_TK: torch.Tensor | None
    """int64 [T, K]: where a token's k-th expert's row went; None where rows are in that order."""


class TokenDispatcher(Protocol):
    """Moves rows to experts and back. A token's own results must not depend on its company."""

    def dispatch(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, row_tile: int
    ) -> ExpertRows:
        """Gather each expert's rows; a segment is filled up to a multiple of `row_tile` with
        rows whose results nobody reads."""
        ...

    def combine(
        self, result_RH: torch.Tensor, rows: ExpertRows, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """sum over k of weight * result, fp32 [T, H], added in order of k."""
        ...


class LocalDispatcher:
    """All experts are here: sorting is all the dispatch there is."""

    def dispatch(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, row_tile: int
    ) -> ExpertRows:
        chosen: list[list[int]] = experts_TK.tolist()
        if len(chosen) == 1 and row_tile == 1:
            experts = chosen[0]
            return ExpertRows(
                hidden_RH=hidden_TH.expand(len(experts), -1),
                segments=tuple((expert, k, k + 1) for k, expert in enumerate(experts)),
                rows_of_TK=None,
            )
        tokens_of: dict[int, list[tuple[int, int]]] = {}
        for token, experts in enumerate(chosen):
            for k, expert in enumerate(experts):
                tokens_of.setdefault(expert, []).append((token, k))
        segments: list[tuple[int, int, int]] = []
        tokens: list[int] = []
        rows_of = [[0] * len(chosen[0]) for _ in chosen]
        for expert in sorted(tokens_of):
            start = len(tokens)
            for token, k in tokens_of[expert]:
                rows_of[token][k] = len(tokens)
                tokens.append(token)
            tokens += [tokens[-1]] * (-len(tokens) % row_tile)
            segments.append((expert, start, len(tokens)))
        index = torch.tensor(tokens, device=hidden_TH.device)
        return ExpertRows(
            hidden_RH=hidden_TH.index_select(0, index),
            segments=tuple(segments),
            rows_of_TK=torch.tensor(rows_of, device=hidden_TH.device),
        )

    def combine(
        self, result_RH: torch.Tensor, rows: ExpertRows, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        if rows.rows_of_TK is not None:
            result_RH = result_RH.index_select(0, rows.rows_of_TK.view(-1))
        chosen_TKH = result_RH.float().view(*weights_TK.shape, -1)
        return torch.bmm(weights_TK[:, None], chosen_TKH)[:, 0]
