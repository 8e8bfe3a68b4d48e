"""How many drafts each running request gets in the next decode step.

    survival estimates (survival.py) ┐
                                     ├→ best plan per depth (draft_plans.py) → depth → drafts
    measured costs (step_costs.py)   ┘                         (depth_agreement.py)

Chosen is what emits most tokens per second of step time: drafts go to the requests that are likely
to keep them, and to nobody where they do not pay. The engine asks before each step and afterwards
tells what became of the drafts and how long the step took.

What is not tried is not learned: now and then a step probes a draft more or less (draft_probes.py).

Deciding takes time too. Steps that are short beside it keep a plan that was made a little before,
if the batch has as many requests or nearly; who joins gets the drafts that the plan gives to others
who are as likely to keep them. What these steps tell is counted when the next plan is made.

Pure: no clock, no chance; the same story gives the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hocket.scheduling.depth_agreement import (
    NO_PROBE,
    Agreement,
    DepthOffer,
    DepthPrice,
    Kind,
    agree,
)
from hocket.scheduling.draft_plans import Batch, DraftPlans, Floats, Tables
from hocket.scheduling.draft_probes import ProbePair, Probes
from hocket.scheduling.step_costs import Point, StepCosts, StepTimes
from hocket.scheduling.survival import AcceptancePrior, SurvivalEstimates
from hocket.types import RequestKey

# For how long a plan is kept: a decision takes half a millisecond to one, much of a short step.
_KEEP_S = 0.2
# And by what part of it a batch may have grown or shrunk.
_KEEP_CHANGE = 1 / 8
# A step without drafts counts for so much more: prices are not known better.
_WORTH_OF_NONE = 1.02


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """With at most `max_requests` in the batch, each is to get `tokens_per_s`."""

    max_requests: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """`max_drafts`: most per request and step. Not `adaptive`: everyone always gets that many.
    `targets`: that of the smallest `max_requests` which holds the batch counts; beyond all, only
    throughput does. `min_passes`: draft passes of a step that drafts at all, one per MTP module."""

    max_drafts: int
    adaptive: bool = True
    targets: tuple[SpeedTarget, ...] = ()
    min_passes: int = 1

    def tokens_per_s(self, num_requests: int) -> float:
        """The target of a batch; 0.0 without one."""
        fitting = [target for target in self.targets if num_requests <= target.max_requests]
        return min(fitting, key=lambda t: t.max_requests).tokens_per_s if fitting else 0.0


class DraftRequest(NamedTuple):
    """A running request. `cap`: most drafts that it may have; one that has less room for a while
    is for the runner to look after. `pending_rows`: rows that it brings to the first draft pass."""

    cap: int
    pending_rows: int = 1
    is_greedy: bool = False


class DraftBatch(NamedTuple):
    """The requests of one step. `describe` tells of the one at a place in `keys`, and is asked only
    when something is to be decided about it."""

    keys: list[RequestKey]
    describe: Callable[[int], DraftRequest]

    def requests(self) -> list[DraftRequest]:
        return [self.describe(place) for place in range(len(self.keys))]


@dataclass(slots=True)
class DraftSnapshot:
    """For metrics. `acceptance_*`: conditional, by position, over all requests. Counts are since
    the start of the worker."""

    acceptance_sampled: tuple[float, ...] = ()
    acceptance_greedy: tuple[float, ...] = ()
    draft_costs: tuple[Point, ...] = ()
    verify_costs: tuple[Point, ...] = ()
    request_s: float = 0.0
    allotted_drafts: int = 0
    steps: int = 0
    probes: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank could do in the next step. `offer` is what the others must know of it.
    `fixed`: drafts by request where their number is not adaptive."""

    offer: DepthOffer
    batch: DraftBatch
    fixed: list[int] | None = None


@dataclass(frozen=True, slots=True)
class AdaptiveDrafts:
    """Plans of every depth, and the probes."""

    plans: DraftPlans
    probes: ProbePair

    def allotted(self, agreement: Agreement) -> list[int]:
        """Drafts by request."""
        match agreement.kind:
            case Kind.BEST:
                drafts_B = self.plans.drafts(agreement.depth)
            case Kind.MORE:
                drafts_B = self.probes.more.drafts_B
            case Kind.FEWER:
                drafts_B = self.probes.fewer.drafts_B
        return drafts_B.tolist()


class _Kept:
    """A plan in use. It is kept without its probes: then `best` is what a rank that is alone agrees
    upon. It has served for `steps`."""

    def __init__(
        self,
        offer: DepthOffer,
        adaptive: AdaptiveDrafts,
        keys: list[RequestKey],
        estimates: SurvivalEstimates,
    ) -> None:
        self.offer = offer
        self.adaptive = adaptive
        self.best: Agreement | None = None
        self.steps = 0
        self._estimates = estimates
        self._seconds = 0.0
        self._num_planned = len(keys)
        self._places = {key: place for place, key in enumerate(keys)}
        # Of the last step.
        self._keys: list[RequestKey] = []
        self._agreement: Agreement | None = None
        self._planned: list[int] = []
        self._least_given = math.inf
        self._drafts: list[int] = []

    def serves(self, num_requests: int) -> bool:
        """Whether the next step can keep it."""
        change = abs(num_requests - self._num_planned)
        return self._seconds < _KEEP_S and change <= _KEEP_CHANGE * self._num_planned

    def settle(self, batch: DraftBatch, agreement: Agreement) -> list[int]:
        """Drafts by request of one more step with it."""
        if self.best is None:
            self.best = Agreement(agreement.base_depth, agreement.base_depth)
            self.offer = replace(self.offer, more=NO_PROBE, fewer=NO_PROBE)
        if agreement != self._agreement or batch.keys != self._keys:
            if agreement != self._agreement:
                self._planned = self.adaptive.allotted(agreement)
                self._least_given = self.adaptive.plans.least_given(agreement.depth)
            self._keys, self._agreement = batch.keys, agreement
            self._drafts = self._share(batch, agreement.depth)
        self.steps += 1
        self._seconds += self.adaptive.plans.prices[agreement.depth].seconds
        return self._drafts

    def forget(self, key: RequestKey) -> None:
        """Should it come back, it is a new one."""
        self._places.pop(key, None)
        self._keys = []

    def _share(self, batch: DraftBatch, depth: int) -> list[int]:
        """What a request has in the plan; of a new one, as many as are likely enough for it."""
        drafts: list[int] = []
        for i, key in enumerate(batch.keys):
            place = self._places.get(key)
            if place is None:
                request = batch.describe(i)
                survivals = self._estimates.join(key, request.is_greedy)
                likely = sum(survival >= self._least_given for survival in survivals[:depth])
                drafts.append(min(likely, request.cap))
            else:
                drafts.append(self._planned[place])
        return drafts


class DraftController:
    """The one place on a worker that decides draft lengths."""

    def __init__(
        self, policy: DraftPolicy, costs: StepCosts, prior: AcceptancePrior | None = None
    ) -> None:
        self.policy = policy
        self.costs = costs
        self._estimates = SurvivalEstimates(prior or AcceptancePrior(), policy.max_drafts)
        self._probes = Probes()
        self._counts = DraftSnapshot()
        self._kept: _Kept | None = None
        self._last_kind = Kind.BEST
        self._steps: dict[Kind, list[StepTimes]] = {kind: [] for kind in Kind}

    def allot(self, batch: DraftBatch) -> list[int]:
        """Drafts for each request of the next step, at most its cap; of a rank that is alone."""
        proposal, kept = self.propose(batch), self._kept
        agreement = kept.best if kept is not None else None
        return self.allot_agreed(proposal, agreement or agree([proposal.offer]))

    def propose(self, batch: DraftBatch) -> Proposal:
        """This rank's plans for the next step, to be agreed upon with the group's other ranks."""
        if not self.policy.adaptive or self.policy.max_drafts == 0:
            requests = batch.requests()
            self._survivals(batch.keys, requests, 1)
            caps = self._caps(requests)
            return Proposal(_fixed_offer(caps, self.policy.max_drafts), batch, caps)
        if self._kept is None or not self._kept.serves(len(batch.keys)):
            self._kept = self._plan(batch.keys, batch.requests())
        return Proposal(self._kept.offer, batch)

    def _caps(self, requests: Sequence[DraftRequest]) -> list[int]:
        return [min(max(request.cap, 0), self.policy.max_drafts) for request in requests]

    def _survivals(
        self, keys: list[RequestKey], requests: Sequence[DraftRequest], num_steps: int
    ) -> Floats:
        return self._estimates.survivals(keys, [r.is_greedy for r in requests], num_steps)

    def _plan(self, keys: list[RequestKey], requests: Sequence[DraftRequest]) -> _Kept:
        num_steps = self._kept.steps if self._kept is not None else 1
        survivals_BK, caps = self._survivals(keys, requests, num_steps), self._caps(requests)
        for times in self._steps.values():
            self.costs.observe(times)
            times.clear()
        batch = Batch(survivals_BK, np.array(caps, dtype=np.int64), self.policy.min_passes)
        pending_B = np.array([request.pending_rows for request in requests], dtype=np.int64)
        tables = Tables(
            self.costs.draft.table(batch.size + sum(caps) + int(pending_B.sum())),
            self.costs.verify_table(batch.size + sum(caps), batch.size),
        )
        target = self.policy.tokens_per_s(batch.size)
        plans = DraftPlans(batch, tables, target, _WORTH_OF_NONE)
        probes = self._probes.plan(plans, pending_B, target)
        by_depth = tuple(DepthPrice.of(price, target) for price in plans.prices)
        about = (self._probes.base_depth, probes.more_depth)
        offer = DepthOffer(by_depth, *about, probes.more.offer, probes.fewer.offer)
        return _Kept(offer, AdaptiveDrafts(plans, probes), keys, self._estimates)

    def allot_agreed(self, proposal: Proposal, agreement: Agreement) -> list[int]:
        """Drafts for each request that `proposal` was made for, after the group has agreed."""
        drafts = proposal.fixed
        if drafts is None:
            assert self._kept is not None
            drafts = self._kept.settle(proposal.batch, agreement)
            self._probes.settle(self._kept.adaptive.probes, agreement)
        self._last_kind = agreement.kind
        self._counts.steps += 1
        self._counts.probes += agreement.kind is not Kind.BEST
        self._counts.allotted_drafts += sum(drafts)
        return drafts

    def observe(self, key: RequestKey, num_drafted: int, num_accepted: int) -> None:
        """What became of the drafts of a request that was in the last step."""
        self._estimates.observe(key, num_drafted, num_accepted)

    def observe_step(self, times: StepTimes) -> None:
        """How long the last step took; not one that also computed prompts."""
        if self._kept is not None:
            self._steps[self._last_kind].append(times)

    def forget(self, key: RequestKey) -> None:
        """A request ended or left."""
        self._estimates.forget(key)
        if self._kept is not None:
            self._kept.forget(key)

    def snapshot(self) -> DraftSnapshot:
        """For metrics."""
        return replace(
            self._counts,
            acceptance_sampled=self._estimates.prior(is_greedy=False),
            acceptance_greedy=self._estimates.prior(is_greedy=True),
            draft_costs=self.costs.draft.points(),
            verify_costs=self.costs.verify.points(),
            request_s=self.costs.request_s,
        )


def fixed_drafts(max_drafts: int) -> DraftController:
    """Always as many as there is room for, up to `max_drafts`."""
    nothing_measured = StepCosts.from_points([(1, 1.0)], [(1, 1.0)])
    return DraftController(DraftPolicy(max_drafts, adaptive=False), nothing_measured)


def _fixed_offer(caps: list[int], max_drafts: int) -> DepthOffer:
    """Makes the group's ranks agree on the deepest that any of them has."""
    deepest = max(caps, default=0)
    by_depth = tuple(DepthPrice(min(depth, deepest), 1) for depth in range(max_drafts + 1))
    return DepthOffer(by_depth)
