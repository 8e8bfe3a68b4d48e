"""How many drafts each running request gets in the next decode step.

    survival estimates (survival.py) ┐
                                     ├→ best plan per depth (draft_plans.py) → depth → drafts
    measured costs (step_costs.py)   ┘                         (depth_agreement.py)

Chosen is what emits most tokens per second of step time: drafts go to the requests that are likely
to keep them, and to nobody where they do not pay. The engine asks before each step and afterwards
tells what became of the drafts and how long the step took.

What is not tried is not learned: now and then a step probes a draft more or less (draft_probes.py).

Deciding takes time too. Steps that are short beside it keep the plan that was made for the same
requests a little before; what they tell is counted when the next plan is made.

Pure: no clock, no chance; the same story gives the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import le

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
# A step without drafts counts for so much more, where there were none and where there were some:
# prices are not known better, and to begin again writes all the entries that have waited.
_NONE_TO_DRAFT, _NONE_TO_STOP = 1.04, 1.01


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


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A running request. `cap`: most drafts that it has room for. `pending_rows`: rows that it
    brings to the first draft pass."""

    key: RequestKey
    cap: int
    pending_rows: int = 1
    is_greedy: bool = False


@dataclass(slots=True)
class DraftSnapshot:
    """For metrics. `acceptance_*`: conditional, by position, over all requests. Counts are since
    the start of the worker."""

    acceptance_sampled: tuple[float, ...] = ()
    acceptance_greedy: tuple[float, ...] = ()
    draft_costs: tuple[Point, ...] = ()
    verify_costs: tuple[Point, ...] = ()
    allotted_drafts: int = 0
    steps: int = 0
    probes: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank could do in the next step. `offer` is what the others must know of it.
    `caps`: most drafts of each request. Not `adaptive`: everyone gets as many."""

    offer: DepthOffer
    caps: list[int]
    adaptive: AdaptiveDrafts | None = None


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


@dataclass(slots=True)
class _Kept:
    """A plan in use: `steps` by now, of `seconds` in all. It is kept without its probes: then
    `best` is what a rank that is alone agrees upon, and `drafts` what that gives."""

    proposal: Proposal
    keys: list[RequestKey]
    steps: int = 0
    seconds: float = 0.0
    best: Agreement | None = None
    drafts: list[int] = field(default_factory=list[int])

    def serves(self, keys: list[RequestKey], caps: list[int]) -> bool:
        """Whether the next step can keep it: the same requests, none with more room than then."""
        if self.seconds >= _KEEP_S or self.keys != keys:
            return False
        return all(map(le, caps, self.proposal.caps))

    def settle(self, adaptive: AdaptiveDrafts, agreement: Agreement) -> list[int]:
        """Drafts by request of one more step with it."""
        if self.best is None:
            self.best = Agreement(agreement.base_depth, agreement.base_depth)
            self.drafts = adaptive.allotted(self.best)
            offer = replace(self.proposal.offer, more=NO_PROBE, fewer=NO_PROBE)
            self.proposal = replace(self.proposal, offer=offer)
        self.steps += 1
        self.seconds += adaptive.plans.prices[agreement.depth].seconds
        return self.drafts if agreement == self.best else adaptive.allotted(agreement)


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

    def allot(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Drafts for each request of the next step, at most its cap; of a rank that is alone."""
        proposal, kept = self.propose(requests), self._kept
        agreement = kept.best if kept is not None else None
        return self.allot_agreed(proposal, agreement or agree([proposal.offer]))

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """This rank's plans for the next step, to be agreed upon with the group's other ranks."""
        keys = [request.key for request in requests]
        most = self.policy.max_drafts
        caps = [min(max(request.cap, 0), most) for request in requests]
        if not self.policy.adaptive or most == 0:
            self._survivals(requests, keys, 1)
            return Proposal(_fixed_offer(caps, most), caps)
        if self._kept is not None and self._kept.serves(keys, caps):
            return replace(self._kept.proposal, caps=caps)
        num_steps = self._kept.steps if self._kept is not None else 1
        proposal = self._plan(requests, caps, self._survivals(requests, keys, num_steps))
        self._kept = _Kept(proposal, keys)
        return proposal

    def _survivals(
        self, requests: Sequence[DraftRequest], keys: list[RequestKey], num_steps: int
    ) -> Floats:
        return self._estimates.survivals(keys, [r.is_greedy for r in requests], num_steps)

    def _plan(
        self, requests: Sequence[DraftRequest], caps: list[int], survivals_BK: Floats
    ) -> Proposal:
        for times in self._steps.values():
            self.costs.observe(times)
            times.clear()
        batch = Batch(survivals_BK, np.array(caps, dtype=np.int64), self.policy.min_passes)
        pending_B = np.array([request.pending_rows for request in requests], dtype=np.int64)
        tables = Tables(
            self.costs.draft.table(batch.size + sum(caps) + int(pending_B.sum())),
            self.costs.verify.table(batch.size + sum(caps)),
        )
        target = self.policy.tokens_per_s(batch.size)
        worth_of_none = _NONE_TO_DRAFT if self._probes.base_depth == 0 else _NONE_TO_STOP
        plans = DraftPlans(batch, tables, target, worth_of_none)
        probes = self._probes.plan(plans, pending_B, target)
        by_depth = tuple(DepthPrice.of(price, target) for price in plans.prices)
        more, fewer = probes.more.offer, probes.fewer.offer
        offer = DepthOffer(by_depth, self._probes.base_depth, more, fewer)
        return Proposal(offer, caps, AdaptiveDrafts(plans, probes))

    def allot_agreed(self, proposal: Proposal, agreement: Agreement) -> list[int]:
        """Drafts for each request that `proposal` was made for, after the group has agreed."""
        drafts = proposal.caps
        if proposal.adaptive is not None:
            assert self._kept is not None
            drafts = list(map(min, self._kept.settle(proposal.adaptive, agreement), drafts))
            self._probes.settle(proposal.adaptive.probes, agreement)
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
            self._kept.seconds = _KEEP_S

    def snapshot(self) -> DraftSnapshot:
        """For metrics."""
        return replace(
            self._counts,
            acceptance_sampled=self._estimates.prior(is_greedy=False),
            acceptance_greedy=self._estimates.prior(is_greedy=True),
            draft_costs=self.costs.draft.points(),
            verify_costs=self.costs.verify.points(),
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
