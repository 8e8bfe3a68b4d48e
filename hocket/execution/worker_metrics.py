"""A worker's metrics: its load and drafts (`hocket.telemetry`), and its hand-off counters.

Tables count in plain dataclasses, in the engine's thread; `CounterCollector` shows each field as a
Prometheus counter when someone asks. `observe` is told every turn by the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from hocket.telemetry import WorkerMetrics
from hocket.types import DraftCounts, Event, Failed, Joined, Load, Tokens


class CounterCollector(Collector):
    """Every field of a dataclass of counts as `<prefix>_<field>_total`."""

    def __init__(self, prefix: str, counters: Any) -> None:
        self._prefix = prefix
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        for field in fields(self._counters):
            words = field.name.replace("_", " ")
            family = CounterMetricFamily(f"{self._prefix}_{field.name}", f"Hand-offs: {words}.")
            family.add_metric([], float(getattr(self._counters, field.name)))
            yield family


class EngineMetrics:
    """What one worker shows of its engine."""

    def __init__(self, role: str, hand_off_counters: Any) -> None:
        """`hand_off_counters` is the dataclass of counts of the worker's export or import table."""
        self.registry = CollectorRegistry()
        self._worker = WorkerMetrics(self.registry)
        self._recomputed = Counter(
            "hocket_worker_recomputed_prompts",
            "Prompts computed here because their hand-off failed.",
            registry=self.registry,
        )
        self._failed = Counter(
            "hocket_worker_failed_requests",
            "Requests that failed here, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.registry.register(CounterCollector(f"hocket_{role}_hand_off", hand_off_counters))

    def observe(self, events: Sequence[Event], load: Load) -> None:
        """The outcome of a turn."""
        self._worker.observe_load(load)
        drafts = DraftCounts()
        for event in events:
            if isinstance(event, Tokens) and event.step is not None:
                step = event.step
                drafts = drafts.add_step(
                    step.drafted_tokens, step.accepted_tokens, len(event.token_ids)
                )
            elif isinstance(event, Joined) and event.recomputed:
                self._recomputed.inc()
            elif isinstance(event, Failed):
                self._failed.labels(event.reason).inc()
        if drafts.verify_steps:
            self._worker.drafts.add(drafts)

    def observe_step(self, seconds: float) -> None:
        """One step that computed something; from any thread."""
        self._worker.step_s.observe(seconds)
