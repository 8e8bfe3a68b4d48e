"""Finding out, at a bounded price, whether more drafts would pay, or fewer.

What is not tried is not learned: a batch that gets no drafts would never notice that its text has
become easy to guess, and one that gets many not that fewer rows cost less than is believed. So now
and then a step gives every request one draft more than pays by present knowledge, or one less.
Where nobody has any, it is the best plan with drafts, and one for everyone at least: one alone may
not pay where several do. What that is expected to lose is saved up before, a small share of step
time; then the probe is offered, raised by what was saved, and comes out as the best of all plans.
No chance and no fixed interval: probes are frequent where they cost little, rare where they cost
much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.scheduling.depth_agreement import Agreement, DepthPrice, Kind
from hocket.scheduling.draft_plans import DraftPlans, Ints, Price

# Of step time, for trying more drafts and fewer.
_MORE_SHARE, _FEWER_SHARE = 0.006, 0.003
# Savings end at so many probes; a group may need more than its cheapest rank alone would.
_MOST_PROBES = 4.0
# Of the tokens that would make a probe the base's equal: enough not to be lost in rounding.
_MARGIN = 1e-5


@dataclass(frozen=True, slots=True)
class Probe:
    """Drafts by request, the offer to the group, and the step time that it is expected to lose
    against the base, the best plan of the depth that was agreed last."""

    drafts_B: Ints
    offer: DepthPrice
    loses_s: float


@dataclass(frozen=True, slots=True)
class ProbePair:
    """The probes of one step, the base's step time, and draft passes of `more`."""

    more: Probe
    fewer: Probe
    base_s: float
    more_depth: int


class Probes:
    """The depth that a rank's probes begin from, and what it has saved for them."""

    def __init__(self) -> None:
        self.base_depth = 1  # a model that has drafts is expected to gain by them
        self._more = _Savings(_MORE_SHARE)
        self._fewer = _Savings(_FEWER_SHARE)

    def plan(self, plans: DraftPlans, pending_B: Ints, tokens_per_s: float) -> ProbePair:
        """`pending_B`: rows that a request brings to the first draft pass."""
        depth = self.base_depth
        base, base_B = plans.prices[depth], plans.drafts(depth)
        most_B = base_B + 1 if depth else np.maximum(plans.drafts(plans.best_depth), 1)
        more_B = np.minimum(most_B, plans.batch.caps_B)
        more_depth = min(depth + 1, plans.max_depth) if depth else plans.best_depth
        fewer_B = np.maximum(base_B - 1, 0)
        # Who has had no drafts for long has many rows to catch up on.
        late_B = np.maximum(pending_B - 1, 0) * (base_B < np.minimum(more_B, 1))
        more = plans.price(more_B, more_depth, int(late_B.sum()))
        fewer = plans.price(fewer_B, max(depth - 1, 0))
        tells_more, tells_less = bool((more_B > base_B).any()), bool((fewer_B < base_B).any())
        return ProbePair(
            self._more.probe(more_B, more, base if tells_more else None, tokens_per_s),
            self._fewer.probe(fewer_B, fewer, base if tells_less else None, tokens_per_s),
            base.seconds,
            more_depth,
        )

    def settle(self, pair: ProbePair, agreement: Agreement) -> None:
        """Spends or saves, after the step was agreed upon."""
        self.base_depth = agreement.base_depth
        if agreement.kind is Kind.MORE:
            self._more.spend(pair.more)
        elif agreement.kind is Kind.FEWER:
            self._fewer.spend(pair.fewer)
        else:
            self._more.save(pair.more, pair.base_s)
            self._fewer.save(pair.fewer, pair.base_s)


class _Savings:
    """Step time saved for probes of one direction."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved_s = 0.0

    def probe(self, drafts_B: Ints, price: Price, base: Price | None, tokens_per_s: float) -> Probe:
        """Its offer beats the base only when enough is saved for it. `base` None: the probe would
        tell nothing here, but another rank may want one."""
        if base is None:
            return Probe(drafts_B, DepthPrice.of(price, tokens_per_s), 0.0)
        seconds = price.seconds
        loses_s = seconds - base.seconds * price.tokens / base.tokens
        if tokens_per_s:
            loses_s = max(loses_s, seconds - base.seconds * price.slowest / base.slowest)
        equal = base.tokens * seconds / base.seconds
        if loses_s <= self._saved_s:
            tokens = price.tokens + base.tokens * self._saved_s / base.seconds + _MARGIN * equal
        else:
            tokens = min(price.tokens, (1.0 - _MARGIN) * equal)
        offer = DepthPrice.of(Price(tokens, price.slowest, seconds), tokens_per_s)
        return Probe(drafts_B, offer, loses_s)

    def save(self, probe: Probe, step_s: float) -> None:
        most_s = max(self._saved_s, _MOST_PROBES * probe.loses_s)
        self._saved_s = min(self._saved_s + self._share * step_s, most_s)

    def spend(self, probe: Probe) -> None:
        self._saved_s = max(0.0, self._saved_s - probe.loses_s)
