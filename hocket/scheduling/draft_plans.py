"""The ways to share drafts out in one step that are worth a look: what each brings and costs.

For a given number of draft passes D, drafts are given in the order of their survival. It falls with
depth, so the first m of this order may stand together, and no m others bring more tokens. All
(D, m) are priced at once. When a draft pass costs linearly by rows (and there is one MTP module),
the best of them is the best of all plans; for any costs it is at least as good as giving everyone
the same number. Where the slowest request has a target, the order in which each draft goes to the
request that has least is looked at, too.

The first draft pass writes the MTP entries of tokens emitted since a request's last drafts. It is
priced with as many rows as the plan is expected to leave for the next one: of each request that
drafts one, and its accepted drafts. To charge what has piled up to the step that happens to write
it would keep a batch from drafting just because it has not for long.

Shape letters: B requests, K positions of a draft, N drafts that the caps allow, M = N + 1 prefixes
of an order (with two orders: of both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Plans this near to the best are its equals; the one with the fewest drafts is taken.
_EQUAL = 1e-9
_MANY = 2**62


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
    """Seconds of one pass by its number of rows, as many as a plan may have. One without rows costs
    what one row costs."""

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

    def __init__(
        self, batch: Batch, tables: Tables, tokens_per_s: float = 0.0, worth_of_none: float = 1.0
    ) -> None:
        """`worth_of_none`: factor on the tokens of a step without drafts, so that others must bring
        some more to be taken."""
        self.batch = batch
        self._tables = tables
        self.max_depth: int = batch.survivals_BK.shape[1]
        self._positions_K1 = np.arange(self.max_depth, dtype=np.int64)[:, None]
        self._position_N, self._request_N = np.nonzero(self._positions_K1 < batch.caps_B)
        # Expected tokens of a request from its first d drafts, d = 0 to K.
        self._levels_BD = np.zeros((batch.size, self.max_depth + 1))
        np.cumsum(batch.survivals_BK, axis=1, out=self._levels_BD[:, 1:])
        survival_N = batch.survivals_BK[self._request_N, self._position_N]
        self._orders = [np.argsort(-survival_N, kind="stable")]
        if tokens_per_s:
            level_N = self._levels_BD[self._request_N, self._position_N]
            self._orders.append(np.argsort(level_N, kind="stable"))
        prefixes = [self._prefixes(order, survival_N, tokens_per_s > 0) for order in self._orders]
        given_KM, tokens_KM, slowest_KM, seconds_KM = (
            parts[0] if len(parts) == 1 else np.hstack(parts)
            for parts in zip(*prefixes, strict=True)
        )
        self._best_K = _best(given_KM, tokens_KM, slowest_KM, seconds_KM, tokens_per_s)

        at = (self._positions_K1[:, 0], self._best_K)
        best = (tokens_KM[at].tolist(), slowest_KM[at].tolist(), seconds_KM[at].tolist())
        slowest = 1.0 if batch.size else math.inf
        self._none_tokens = worth_of_none * batch.size
        nothing = Price(self._none_tokens, slowest, float(tables.verify[batch.size]))
        self.prices = [nothing, *map(Price, *best)]

    @property
    def best_depth(self) -> int:
        """From 1 to K, by tokens per second."""
        speeds = [price.tokens / price.seconds for price in self.prices[1:]]
        return 1 + speeds.index(max(speeds))

    def least_given(self, depth: int) -> float:
        """The chance from which on a draft is given in the best plan of at most `depth` passes: in
        the middle between the least likely one that is and the likeliest one that is not. Where all
        are given, from which on one more would pay."""
        drafts_B1 = self.drafts(depth)[:, None]
        positions_K = self._positions_K1[:, 0]
        survivals_BK, most_B = self.batch.survivals_BK, np.minimum(self.batch.caps_B, depth)
        given_BK = positions_K < drafts_B1
        others_BK = ~given_BK & (positions_K < most_B[:, None])
        if not given_BK.any():
            return math.inf
        least = float(survivals_BK[given_BK].min())
        if others_BK.any():
            return (least + min(least, float(survivals_BK[others_BK].max()))) / 2
        price, num_rows = self.prices[depth], self.batch.size + int(drafts_B1.sum())
        row_s = float(np.diff(self._tables.verify[num_rows - 1 :][:2]).sum())
        row_s += float(np.diff(self._tables.draft[self.batch.size - 1 :][:2]).sum())
        return min(least, row_s * price.tokens / price.seconds)

    def drafts(self, depth: int) -> Ints:
        """The best plan of at most `depth` draft passes: drafts by request, [B]."""
        if depth == 0:
            return np.zeros(self.batch.size, dtype=np.int64)
        which, length = divmod(int(self._best_K[depth - 1]), len(self._request_N) + 1)
        given = self._orders[which][:length]
        given = given[self._position_N[given] < depth]
        return np.bincount(self._request_N[given], minlength=self.batch.size)

    def price(self, drafts_B: Ints, depth: int, late_rows: int = 0) -> Price:
        """That of any plan of at most `depth` draft passes, with more rows in the first one."""
        size = self.batch.size
        got_B = self._levels_BD[np.arange(size), drafts_B]
        rows_K = size - np.bincount(drafts_B, minlength=self.max_depth + 1).cumsum()[:-1]
        accepted = float(got_B.sum())
        draft_s = self._draft_s(rows_K, rows_K[0] + accepted + late_rows)[depth - 1] if depth else 0
        return Price(
            tokens=size + accepted if depth else self._none_tokens,
            slowest=1.0 + float(got_B.min(initial=math.inf)),
            seconds=float(draft_s + self._tables.verify[size + int(rows_K.sum())]),
        )

    def _draft_s(self, rows_K: Ints, first_rows: Floats | float) -> Floats:
        """Seconds of all draft passes of depths 1 to K, [K] or [K, M]; with `first_rows` in the
        first one."""
        table, num_first = self._tables.draft, self.batch.min_passes
        draft_K = table.take(rows_K)
        draft_K[:num_first] = 0.0
        draft_K = draft_K.cumsum(axis=0)
        draft_K += num_first * np.interp(first_rows, np.arange(len(table)), table)
        return draft_K

    def _prefixes(
        self, order: Ints, survival_N: Floats, has_target: bool
    ) -> tuple[Ints, Floats, Floats, Floats]:
        """Drafts given, tokens, those of the slowest request (where that matters) and seconds,
        each [K, M]: row k is of those among the first m drafts of the order at positions 0 to k."""
        within_KN = self._position_N[order] <= self._positions_K1
        shape = (self.max_depth, len(order) + 1)
        given_KM, tokens_KM = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        np.cumsum(within_KN, axis=1, out=given_KM[:, 1:])
        np.cumsum(within_KN * survival_N[order], axis=1, out=tokens_KM[:, 1:])
        tokens_KM += self.batch.size
        rows_KM = given_KM.copy()
        rows_KM[1:] -= given_KM[:-1]
        seconds_KM = self._draft_s(rows_KM, tokens_KM - self.batch.size + given_KM[0])
        seconds_KM += self._tables.verify.take(given_KM + self.batch.size)
        slowest_KM = self._slowest(order) if has_target else tokens_KM
        return given_KM, tokens_KM, slowest_KM, seconds_KM

    def _slowest(self, order: Ints) -> Floats:
        """Expected tokens of the request that gets least. A request is at the level before its
        next draft in the order, or has all that it may have."""
        position_N, request_N = self._position_N[order], self._request_N[order]
        is_within_KN = position_N <= self._positions_K1
        level_KN = np.where(is_within_KN, self._levels_BD[request_N, position_N], math.inf)
        ahead_KN = np.minimum.accumulate(level_KN[:, ::-1], axis=1)[:, ::-1]
        most_KB = np.minimum(self._positions_K1 + 1, self.batch.caps_B)
        full_KB = self._levels_BD[np.arange(self.batch.size), most_KB]
        full_K1 = full_KB.min(axis=1, keepdims=True, initial=math.inf)
        ahead_KM = np.hstack([ahead_KN, np.full((self.max_depth, 1), math.inf)])
        return 1.0 + np.minimum(ahead_KM, full_K1)


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
    return np.where(is_best_KM, given_KM, _MANY).argmin(1)
