"""A worker's metrics: its load and drafts (`hocket.telemetry`), and its hand-off counters.

Tables count in plain dataclasses, in the engine's thread; `CounterCollector` shows each field as a
Prometheus counter when someone asks. `observe` is told every turn by the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hocket.draft_metrics import DraftMetrics
from hocket.telemetry import GAUGE, WorkerMetrics
from hocket.types import (
    DraftCounts,
    Event,
    Failed,
    Joined,
    Load,
    Role,
    Tokens,
    WorkerDescription,
)


class CounterCollector(Collector):
    """Every field of a dataclass of counts: as `<prefix>_<field>_total`, or, where its metadata is
    `hocket.telemetry.GAUGE`, as the gauge `<prefix>_<field>`."""

    def __init__(self, prefix: str, counters: Any) -> None:
        self._prefix = prefix
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for field in fields(self._counters):
            words = f"{self._prefix}_{field.name}".removeprefix("hocket_").replace("_", " ")
            kind = GaugeMetricFamily if field.metadata == GAUGE else CounterMetricFamily
            family = kind(f"{self._prefix}_{field.name}", f"{words.capitalize()}.")
            family.add_metric([], float(getattr(self._counters, field.name)))
            yield family


class LoadCounters(Collector):
    """What a worker has done since its start, as its latest `Load` says it."""

    def __init__(self, role: Role) -> None:
        self.load = Load()
        self._role = role

    def collect(self) -> Iterator[CounterMetricFamily]:
        load = self.load
        shown = [
            ("busy_seconds", load.busy_s, "Seconds of turns that did something."),
            ("computed_prompt_tokens", load.computed_prompt_tokens, "Prompt tokens computed."),
        ]
        if self._role is Role.DECODE:
            shown += [
                ("decode_steps", load.decode_steps, "Decode steps that this rank took part in."),
                ("decode_step_seconds", load.decode_step_s, "Seconds of turns with a decode step."),
            ]
        for name, value, text in shown:
            family = CounterMetricFamily(f"hocket_worker_{name}", text)
            family.add_metric([], float(value))
            yield family


class DecodeMetrics:
    """What only decode workers have: drafts, and prompts whose hand-off failed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafts = DraftMetrics(registry)
        self._recomputed = Counter(
            "hocket_worker_recomputed_prompts",
            "Prompts computed here because their hand-off failed.",
            registry=registry,
        )

    def observe(self, events: Sequence[Event]) -> None:
        """The outcome of a turn."""
        drafts = DraftCounts()
        for event in events:
            if isinstance(event, Tokens) and event.step is not None:
                step = event.step
                drafts = drafts.add_step(
                    step.drafted_tokens, step.accepted_tokens, len(event.token_ids)
                )
            elif isinstance(event, Joined) and event.recomputed:
                self._recomputed.inc()
        if drafts.verify_steps:
            self._drafts.add(drafts)


class EngineMetrics:
    """What one worker shows of its engine."""

    def __init__(self, role: Role, counters: Mapping[str, object]) -> None:
        """`counters`: dataclasses of counts by the beginning of their metrics' names; a collector
        names its own."""
        self.registry = CollectorRegistry()
        self._worker = WorkerMetrics(self.registry)
        self._decode = DecodeMetrics(self.registry) if role is Role.DECODE else None
        self._since_start = LoadCounters(role)
        self.registry.register(self._since_start)
        self._failed = Counter(
            "hocket_worker_failed_requests",
            "Requests that failed here, by reason.",
            ["reason"],
            registry=self.registry,
        )
        for prefix, counts in counters.items():
            if is_dataclass(counts):
                self.registry.register(CounterCollector(prefix, counts))
            else:
                self.registry.register(cast(Collector, counts))

    def observe_identity(self, worker: WorkerDescription) -> None:
        """Who the worker is; again when its transport has become known."""
        self._worker.observe_identity(worker)

    def observe(self, events: Sequence[Event], load: Load) -> None:
        """The outcome of a turn."""
        self._worker.observe_load(load)
        self._since_start.load = load
        for event in events:
            if isinstance(event, Failed):
                self._failed.labels(event.reason).inc()
        if self._decode is not None:
            self._decode.observe(events)

    def observe_step(self, seconds: float) -> None:
        """One step that computed something; from any thread."""
        self._worker.step_s.observe(seconds)
