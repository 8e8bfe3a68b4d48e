"""How tokens reach the experts that they chose, and how the results come back.

The MoE layer takes a `TokenDispatcher` and does not know how many ranks exist: it dispatches,
runs its own experts on the rows it is given, and combines. `LocalDispatcher` is the case of one
rank that owns all experts; `AllToAllDispatcher` sends rows to the ranks that own their experts.
Both give an expert the same rows in tiles and add results in the same order, so in batch-invariant
mode a token's bits do not depend on which of them is used.

Shape letters: T tokens of this rank, K experts per token, H hidden size, R rows given to the
experts of this rank, sorted by expert, E experts, N = T * K rows sent, M rows received, G ranks, L
experts of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hocket.parallel.expert_placement import ExpertPlacement
from hocket.parallel.rank_group import RankGroup


@dataclass(frozen=True)
class WayBack:
    """How the results of received rows return to the ranks that sent them."""

    rows_of_M: torch.Tensor
    """int64 [M]: where a received row is among the experts' rows."""
    received: list[int]
    """Rows from each rank."""
    sent: list[int]
    """Rows to each rank."""


@dataclass(frozen=True)
class ExpertRows:
    """Rows for this rank's experts. Experts without rows have no segment."""

    hidden_RH: torch.Tensor
    segments: tuple[tuple[int, int, int], ...]
    """(expert, first row, row behind the last); each a multiple of the row tile."""
    rows_of_TK: torch.Tensor | None
    """int64 [T, K]: where a token's k-th expert's row went, among `hidden_RH` or, with a way back,
    among the rows sent; None where rows are in that order."""
    way_back: WayBack | None = None
    """Set when rows come from several ranks."""


class TokenDispatcher(Protocol):
    """Moves rows to experts and back. A token's own results must not depend on its company."""

    def experts_here(self, num_experts: int) -> range:
        """The experts of this rank: the only ones that rows are given to, and that it reads."""
        ...

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

    def experts_here(self, num_experts: int) -> range:
        return range(num_experts)

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
        return _weighted_sum(result_RH, weights_TK)


class AllToAllDispatcher:
    """Experts are spread over the ranks of a group; every call is a collective of all of them.

    Three exchanges per layer: how many rows go to each expert, the rows, the results. A rank
    without tokens takes part with no rows. Row counts become host integers, so a step cannot be
    captured into a CUDA graph.
    """

    def __init__(self, group: RankGroup, placement: ExpertPlacement) -> None:
        self._group = group
        self._placement = placement
        self._experts = placement.experts_of(group.rank)
        # Of each rank; and of this one, as often as there are ranks that send rows to it.
        self._counts_G = placement.counts()
        self._own_G = [len(self._experts)] * group.size

    def experts_here(self, num_experts: int) -> range:
        assert num_experts == self._placement.num_experts, num_experts
        return self._experts

    def dispatch(
        self, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, row_tile: int
    ) -> ExpertRows:
        order_N = experts_TK.reshape(-1).argsort(stable=True)
        counts_E = torch.bincount(experts_TK.reshape(-1), minlength=self._placement.num_experts)
        sent = [int(part.sum()) for part in counts_E.split(self._counts_G)]
        counts_GL = self._group.all_to_all(counts_E, self._own_G, self._counts_G)
        counts_GL = counts_GL.view(self._group.size, -1)
        received = counts_GL.sum(1).tolist()
        tokens_N = order_N.div(experts_TK.shape[1], rounding_mode="floor")
        arrived_MH = self._group.all_to_all(hidden_TH.index_select(0, tokens_N), received, sent)
        segments, sources, rows_of = self._by_expert(counts_GL.tolist(), row_tile)
        rows_of_N = torch.empty_like(order_N)
        rows_of_N[order_N] = torch.arange(order_N.shape[0], device=order_N.device)
        device = hidden_TH.device
        return ExpertRows(
            hidden_RH=arrived_MH.index_select(0, torch.tensor(sources, device=device).long()),
            segments=segments,
            rows_of_TK=rows_of_N.view(experts_TK.shape),
            way_back=WayBack(torch.tensor(rows_of, device=device).long(), received, sent),
        )

    def combine(
        self, result_RH: torch.Tensor, rows: ExpertRows, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        way_back, rows_of_TK = rows.way_back, rows.rows_of_TK
        assert way_back is not None, "rows of another dispatcher"
        assert rows_of_TK is not None, "rows of another dispatcher"
        result_MH = result_RH.index_select(0, way_back.rows_of_M)
        result_NH = self._group.all_to_all(result_MH, way_back.sent, way_back.received)
        return _weighted_sum(result_NH.index_select(0, rows_of_TK.view(-1)), weights_TK)

    def _by_expert(
        self, counts_GL: Sequence[Sequence[int]], row_tile: int
    ) -> tuple[tuple[tuple[int, int, int], ...], list[int], list[int]]:
        """From rows in order of (sending rank, expert) to rows by expert, in full tiles.

        Returns the segments, for each row the received one that it is, and for each received row
        where it went.
        """
        starts: list[list[int]] = []
        num_rows = 0
        for counts_L in counts_GL:
            starts.append([])
            for count in counts_L:
                starts[-1].append(num_rows)
                num_rows += count
        segments: list[tuple[int, int, int]] = []
        sources: list[int] = []
        rows_of = [0] * num_rows
        for local, expert in enumerate(self._experts):
            first = len(sources)
            for rank, counts_L in enumerate(counts_GL):
                start, count = starts[rank][local], counts_L[local]
                rows_of[start : start + count] = range(len(sources), len(sources) + count)
                sources += range(start, start + count)
            if len(sources) > first:
                sources += [sources[-1]] * ((first - len(sources)) % row_tile)
                segments.append((expert, first, len(sources)))
        return tuple(segments), sources, rows_of


def _weighted_sum(result_NH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """sum over k of weight * result, fp32 [T, H]; rows are in order of (token, k)."""
    chosen_TKH = result_NH.float().view(*weights_TK.shape, result_NH.shape[-1])
    return torch.bmm(weights_TK[:, None], chosen_TKH)[:, 0]
