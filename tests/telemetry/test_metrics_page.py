"""docs/metrics.md lists every metric of every process, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from decode_workers.scheduler import DecodeCounters
from hocket.execution.drafting.collector import DraftCollector
from hocket.execution.worker_metrics import EngineMetrics
from hocket.kv.prefix_index import PrefixCounters
from hocket.kv.transfer import TransferCounters
from hocket.scheduling.draft_controller import fixed_drafts
from hocket.scheduling.export_words import ExportCounters
from hocket.scheduling.import_words import ImportCounters
from hocket.telemetry import GatewayMetrics, PoolMetrics, RoutingMetrics
from hocket.types import (
    DraftCounts,
    Failed,
    Fingerprint,
    Joined,
    Load,
    RequestKey,
    Role,
    Tokens,
    Usage,
    VerifyStep,
    WorkerDescription,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
KEY = RequestKey("r")
ENDINGS = {"counter": "_total", "info": "_info"}
BOOKKEEPING = ("_created", "_bucket", "_count", "_sum")

Metric = tuple[str, str, tuple[str, ...]]
"""Name, kind, labels."""


def gateway() -> CollectorRegistry:
    """Every labelled metric has a sample."""
    registry = CollectorRegistry()
    metrics, pools = GatewayMetrics(registry), PoolMetrics(registry)
    routing = RoutingMetrics(registry)
    routing.canaries.labels("passed").inc()
    routing.kept_out.labels("prefill").set(0)
    metrics.requests.labels("OK").inc()
    metrics.replacements.labels("OVERLOADED").inc()
    metrics.hand_off_bytes.labels("tcp").inc()
    metrics.observe_usage(Usage(drafts=DraftCounts(1, 2, (1,), (1,))))
    pools.observe_pool("prefill", {"ready": 1})
    pools.operator_workers.labels("prefill").set(1)
    return registry


PREFILL: dict[str, object] = {
    "hocket_prefill_hand_off": ExportCounters(),
    "hocket_prefix_cache": PrefixCounters(),
}
DECODE: dict[str, object] = {
    "hocket": DecodeCounters(),
    "hocket_decode_hand_off": ImportCounters(),
    "hocket_prefix_cache": PrefixCounters(),
    "hocket_transfer": TransferCounters(),
    "hocket_draft_controller": DraftCollector(fixed_drafts(1), 0.0),
}


def worker(role: Role) -> CollectorRegistry:
    metrics = EngineMetrics(role, PREFILL if role is Role.PREFILL else DECODE)
    fingerprint = Fingerprint("w", "kv", 64, "f", "n")
    description = WorkerDescription(
        "prefill-0", 1, role, "a:1", fingerprint, "m", 1, 64, 1, 64, 64, 0, False
    )
    metrics.observe_identity(description)
    events = [
        Tokens(KEY, 1, (4, 5), step=VerifyStep(2, 1)),
        Failed(KEY, 13, "", "INTERNAL"),
        Joined(KEY, 1, "tcp", recomputed=True),
    ]
    metrics.observe(events, Load())
    return metrics.registry


def shown(registry: CollectorRegistry) -> Iterator[Metric]:
    for family in registry.collect():
        kind = family.type
        assert family.samples, f"{family.name} has no sample here: give it one"
        labels = {n for s in family.samples for n in s.labels if n != "le"}
        # What an info metric tells stands in its labels: the page describes them in words.
        named = () if kind == "info" else tuple(sorted(labels))
        yield family.name + ENDINGS.get(kind, ""), kind, named


def documented(section: str) -> list[Metric]:
    """The rows of a section's table."""
    text = PAGE.read_text()
    (body,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|(.*?)\| .+ \|$", body, re.M)
    return [
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels)))) for name, kind, labels in rows
    ]


def check(section: str, *registries: CollectorRegistry) -> None:
    there = {metric for registry in registries for metric in shown(registry)}
    told = documented(section)
    assert len(told) == len(set(told)), "a metric is listed twice"
    assert set(told) == there, (
        f"missing from the page: {sorted(there - set(told))}; gone: {sorted(set(told) - there)}"
    )


def test_the_gateways_metrics_are_listed() -> None:
    check("Gateway", gateway())


def test_what_all_workers_show_is_listed() -> None:
    prefill = set(shown(worker(Role.PREFILL)))
    decode = set(shown(worker(Role.DECODE)))
    assert prefill & decode == set(documented("Workers"))


def test_hand_off_counters_of_either_kind_are_listed() -> None:
    prefill = set(shown(worker(Role.PREFILL)))
    decode = set(shown(worker(Role.DECODE)))
    assert prefill - decode == set(documented("Prefill workers"))
    assert decode - prefill == set(documented("Decode workers"))
