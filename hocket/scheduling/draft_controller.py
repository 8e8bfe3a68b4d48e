"""How many drafts each running request gets in the next decode step.

    survival estimates (survival.py) ┐
                                     ├→ best plan per depth (draft_plans.py) → depth → drafts
    measured costs (step_costs.py)   ┘                         (depth_agreement.py)

Chosen is what emits most tokens per second of step time: drafts go to the requests that are likely
to keep them, and to nobody where they do not pay. The engine asks before each step and afterwards
tells what became of the drafts and how long the step took.

What is not tried is not learned: now and then a step probes a draft more or less (draft_probes.py).

Pure: no clock, no chance; the same story gives the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.scheduling.depth_agreement import Agreement, DepthOffer, DepthPrice, Kind, agree
from hocket.scheduling.draft_plans import Batch, DraftPlans, Ints, Tables
from hocket.scheduling.draft_probes import ProbePair, Probes
from hocket.scheduling.step_costs import Point, StepCosts
from hocket.scheduling.survival import AcceptancePrior, SurvivalEstimates
from hocket.types import RequestKey


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
    """What one rank could do in the next step. `offer` is what the others must know of it."""

    offer: DepthOffer
    drafts: FixedDrafts | AdaptiveDrafts


@dataclass(frozen=True, slots=True)
class FixedDrafts:
    """The policy's number for everyone, as far as there is room."""

    drafts_B: Ints


@dataclass(frozen=True, slots=True)
class AdaptiveDrafts:
    """Plans of every depth, and the probes."""

    plans: DraftPlans
    probes: ProbePair

    def allotted(self, agreement: Agreement) -> Ints:
        match agreement.kind:
            case Kind.BEST:
                return self.plans.drafts(agreement.depth)
            case Kind.MORE:
                return self.probes.more.drafts_B
            case Kind.FEWER:
                return self.probes.fewer.drafts_B


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

    def allot(self, requests: Sequence[DraftRequest]) -> list[int]:
        """Drafts for each request of the next step, at most its cap; of a rank that is alone."""
        proposal = self.propose(requests)
        return self.allot_agreed(proposal, agree([proposal.offer]))

    def propose(self, requests: Sequence[DraftRequest]) -> Proposal:
        """This rank's plans for the next step, to be agreed upon with the group's other ranks."""
        keys, are_greedy = [r.key for r in requests], [r.is_greedy for r in requests]
        survivals_BK = self._estimates.survivals(keys, are_greedy)
        caps_B = np.array([request.cap for request in requests], dtype=np.int64)
        caps_B = caps_B.clip(0, self.policy.max_drafts)
        if not self.policy.adaptive or self.policy.max_drafts == 0:
            return Proposal(_fixed_offer(caps_B, self.policy.max_drafts), FixedDrafts(caps_B))
        batch = Batch(survivals_BK, caps_B, self.policy.min_passes)
        pending_B = np.array([request.pending_rows for request in requests], dtype=np.int64)
        tables = Tables(
            self.costs.draft.table(batch.size + int(pending_B.sum())),
            self.costs.verify.table(batch.size + int(caps_B.sum())),
        )
        target = self.policy.tokens_per_s(batch.size)
        plans = DraftPlans(batch, tables, target)
        probes = self._probes.plan(plans, pending_B, target)
        by_depth = tuple(DepthPrice.of(price, target) for price in plans.prices)
        more, fewer = probes.more.offer, probes.fewer.offer
        offer = DepthOffer(by_depth, self._probes.base_depth, more, fewer)
        return Proposal(offer, AdaptiveDrafts(plans, probes))

    def allot_agreed(self, proposal: Proposal, agreement: Agreement) -> list[int]:
        """Drafts for each request that `proposal` was made for, after the group has agreed."""
        match proposal.drafts:
            case FixedDrafts(drafts_B):
                pass
            case AdaptiveDrafts() as adaptive:
                drafts_B = adaptive.allotted(agreement)
                self._probes.settle(adaptive.probes, agreement)
        drafts: list[int] = drafts_B.tolist()
        self._counts.steps += 1
        self._counts.probes += agreement.kind is not Kind.BEST
        self._counts.allotted_drafts += sum(drafts)
        return drafts

    def observe(self, key: RequestKey, num_drafted: int, num_accepted: int) -> None:
        """What became of the drafts of a request that was in the last step."""
        self._estimates.observe(key, num_drafted, num_accepted)

    def observe_step(
        self, draft_rows: Sequence[int], draft_s: float, verify_rows: int, verify_s: float
    ) -> None:
        """How long a step took, as `StepCosts.observe`; not one that also computed prompts."""
        self.costs.observe(draft_rows, draft_s, verify_rows, verify_s)

    def forget(self, key: RequestKey) -> None:
        """A request ended or left."""
        self._estimates.forget(key)

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


def _fixed_offer(caps_B: Ints, max_drafts: int) -> DepthOffer:
    """Makes the group's ranks agree on the deepest that any of them has."""
    deepest = int(caps_B.max(initial=0))
    by_depth = tuple(DepthPrice(min(depth, deepest), 1) for depth in range(max_drafts + 1))
    return DepthOffer(by_depth)
