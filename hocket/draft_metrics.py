"""Multi-token prediction in figures: each that circulates has a name of its own.

Gateway and decode workers both report it, the gateway of what it has sent, decode workers of what
they have computed; `hocket.telemetry` has the other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from hocket.types import DraftCounts


class DraftMetrics:
    """Multi-token prediction since the start of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.drafted = Counter("hocket_draft_tokens", "Draft tokens proposed.", registry=registry)
        self.accepted = Counter(
            "hocket_draft_tokens_accepted",
            "Draft tokens that verification kept.",
            registry=registry,
        )
        self.verify_steps = Counter(
            "hocket_verify_steps", "Verify steps, counted per request.", registry=registry
        )
        self.emitted = Counter(
            "hocket_verify_emitted_tokens", "Tokens emitted by verify steps.", registry=registry
        )
        self.drafted_at = Counter(
            "hocket_draft_position_proposed",
            "Steps that proposed a draft at this position (0 is the first).",
            ["position"],
            registry=registry,
        )
        self.survived_at = Counter(
            "hocket_draft_position_survived",
            "Steps that kept all drafts up to this position.",
            ["position"],
            registry=registry,
        )
        self.acceptance_rate = Gauge(
            "hocket_draft_acceptance_rate", "Accepted / drafted tokens.", registry=registry
        )
        self.survival = Gauge(
            "hocket_draft_survival_rate",
            "Survived / proposed at this position.",
            ["position"],
            registry=registry,
        )
        self.acceptance_length = Gauge(
            "hocket_acceptance_length", "Tokens emitted per verify step.", registry=registry
        )
        self._total = DraftCounts()

    @property
    def total(self) -> DraftCounts:
        """The sum of all counts so far."""
        return self._total

    def add(self, counts: DraftCounts) -> None:
        """Adds what was counted since the last call, for example by one finished request."""
        total = self._total
        self._total = DraftCounts(
            verify_steps=total.verify_steps + counts.verify_steps,
            emitted_tokens=total.emitted_tokens + counts.emitted_tokens,
            drafted_by_position=_sum(total.drafted_by_position, counts.drafted_by_position),
            accepted_by_position=_sum(total.accepted_by_position, counts.accepted_by_position),
        )
        self.drafted.inc(counts.drafted_tokens)
        self.accepted.inc(counts.accepted_tokens)
        self.verify_steps.inc(counts.verify_steps)
        self.emitted.inc(counts.emitted_tokens)
        self.acceptance_rate.set(self._total.acceptance_rate)
        self.acceptance_length.set(self._total.acceptance_length)
        for position, number in enumerate(counts.drafted_by_position):
            self.drafted_at.labels(str(position)).inc(number)
        for position, number in enumerate(counts.accepted_by_position):
            self.survived_at.labels(str(position)).inc(number)
        pairs = zip(self._total.drafted_by_position, self._total.accepted_by_position, strict=True)
        for position, (drafted, accepted) in enumerate(pairs):
            if drafted:
                self.survival.labels(str(position)).set(accepted / drafted)


def _sum(left: Iterable[int], right: Iterable[int]) -> tuple[int, ...]:
    """Element by element; the shorter one counts as followed by zeros."""
    left, right = list(left), list(right)
    width = max(len(left), len(right))
    left += [0] * (width - len(left))
    right += [0] * (width - len(right))
    return tuple(a + b for a, b in zip(left, right, strict=True))
