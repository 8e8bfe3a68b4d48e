"""How likely drafts are to be kept: by request and position, learned from what became of them.

Position i is observed when drafts 0..i-1 were accepted and draft i was proposed. Its conditional
acceptance is a mean over a request's own observations, the newest counting most, drawn towards the
prior while they are few. The prior is what all requests of this worker have shown, greedy ones and
sampled ones apart; how strongly it draws follows from how much requests differ. The survival of
draft i is the product of conditionals 0..i.

Pure: read by the draft controller, told by the engine after each verify step.

Shape letters: B requests asked for, K positions, R rows of the tables; U requests that outcomes
were told of, O outcomes of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hocket.types import RequestKey

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Observations over which a request's own mean forgets, and over which the prior does.
_OWN_MEMORY = 40.0
_PRIOR_MEMORY = 500.0
# Steps over which what is not observed any more is forgotten, down to so many observations.
_FADING_STEPS = 200.0
_OWN_REST, _PRIOR_REST = 8.0, 20.0
# Own observations that weigh as much as the prior: at the start, and at least and most.
_START_OWN = 12.0
_LEAST_OWN, _MOST_OWN = 2.0, 100.0
# Own observations from which on a request tells how requests differ.
_TELLING = 8.0


@dataclass(frozen=True, slots=True)
class AcceptancePrior:
    """What drafts are worth before any was seen. `acceptance[i]`: the chance that draft i is kept
    when those before it were; the last entry holds for all further ones. `weight`: the number of
    observations that it is worth."""

    acceptance: tuple[float, ...] = (0.8, 0.7, 0.6)
    weight: float = 20.0

    def __post_init__(self) -> None:
        assert self.acceptance, self
        assert all(0.0 <= chance <= 1.0 for chance in self.acceptance), self
        assert self.weight >= 1.0, self


class SurvivalEstimates:
    """Of the requests that run on one worker, up to `max_drafts` positions.

    A request has a row in the tables from its first `survivals` until it is forgotten. Outcomes
    are collected and counted all at once when somebody asks.
    """

    def __init__(self, prior: AcceptancePrior, max_drafts: int) -> None:
        self._positions_K = np.arange(max_drafts)
        self._rows: dict[RequestKey, int] = {}
        self._free: list[int] = []
        self._leaving: list[int] = []
        self._counts_RK = np.zeros((0, max_drafts))
        self._means_RK = np.zeros((0, max_drafts))
        self._kinds_R = np.zeros(0, dtype=np.int64)
        # (drafted, accepted) of each step, by row.
        self._outcomes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        last = len(prior.acceptance) - 1
        start_K = [prior.acceptance[min(i, last)] for i in range(max_drafts)]
        # By kind: sampled, greedy. `spreads`: variance of acceptance between requests.
        self._start = start_K
        self._start_weight = prior.weight
        self._prior_counts = np.full((2, max_drafts), prior.weight)
        self._prior_means = np.array([start_K, start_K])
        self._new_survivals: list[list[float]] = self._prior_means.cumprod(axis=1).tolist()
        self._spreads = self._prior_means * (1.0 - self._prior_means) / _START_OWN

    def observe(self, key: RequestKey, num_drafted: int, num_accepted: int) -> None:
        """What became of a request's drafts in one step. Raises KeyError when it had any and is
        unknown."""
        assert num_accepted <= num_drafted <= len(self._positions_K), (num_accepted, num_drafted)
        if num_drafted:
            self._outcomes[self._rows[key]].append((num_drafted, num_accepted))

    def join(self, key: RequestKey, is_greedy: bool) -> list[float]:
        """A request that `survivals` was not asked about yet, K chances of a new one of its kind;
        of a known one, too."""
        if key not in self._rows:
            self._begin(key, is_greedy)
        return self._new_survivals[int(is_greedy)]

    def forget(self, key: RequestKey) -> None:
        """Frees a request's state, if it has any; what it has shown stays in the prior."""
        if key in self._rows:
            self._leaving.append(self._rows.pop(key))

    def survivals(
        self, keys: Sequence[RequestKey], are_greedy: Sequence[bool], num_steps: int = 1
    ) -> Floats:
        """Chance that draft i and all before it are kept, [B, K], never increasing along a row.
        A new request starts at the prior of its kind. Old observations count a little less with
        each of the `num_steps` since it was last asked."""
        self._count()
        self._counts_RK = _faded(self._counts_RK, _OWN_REST, num_steps)
        self._prior_counts = _faded(self._prior_counts, _PRIOR_REST, num_steps)
        rows_B = [self._rows.get(key, -1) for key in keys]
        if -1 in rows_B:
            known = zip(rows_B, keys, are_greedy, strict=True)
            rows_B = [self._begin(key, kind) if row < 0 else row for row, key, kind in known]
        counts_BK, means_BK = self._counts_RK[rows_B], self._means_RK[rows_B]
        # The best weight for a mean of n outcomes, of variance p (1 - p) each, is n / (n + weight).
        priors = self._tied_priors()
        self._new_survivals = priors.cumprod(axis=1).tolist()
        weights = priors * (1.0 - priors) / np.maximum(self._spreads, 1e-4)
        weights = np.minimum(np.maximum(weights, _LEAST_OWN), _MOST_OWN)
        kinds_B = self._kinds_R[rows_B]
        weights_BK, drawn_BK = weights[kinds_B], (weights * priors)[kinds_B]
        conditional_BK: Floats = (counts_BK * means_BK + drawn_BK) / (counts_BK + weights_BK)
        # Not a rounding error above 1: a deeper draft must never look likelier.
        return np.minimum(conditional_BK, 1.0).cumprod(axis=1)

    def prior(self, is_greedy: bool) -> tuple[float, ...]:
        """Conditional acceptance by position, over all requests of a kind."""
        self._count()
        return tuple(self._prior_means[int(is_greedy)].tolist())

    def __len__(self) -> int:
        return len(self._rows)

    def _tied_priors(self) -> Floats:
        """The priors by kind, [2, K]. Where the position before went better than at first assumed,
        so will one of which little is known."""
        # Few numbers, one after the other: plain ones are faster than arrays.
        priors: list[list[float]] = self._prior_means.tolist()
        for prior, counts in zip(priors, self._prior_counts.tolist(), strict=True):
            for i, (before, assumed) in enumerate(pairwise(self._start), start=1):
                if before > 0.0:
                    tied = min(max(assumed * prior[i - 1] / before, assumed), 1.0)
                    prior[i] += min(self._start_weight / counts[i], 1.0) * (tied - assumed)
        return np.minimum(priors, 1.0)

    def _begin(self, key: RequestKey, is_greedy: bool) -> int:
        if not self._free:
            num_rows, more = len(self._kinds_R), max(16, len(self._kinds_R))
            self._free = list(range(num_rows, num_rows + more))
            self._counts_RK = np.pad(self._counts_RK, ((0, more), (0, 0)))
            self._means_RK = np.pad(self._means_RK, ((0, more), (0, 0)))
            self._kinds_R = np.pad(self._kinds_R, (0, more))
        row = self._rows[key] = self._free.pop()
        self._counts_RK[row] = self._means_RK[row] = 0.0
        self._kinds_R[row] = int(is_greedy)
        return row

    def _count(self) -> None:
        """Takes the collected outcomes into means and priors; then rows may have new owners."""
        self._free += self._leaving
        self._leaving.clear()
        if not self._outcomes:
            return
        rows_U = list(self._outcomes)
        most = max(map(len, self._outcomes.values()))
        padded = [told + [(0, 0)] * (most - len(told)) for told in self._outcomes.values()]
        self._outcomes.clear()
        drafted_UO1, accepted_UO1 = np.array(padded)[..., None].transpose(2, 0, 1, 3)
        seen_UOK = self._positions_K < np.minimum(drafted_UO1, accepted_UO1 + 1)
        kept_UOK = seen_UOK & (self._positions_K < accepted_UO1)

        # Before each outcome, and then behind all.
        counts_UK, means_UK = self._counts_RK[rows_U], self._means_RK[rows_U]
        counts_UOK = counts_UK[:, None] + seen_UOK.cumsum(axis=1) - seen_UOK
        sums_UOK = (counts_UK * means_UK)[:, None] + kept_UOK.cumsum(axis=1) - kept_UOK
        means_UOK = sums_UOK / np.maximum(counts_UOK, 1.0)
        kinds_U = self._kinds_R[rows_U]
        for kind in set(kinds_U.tolist()):
            of_kind = kinds_U == kind
            told = (part[of_kind] for part in (seen_UOK, kept_UOK, counts_UOK, means_UOK))
            self._count_prior(kind, *told)
        num_UK = seen_UOK.sum(axis=1)
        counts_UK = np.minimum(counts_UK + num_UK, _OWN_MEMORY)
        self._counts_RK[rows_U] = counts_UK
        surprise_UK = kept_UOK.sum(axis=1) - num_UK * means_UK
        self._means_RK[rows_U] += surprise_UK / np.maximum(np.maximum(counts_UK, num_UK), 1.0)

    def _count_prior(
        self, kind: int, seen_UOK: Bools, kept_UOK: Bools, counts_UOK: Floats, means_UOK: Floats
    ) -> None:
        mean_K, spread_K = self._prior_means[kind], self._spreads[kind]
        num_seen_K = seen_UOK.sum((0, 1))
        total_K = np.minimum(self._prior_counts[kind] + num_seen_K, _PRIOR_MEMORY)
        total_K = np.maximum(total_K, num_seen_K)
        surprise_UOK = kept_UOK - mean_K * seen_UOK
        # Noise of an outcome and noise of a request's mean are independent: the mean of their
        # product is the variance of what lies behind both.
        tells_UOK = seen_UOK & (counts_UOK >= _TELLING)
        spread_UOK = surprise_UOK * (means_UOK - mean_K) - spread_K
        self._spreads[kind] += (spread_UOK * tells_UOK).sum((0, 1)) / total_K
        self._prior_means[kind] += surprise_UOK.sum((0, 1)) / total_K
        self._prior_counts[kind] = total_K


def _faded(counts: Floats, rest: float, num_steps: int) -> Floats:
    return np.maximum(counts * (1.0 - 1.0 / _FADING_STEPS) ** num_steps, np.minimum(counts, rest))
