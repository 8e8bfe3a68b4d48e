"""How likely drafts are to be kept: by request and position, learned from what became of them.

Position i is observed when drafts 0..i-1 were accepted and draft i was proposed. Its conditional
acceptance is a mean over a request's own observations, the newest counting most, drawn towards the
prior while there are few of them. The prior is what all requests of this worker have shown, greedy
ones and sampled ones apart. The survival of draft i is the product of conditionals 0..i.

Pure: read by the draft controller, told by the engine after each verify step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hocket.types import RequestKey

Floats = NDArray[np.float64]

# Observations over which a request's own mean forgets, and those of the prior.
_OWN_MEMORY = 40
_PRIOR_MEMORY = 500
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

    def at(self, position: int) -> float:
        return self.acceptance[min(position, len(self.acceptance) - 1)]


class _Prior:
    """Of all requests of a kind, by position: `means` of outcomes, and `spreads`, the variance of
    acceptance between requests."""

    __slots__ = ("counts", "means", "spreads")

    def __init__(self, start: AcceptancePrior, max_drafts: int) -> None:
        self.means = [start.at(i) for i in range(max_drafts)]
        self.counts = [start.weight] * max_drafts
        self.spreads = [mean * (1.0 - mean) / _START_OWN for mean in self.means]


class _Own:
    """Of one request, by position: a running mean at first, then an exponential one."""

    __slots__ = ("counts", "means", "prior")

    def __init__(self, prior: _Prior, max_drafts: int) -> None:
        self.means = [0.0] * max_drafts
        self.counts = [0.0] * max_drafts
        self.prior = prior

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        means, counts, prior = self.means, self.counts, self.prior
        for i in range(min(num_drafted, num_accepted + 1)):
            outcome = 1.0 if i < num_accepted else 0.0
            step = 1.0 / prior.counts[i]
            surprise = outcome - prior.means[i]
            if counts[i] >= _TELLING:
                # Noise of the outcome and noise of the mean are independent: on average this is the
                # variance of what lies behind both.
                spread = surprise * (means[i] - prior.means[i])
                prior.spreads[i] += (spread - prior.spreads[i]) * step
            prior.means[i] += surprise * step
            prior.counts[i] = min(prior.counts[i] + 1.0, _PRIOR_MEMORY)
            counts[i] = min(counts[i] + 1.0, _OWN_MEMORY)
            means[i] += (outcome - means[i]) / counts[i]


class SurvivalEstimates:
    """Of the requests that run on one worker, up to `max_drafts` positions."""

    def __init__(self, prior: AcceptancePrior, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._priors = {is_greedy: _Prior(prior, max_drafts) for is_greedy in (False, True)}
        self._own: dict[RequestKey, _Own] = {}

    def begin(self, key: RequestKey, is_greedy: bool) -> None:
        """Makes a request known, at the prior; nothing when it is."""
        if key not in self._own:
            self._own[key] = _Own(self._priors[is_greedy], self._max_drafts)

    def observe(self, key: RequestKey, num_drafted: int, num_accepted: int) -> None:
        """What became of a known request's drafts in one step."""
        assert num_accepted <= num_drafted <= self._max_drafts, (num_accepted, num_drafted)
        self._own[key].observe(num_drafted, num_accepted)

    def forget(self, key: RequestKey) -> None:
        """Frees a request's state, if it has any."""
        self._own.pop(key, None)

    def survivals(self, keys: Sequence[RequestKey]) -> Floats:
        """Chance that draft i and all before it are kept, for known requests:
        [requests, max_drafts], never increasing along a row."""
        own = [self._own[key] for key in keys]
        shape = (len(keys), self._max_drafts)
        counts = np.array([one.counts for one in own]).reshape(shape)
        means = np.array([one.means for one in own]).reshape(shape)
        priors = np.array([one.prior.means for one in own]).reshape(shape)
        spreads = np.array([one.prior.spreads for one in own]).reshape(shape)
        # The best weight for a mean of n outcomes, of variance p (1 - p) each, is n / (n + weight).
        weights = priors * (1.0 - priors) / np.maximum(spreads, 1e-4)
        weights = weights.clip(_LEAST_OWN, _MOST_OWN)
        conditional: Floats = (counts * means + weights * priors) / (counts + weights)
        # Not a rounding error above 1: a deeper draft must never look likelier.
        return np.minimum(conditional, 1.0).cumprod(axis=1)

    def prior(self, is_greedy: bool) -> tuple[float, ...]:
        """Conditional acceptance by position, over all requests of a kind."""
        return tuple(self._priors[is_greedy].means)

    def __len__(self) -> int:
        return len(self._own)
