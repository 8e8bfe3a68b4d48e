"""Finding out, at a bounded price, whether more drafts would pay.

What is not tried is not learned: a batch that gets no drafts would never notice that its text has
become easy to guess. So now and then a step gives every request one draft more than pays by present
knowledge. What that is expected to lose is saved up before, a small share of step time; then the
probe is offered, raised by what was saved, and comes out as the best of all plans. No chance and no
fixed interval: probes are frequent where they cost little, rare where they cost much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.scheduling.depth_agreement import Agreement, DepthPrice
from hocket.scheduling.draft_plans import Batch, DraftPlans, Ints, Price

# Of step time.
_SHARE = 0.01
# Savings end at so many probes; a group may need more than its cheapest rank alone would.
_MOST_PROBES = 4.0


@dataclass(frozen=True, slots=True)
class Probe:
    """One draft more for everyone with room: drafts by request, the offer to the group, and the
    step time that it is expected to lose against `base`, the best plan of the depth agreed last."""

    drafts_B: Ints
    offer: DepthPrice
    loses_s: float
    base: Price


class Probes:
    """What a rank has saved, and the depth that its probes begin from."""

    def __init__(self) -> None:
        self.base_depth = 0
        self._saved_s = 0.0

    def plan(self, plans: DraftPlans, batch: Batch, tokens_per_s: float) -> Probe:
        """The probe of this step. Its offer beats the base only when enough is saved for it."""
        depth = min(self.base_depth + 1, len(plans.prices) - 1)
        base, base_B = plans.prices[self.base_depth], plans.drafts(self.base_depth)
        drafts_B = np.minimum(base_B + 1, batch.caps_B)
        price = plans.price(drafts_B, depth)
        seconds = price.seconds
        if not (drafts_B > base_B).any():
            # Nothing to find out here; another rank may want to.
            return Probe(drafts_B, DepthPrice.of(price, tokens_per_s), 0.0, base)
        loses_s = seconds - base.seconds * price.tokens / base.tokens
        if tokens_per_s:
            loses_s = max(loses_s, seconds - base.seconds * price.slowest / base.slowest)
        pays_from = base.tokens * seconds / base.seconds
        if loses_s <= self._saved_s:
            tokens = price.tokens + self._saved_s * base.tokens / base.seconds + 1e-5 * pays_from
        else:
            tokens = min(price.tokens, (1.0 - 1e-5) * pays_from)
        offer = DepthPrice.of(Price(tokens, price.slowest, seconds), tokens_per_s)
        return Probe(drafts_B, offer, loses_s, base)

    def settle(self, probe: Probe, agreement: Agreement) -> None:
        """Spends or saves, after the step was agreed upon."""
        self.base_depth = agreement.base_depth
        if agreement.is_probe:
            self._saved_s = max(0.0, self._saved_s - probe.loses_s)
        else:
            most_s = max(self._saved_s, _MOST_PROBES * probe.loses_s)
            self._saved_s = min(self._saved_s + _SHARE * probe.base.seconds, most_s)
