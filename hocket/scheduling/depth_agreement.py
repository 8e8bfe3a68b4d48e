"""How many draft passes the ranks of an expert-parallel group make together in a step.

Every pass is a collective, so all ranks make as many. Each rank says what its best plan for every
depth D = 0 to K would emit and cost (`DepthOffer`); from everyone's offers `agree` gives all of
them the same depth. Integers only, so that no rank rounds otherwise. One rank alone agrees with
itself in the same way: there is one rule.

A rank also offers two probes: plans that try more drafts, or fewer, than what was agreed last,
raised by what it may cost to find out. One is taken when it comes out best with that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hocket.scheduling.draft_plans import Price

# No limit on a step's time.
_ANY_NS = 2**62
_WIDTH = 3


@dataclass(frozen=True, slots=True)
class DepthPrice:
    """A plan as it is told to others: tokens in millionths, nanoseconds; `permitted_ns` is what the
    step may last to meet this rank's target for the slowest request."""

    tokens_e6: int
    cost_ns: int
    permitted_ns: int = _ANY_NS

    @classmethod
    def of(cls, price: Price, tokens_per_s: float) -> DepthPrice:
        """`tokens_per_s` 0: no target."""
        limited = tokens_per_s > 0 and price.slowest < float("inf")
        permitted_ns = int(1e9 * price.slowest / tokens_per_s) if limited else _ANY_NS
        return cls(round(1e6 * price.tokens), max(1, round(1e9 * price.seconds)), permitted_ns)

    @property
    def meets(self) -> bool:
        return self.cost_ns <= self.permitted_ns


NO_PROBE = DepthPrice(0, 1)


@dataclass(frozen=True, slots=True)
class DepthOffer:
    """One rank's: by depth 0 to K, and of probes about `base_depth`, the depth agreed last: one
    with `more_depth` draft passes, and one with one pass less than the base."""

    by_depth: tuple[DepthPrice, ...]
    base_depth: int = 0
    more_depth: int = 0
    more: DepthPrice = NO_PROBE
    fewer: DepthPrice = NO_PROBE

    def numbers(self) -> list[int]:
        """As it is exchanged: 2 + 3 (K + 3) integers below 2^63."""
        prices = (self.more, self.fewer, *self.by_depth)
        flat = [n for p in prices for n in (p.tokens_e6, p.cost_ns, p.permitted_ns)]
        return [self.base_depth, self.more_depth, *flat]

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> DepthOffer:
        base_depth, more_depth, *flat = numbers
        more, fewer, *by_depth = (
            DepthPrice(*flat[i : i + _WIDTH]) for i in range(0, len(flat), _WIDTH)
        )
        return cls(tuple(by_depth), base_depth, more_depth, more, fewer)


NO_DRAFTS = DepthOffer((DepthPrice(0, 1),))
"""Of a rank that never drafts; so do the others of its group."""


class Kind(Enum):
    """Whether a step tries what is best, or something else to find out."""

    BEST = "best"
    MORE = "more"
    FEWER = "fewer"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Draft passes of this step, at most; `base_depth`: what is best, that is without a probe."""

    depth: int
    base_depth: int
    kind: Kind = Kind.BEST


def agree(offers: Sequence[DepthOffer]) -> Agreement:
    """The depth that gives the group most tokens per second: the sum of tokens over the slowest
    rank's time, among the depths that meet everyone's target; where none does, the depth that comes
    nearest to it. The smaller one of equals."""
    depths = range(len(offers[0].by_depth))
    together = [_together([offer.by_depth[depth] for offer in offers]) for depth in depths]
    if any(price.meets for price in together):
        base = _first_best(
            [(price.tokens_e6 if price.meets else -1, price.cost_ns) for price in together]
        )
    else:
        base = _first_best([(price.permitted_ns, price.cost_ns) for price in together])
    agreement, most = Agreement(base, base), together[base]
    if all(offer.base_depth == base for offer in offers):
        more = Agreement(max(offer.more_depth for offer in offers), base, Kind.MORE)
        fewer = Agreement(max(base - 1, 0), base, Kind.FEWER)
        for probe, price in (
            (more, _together([offer.more for offer in offers])),
            (fewer, _together([offer.fewer for offer in offers])),
        ):
            if price.tokens_e6 * most.cost_ns > most.tokens_e6 * price.cost_ns:
                agreement, most = probe, price
    return agreement


def _together(prices: Sequence[DepthPrice]) -> DepthPrice:
    if len(prices) == 1:
        return prices[0]
    return DepthPrice(
        sum(price.tokens_e6 for price in prices),
        max(price.cost_ns for price in prices),
        min(price.permitted_ns for price in prices),
    )


def _first_best(shares: Sequence[tuple[int, int]]) -> int:
    """The first of the greatest fractions (numerator, denominator)."""
    best = 0
    for i, (above, below) in enumerate(shares):
        if above * shares[best][1] > shares[best][0] * below:
            best = i
    return best
