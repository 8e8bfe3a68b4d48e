"""How likely drafts are to be kept: by request and position, learned from what became of them.

Position i is observed when drafts 0..i-1 were accepted and draft i was proposed. Its conditional
acceptance is a mean over a request's own observations, the newest counting most, drawn towards the
prior while they are few. The prior is what all requests of this worker have shown, greedy ones and
sampled ones apart; how strongly it draws follows from how much requests differ. The survival of
draft i is the product of conditionals 0..i.

Pure: read by the draft controller, told by the engine after each verify step.

Shape letters: B requests asked for, K positions, R rows of the tables, O outcomes told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.types import RequestKey

Floats = NDArray[np.float64]

# Observations over which a request's own mean forgets, and over which the prior does.
_OWN_MEMORY = 40.0
_PRIOR_MEMORY = 500.0
# Steps over which what is not observed any more is forgotten, down to so many observations.
_FADING_STEPS = 200.0
_OWN_REST, _PRIOR_REST = 8.0, 20.0
# Own observations that weigh as much as the prior: at the start, and at least and most.
_START_OWN = 6.0
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
        self._counts_RK = np.zeros((0, max_drafts))
        self._means_RK = np.zeros((0, max_drafts))
        self._kinds_R = np.zeros(0, dtype=np.int64)
        self._outcomes: dict[int, tuple[int, int]] = {}
        last = len(prior.acceptance) - 1
        start_K = [prior.acceptance[min(i, last)] for i in range(max_drafts)]
        # By kind: sampled, greedy. `spreads`: variance of acceptance between requests.
        self._prior_counts = np.full((2, max_drafts), prior.weight)
        self._prior_means = np.array([start_K, start_K])
        self._spreads = self._prior_means * (1.0 - self._prior_means) / _START_OWN

    def observe(self, key: RequestKey, num_drafted: int, num_accepted: int) -> None:
        """What became of a request's drafts in one step. Raises KeyError when it is unknown."""
        assert num_accepted <= num_drafted <= len(self._positions_K), (num_accepted, num_drafted)
        row = self._rows[key]
        if row in self._outcomes:
            self._count()
        self._outcomes[row] = (num_drafted, num_accepted)

    def forget(self, key: RequestKey) -> None:
        """Frees a request's state, if it has any; what it has shown stays in the prior."""
        if key in self._rows:
            self._count()
            self._free.append(self._rows.pop(key))

    def survivals(self, keys: Sequence[RequestKey], are_greedy: Sequence[bool]) -> Floats:
        """Chance that draft i and all before it are kept, [B, K], never increasing along a row.
        A new request starts at the prior of its kind. To be called once a step: old observations
        count a little less each time."""
        self._count()
        self._counts_RK = _faded(self._counts_RK, _OWN_REST)
        self._prior_counts = _faded(self._prior_counts, _PRIOR_REST)
        rows_B = [self._rows.get(key, -1) for key in keys]
        if -1 in rows_B:
            known = zip(rows_B, keys, are_greedy, strict=True)
            rows_B = [self._begin(key, kind) if row < 0 else row for row, key, kind in known]
        counts_BK, means_BK = self._counts_RK[rows_B], self._means_RK[rows_B]
        # The best weight for a mean of n outcomes, of variance p (1 - p) each, is n / (n + weight).
        priors = self._prior_means
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
        """Takes the collected outcomes, at most one of a request, into means and priors."""
        if not self._outcomes:
            return
        rows_O = list(self._outcomes)
        drafted_O, accepted_O = np.array(list(self._outcomes.values())).T
        self._outcomes.clear()
        accepted_OK = self._positions_K < accepted_O[:, None]
        seen_OK = self._positions_K < np.minimum(drafted_O, accepted_O + 1)[:, None]
        counts_OK, means_OK = self._counts_RK[rows_O], self._means_RK[rows_O]
        kinds_O = self._kinds_R[rows_O]
        for kind in set(kinds_O.tolist()):
            is_kind_O1 = (kinds_O == kind)[:, None]
            self._count_prior(kind, accepted_OK, seen_OK & is_kind_O1, counts_OK, means_OK)
        counts_OK = np.minimum(counts_OK + seen_OK, _OWN_MEMORY)
        self._counts_RK[rows_O] = counts_OK
        self._means_RK[rows_O] += seen_OK * (accepted_OK - means_OK) / np.maximum(counts_OK, 1.0)

    def _count_prior(
        self,
        kind: int,
        accepted_OK: NDArray[np.bool_],
        seen_OK: NDArray[np.bool_],
        counts_OK: Floats,
        means_OK: Floats,
    ) -> None:
        mean_K, spread_K = self._prior_means[kind], self._spreads[kind]
        num_seen_K = seen_OK.sum(0)
        total_K = np.minimum(self._prior_counts[kind] + num_seen_K, _PRIOR_MEMORY)
        total_K = np.maximum(total_K, num_seen_K)
        surprise_OK = (accepted_OK - mean_K) * seen_OK
        # Noise of an outcome and noise of a request's mean are independent: the mean of their
        # product is the variance of what lies behind both.
        tells_OK = seen_OK & (counts_OK >= _TELLING)
        spread_OK = surprise_OK * (means_OK - mean_K) - spread_K
        self._spreads[kind] += (spread_OK * tells_OK).sum(0) / total_K
        self._prior_means[kind] += surprise_OK.sum(0) / total_K
        self._prior_counts[kind] = total_K


def _faded(counts: Floats, rest: float) -> Floats:
    return np.maximum(counts * (1.0 - 1.0 / _FADING_STEPS), np.minimum(counts, rest))
