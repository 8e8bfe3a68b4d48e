"""What every process tells about itself in figures: its Prometheus metrics.

Metrics live in a registry that is passed in, one per process. The gateway uses `GatewayMetrics`
and `PoolMetrics`, workers `WorkerMetrics`; gateway and decode workers report multi-token
prediction through `hocket.draft_metrics`. `docs/metrics.md` has the table. Log lines are
`hocket.logs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    start_http_server,
)

from hocket.draft_metrics import DraftMetrics
from hocket.errors import ConfigError
from hocket.types import DraftCounts, Load, Usage, WorkerDescription

GAUGE: Mapping[str, str] = {"kind": "gauge"}
"""Metadata of a field that can fall, in a dataclass of counts
(`hocket.execution.worker_metrics.CounterCollector`)."""

_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)


@dataclass(frozen=True, slots=True)
class LatencySum:
    """A histogram's whole: samples and their sum in seconds."""

    count: int
    sum_s: float


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """The gateway's metrics as values, since the start of its process."""

    in_flight: int
    queued: int
    requests_by_outcome: Mapping[str, int]
    first_token: LatencySum
    inter_token: LatencySum
    hand_off: LatencySum
    arrived_requests: int
    arrived_prompt_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finished_output_tokens: int
    hand_off_bytes_by_transport: Mapping[str, int]
    recomputed_requests: int
    broken_promises: int
    migrations: int
    drafts: DraftCounts


class GatewayMetrics:
    """What the gateway measures per request. Latencies count from the request's arrival."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "hocket_requests", "Requests by outcome: OK or the error's reason.", ["outcome"],
            registry=registry,
        )  # fmt: skip
        self.replacements = Counter(
            "hocket_replacements",
            "Requests begun again on other workers, by the reason of the one that failed.",
            ["reason"],
            registry=registry,
        )
        self.migrations = Counter(
            "hocket_migrations",
            "Of these, those whose output had begun: it went on without a repeat or a gap.",
            registry=registry,
        )
        self.recomputed = Counter(
            "hocket_requests_recomputed",
            "Requests whose prompt decode computed again, because the hand-off failed.",
            registry=registry,
        )
        self.broken_promises = Counter(
            "hocket_prefix_promises_broken",
            "Prompts of which a worker should have had a part cached and found none of it.",
            registry=registry,
        )
        self.in_flight = Gauge(
            "hocket_requests_in_flight", "Requests being served.", registry=registry
        )
        self.queued = Gauge(
            "hocket_requests_queued", "Requests that wait for their first token.", registry=registry
        )
        self.first_token_s = _latency(
            registry, "hocket_time_to_first_token_seconds", "Arrival to first token."
        )
        self.inter_token_s = _latency(
            registry,
            "hocket_inter_token_latency_seconds",
            "Time between messages over the tokens of the later one; one sample per token.",
        )
        self.request_s = _latency(registry, "hocket_request_seconds", "Arrival to last message.")
        self.prefill_s = _latency(
            registry, "hocket_prefill_seconds", "Start of the prefill leg to the first token."
        )
        self.hand_off_s = _latency(
            registry, "hocket_hand_off_seconds", "Start of the decode leg to joining its batch."
        )
        self.hand_off_bytes = Counter(
            "hocket_hand_off_bytes", "KV bytes moved from prefill to decode.", ["transport"],
            registry=registry,
        )  # fmt: skip
        self.arrived = Counter(
            "hocket_requests_arrived", "Valid requests, before they find workers.",
            registry=registry,
        )  # fmt: skip
        self.arrived_prompt_tokens = Counter(
            "hocket_prompt_tokens_arrived", "Prompt tokens of these.", registry=registry
        )
        self.prompt_tokens = Counter("hocket_prompt_tokens", "Prompt tokens.", registry=registry)
        self.cached_tokens = Counter(
            "hocket_prompt_tokens_cached", "Prompt tokens found in the cache.", registry=registry
        )
        self.output_tokens = Counter(
            "hocket_output_tokens", "Output tokens, as they come.", registry=registry
        )
        self.finished_output_tokens = Counter(
            "hocket_output_tokens_finished", "Output tokens of finished requests.",
            registry=registry,
        )  # fmt: skip
        self.drafts = DraftMetrics(registry)

    def observe_tokens(self, gap_s: float, num_tokens: int) -> None:
        """A message with tokens, `gap_s` after the one before it."""
        for _ in range(num_tokens):
            self.inter_token_s.observe(gap_s / num_tokens)

    def observe_arrival(self, prompt_tokens: int) -> None:
        """A valid request has come."""
        self.arrived.inc()
        self.arrived_prompt_tokens.inc(prompt_tokens)

    def observe_usage(self, usage: Usage) -> None:
        """The usage of a finished request."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.finished_output_tokens.inc(usage.output_tokens)
        self.drafts.add(usage.drafts)

    def figures(self) -> GatewayFigures:
        """All of it, for people."""
        return GatewayFigures(
            in_flight=int(_value(self.in_flight)),
            queued=int(_value(self.queued)),
            requests_by_outcome=_by_label(self.requests, "outcome"),
            first_token=_latency_sum(self.first_token_s),
            inter_token=_latency_sum(self.inter_token_s),
            hand_off=_latency_sum(self.hand_off_s),
            arrived_requests=int(_value(self.arrived)),
            arrived_prompt_tokens=int(_value(self.arrived_prompt_tokens)),
            prompt_tokens=int(_value(self.prompt_tokens)),
            cached_tokens=int(_value(self.cached_tokens)),
            output_tokens=int(_value(self.output_tokens)),
            finished_output_tokens=int(_value(self.finished_output_tokens)),
            hand_off_bytes_by_transport=_by_label(self.hand_off_bytes, "transport"),
            recomputed_requests=int(_value(self.recomputed)),
            broken_promises=int(_value(self.broken_promises)),
            migrations=int(_value(self.migrations)),
            drafts=self.drafts.total,
        )


class RoutingMetrics:
    """What the gateway does and finds so that requests go to workers that can serve them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.canaries = Counter(
            "hocket_canaries",
            "Canaries sent through workers: passed or failed.",
            ["outcome"],
            registry=registry,
        )
        self.kept_out = Gauge(
            "hocket_workers_kept_out",
            "Workers that get no request because no canary has passed them yet.",
            ["pool"],
            registry=registry,
        )


class PoolMetrics:
    """Sizes of the pools, as their owner published them last. The gateway shows them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge(
            "hocket_pool_workers",
            "Workers of a pool: asked for, ready, starting, draining.",
            ["pool", "state"],
            registry=registry,
        )
        self.operator_workers = Gauge(
            "hocket_pool_operator_workers",
            "Workers that an operator asked for; no sample while the pool is left to itself.",
            ["pool"],
            registry=registry,
        )
        self.is_autoscaled = Gauge(
            "hocket_autoscaler_enabled", "1 while the autoscaler decides on sizes.",
            registry=registry,
        )  # fmt: skip
        self.published = Gauge(
            "hocket_pool_status_timestamp_seconds",
            "When the sizes were published: old, and whoever runs the pools is gone.",
            registry=registry,
        )

    def observe_pool(self, pool: str, workers: Mapping[str, int]) -> None:
        """The workers of a pool by state; "size" are those that are asked for."""
        for state, number in workers.items():
            self.workers.labels(pool, "asked" if state == "size" else state).set(number)

    def clear(self) -> None:
        """Nothing is known, until it is told again."""
        self.workers.clear()
        self.operator_workers.clear()


class WorkerMetrics:
    """What a worker's engine shows: who it is, its load, its pulse, its steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.info = Info(
            "hocket_worker", "Who the worker is, as labels; the value is 1.", registry=registry
        )
        self.step_s = _latency(registry, "hocket_worker_step_seconds", "One step of the engine.")
        self.steps = Gauge(
            "hocket_worker_steps", "Steps since the start: stands still when the engine does.",
            registry=registry,
        )  # fmt: skip
        self.running = Gauge(
            "hocket_worker_running_requests", "Requests in the batch.", registry=registry
        )
        self.waiting = Gauge(
            "hocket_worker_waiting_requests", "Requests that wait.", registry=registry
        )
        self.queued_prompt_tokens = Gauge(
            "hocket_worker_queued_prompt_tokens", "Prompt tokens not yet computed.",
            registry=registry,
        )  # fmt: skip
        self.blocks = Gauge(
            "hocket_worker_kv_blocks", "KV blocks: all, free, finished but unread.", ["state"],
            registry=registry,
        )  # fmt: skip

    def observe_identity(self, worker: WorkerDescription) -> None:
        """Who the worker is; its transport is known after the first hand-off."""
        labels = {
            "worker": worker.worker_id,
            "role": worker.role.value,
            "group": worker.group,
            "rank": str(worker.rank),
            "group_size": str(worker.group_size),
            "epoch": str(worker.epoch),
            "model": worker.model,
            "transport": worker.transport,
        }
        self.info.info(labels)

    def observe_load(self, load: Load) -> None:
        """The load as of now."""
        self.steps.set(load.steps)
        self.running.set(load.running_requests)
        self.waiting.set(load.waiting_requests)
        self.queued_prompt_tokens.set(load.queued_prompt_tokens)
        self.blocks.labels("all").set(load.num_blocks)
        self.blocks.labels("free").set(load.free_blocks)
        self.blocks.labels("unread").set(load.unread_blocks)


class MetricsPage:
    """A registry behind HTTP for Prometheus, http://`address`/metrics, on a thread of its own."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Listens at once; port 0 takes a free one. What the operating system knows of the process
        (memory, CPU, open files) is added to the registry.

        Raises ConfigError when it cannot listen.
        """
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.metrics_host is {host!r} and the port {port}: "
                f"{error.strerror or error}. Port 0 takes a free one, -1 serves no metrics.",
                field="telemetry.metrics_port",
            ) from error
        ProcessCollector(registry=registry)
        self.port: int = self._server.server_port
        self.address = f"{host}:{self.port}"

    def close(self) -> None:
        """Ends it. Safe to call again."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _value(metric: Gauge | Counter) -> float:
    """The value of a metric without labels."""
    (family,) = metric.collect()
    return next(s.value for s in family.samples if not s.name.endswith("_created"))


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    (family,) = counter.collect()
    samples = [s for s in family.samples if s.name.endswith("_total")]
    return {s.labels[label]: int(s.value) for s in samples}


def _latency_sum(histogram: Histogram) -> LatencySum:
    (family,) = histogram.collect()
    values = {s.name.rpartition("_")[2]: s.value for s in family.samples}
    return LatencySum(int(values["count"]), values["sum"])


def _latency(registry: CollectorRegistry, name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_LATENCY_BUCKETS_S, registry=registry)
