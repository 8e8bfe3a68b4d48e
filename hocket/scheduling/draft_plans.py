"""The ways to share drafts out in one step that are worth a look: what each brings and costs.

For a given number of draft passes D, drafts are given in the order of their survival. It falls with
depth, so the first m of this order may stand together, and no m others bring more tokens. All
(D, m) are priced at once. When a draft pass costs linearly by rows, the best of them is the best of
all plans; for any costs it is at least as good as giving everyone the same number. Where the
slowest request has a target, the order in which each draft goes to the request that has least is
looked at, too.

The first draft pass writes the MTP entries of tokens emitted since a request's last drafts, one at
least; it is priced with one row for each request that drafts. To charge what has piled up to the
step that happens to write it would keep a batch from drafting just because it has not for long.

Shape letters: B requests, K positions of a draft, N drafts that the caps allow, M = N + 1 prefixes
of an order (with two orders: of both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Plans this near to the best are its equals; the one with the fewest drafts is taken.
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Batch:
    """The requests of one step, K >= 1. `caps_B`: most drafts of each. A step that drafts at all
    makes `min_passes` draft passes, these with the rows of the first: one for each MTP module."""

    survivals_BK: Floats
    caps_B: Ints
    min_passes: int = 1

    @property
    def size(self) -> int:
        return len(self.caps_B)


@dataclass(frozen=True, slots=True)
class Tables:
    """Seconds of one pass by its number of rows, from 0 rows to more than any plan has."""

    draft: Floats
    verify: Floats


@dataclass(frozen=True, slots=True)
class Price:
    """What a plan is expected to emit, in all and for the request that gets least, and to cost."""

    tokens: float
    slowest: float
    seconds: float


class DraftPlans:
    """The best plan for each number of draft passes, D = 0 to K. Every pass costs at least one
    row, as in a group of ranks where another one has drafts at that depth.

    Best is most tokens per second among the plans that give every request `tokens_per_s`; where
    none does, the fastest slowest request.
    """

    def __init__(self, batch: Batch, tables: Tables, tokens_per_s: float = 0.0) -> None:
        self.batch = batch
        self._tables = tables
        num_positions: int = batch.survivals_BK.shape[1]
        self._positions_K1: Ints = np.arange(num_positions, dtype=np.int64)[:, None]
        allowed_KB = self._positions_K1 < batch.caps_B
        self._position_N, self._request_N = np.nonzero(allowed_KB)
        survival_N = batch.survivals_BK.T[allowed_KB]
        self._orders = [np.argsort(-survival_N, kind="stable")]
        if tokens_per_s:
            self._orders.append(np.argsort(self._levels(), kind="stable"))
        priced = [self._price_prefixes(order, survival_N[order]) for order in self._orders]
        self._given_KM, tokens_KM, seconds_KM = (
            np.hstack(part) for part in zip(*priced, strict=True)
        )
        if tokens_per_s:
            slowest_KM = np.hstack([self._slowest(order) for order in self._orders])
        else:
            slowest_KM = np.ones_like(tokens_KM)
        self._best_K = _best(self._given_KM, tokens_KM, slowest_KM, seconds_KM, tokens_per_s)

        self.prices = [self.price(np.zeros(batch.size, dtype=np.int64), 0)]
        for depth, best in enumerate(self._best_K):
            at = (depth, best)
            price = Price(float(tokens_KM[at]), float(slowest_KM[at]), float(seconds_KM[at]))
            self.prices.append(price)

    def drafts(self, depth: int) -> Ints:
        """The best plan of at most `depth` draft passes: drafts by request, [B]."""
        if depth == 0:
            return np.zeros(self.batch.size, dtype=np.int64)
        which, length = divmod(int(self._best_K[depth - 1]), len(self._request_N) + 1)
        given = self._orders[which][:length]
        given = given[self._position_N[given] < depth]
        return np.bincount(self._request_N[given], minlength=self.batch.size)

    @property
    def max_depth(self) -> int:
        """K."""
        return len(self._positions_K1)

    def price(self, drafts_B: Ints, depth: int, late_rows: int = 0) -> Price:
        """That of any plan of at most `depth` draft passes, with more rows in the first one."""
        batch = self.batch
        given_KB = self._positions_K1 < drafts_B
        rows_K = given_KB.sum(1)
        rows_K[0] += late_rows
        draft_s = float(self._draft_s(rows_K)[:depth].sum())
        gain_B = (given_KB * batch.survivals_BK.T).sum(0)
        verify_s = self._tables.verify[max(1, batch.size + int(drafts_B.sum()))]
        return Price(
            tokens=batch.size + float(gain_B.sum()),
            slowest=1.0 + float(gain_B.min(initial=np.inf)),
            seconds=draft_s + float(verify_s),
        )

    def _draft_s(self, rows_K: Ints) -> Floats:
        """Seconds of the draft passes that each depth 1 to K adds, [K] or [K, M]."""
        draft_K = self._tables.draft[np.maximum(rows_K, 1)]
        num_first = self.batch.min_passes
        draft_K[0] *= num_first
        draft_K[1:num_first] = 0.0
        return draft_K

    def _price_prefixes(self, order: Ints, survival_N: Floats) -> tuple[Ints, Floats, Floats]:
        """Drafts given, tokens and seconds, each [K, M]: of the first m drafts of the order, those
        at positions 0 to K-1 of the table's row."""
        batch = self.batch
        is_at_KN = self._position_N[order] == self._positions_K1
        rows_KM = _prefix_sums(is_at_KN)
        given_KM = rows_KM.cumsum(0)
        tokens_KM = batch.size + _prefix_sums(is_at_KN * survival_N).cumsum(0)
        verify_KM = self._tables.verify[np.maximum(batch.size + given_KM, 1)]
        return given_KM, tokens_KM, self._draft_s(rows_KM).cumsum(0) + verify_KM

    def _levels(self) -> Floats:
        """Tokens that a draft's request is expected to get from the drafts before this one."""
        survivals_BK = self.batch.survivals_BK
        level_BK = np.cumsum(survivals_BK, axis=1) - survivals_BK
        return level_BK[self._request_N, self._position_N]

    def _slowest(self, order: Ints) -> Floats:
        """Expected tokens of the request that gets least. A request is at the level before its
        next draft in the order, or has all that it may have."""
        batch = self.batch
        level_KN = np.where(
            self._position_N[order] <= self._positions_K1, self._levels()[order], np.inf
        )
        ahead_KN = np.minimum.accumulate(level_KN[:, ::-1], axis=1)[:, ::-1]
        allowed_KB = self._positions_K1 < batch.caps_B
        full_K = (allowed_KB * batch.survivals_BK.T).cumsum(0).min(1, initial=np.inf)
        ahead_KM = np.hstack([ahead_KN, np.full((len(full_K), 1), np.inf)])
        return 1.0 + np.minimum(ahead_KM, full_K[:, None])


def _prefix_sums(values: NDArray[Any]) -> NDArray[Any]:
    """Sums of the first 0, 1, .. all entries along the last axis."""
    sums = np.zeros(
        (*values.shape[:-1], values.shape[-1] + 1), dtype=float if values.dtype == float else int
    )
    values.cumsum(-1, out=sums[..., 1:])
    return sums


def _best(
    given_KM: Ints, tokens_KM: Floats, slowest_KM: Floats, seconds_KM: Floats, tokens_per_s: float
) -> Ints:
    """The best column of each row."""
    score_KM = tokens_KM / seconds_KM
    if tokens_per_s:
        pace_KM = slowest_KM / seconds_KM
        meets_KM = pace_KM >= tokens_per_s
        score_KM = np.where(
            meets_KM.any(1, keepdims=True), np.where(meets_KM, score_KM, -1.0), pace_KM
        )
    is_best_KM = score_KM >= score_KM.max(1, keepdims=True) * (1.0 - _EQUAL)
    return np.where(is_best_KM, given_KM, np.iinfo(np.int64).max).argmin(1)
