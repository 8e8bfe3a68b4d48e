"""Metrics under their own names."""

from __future__ import annotations

from dataclasses import replace
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from hocket.draft_metrics import DraftMetrics
from hocket.errors import ConfigError
from hocket.telemetry import (
    GatewayMetrics,
    LatencySum,
    MetricsPage,
    WorkerMetrics,
)
from hocket.types import (
    DraftCounts,
    Fingerprint,
    Load,
    Role,
    Usage,
    WorkerDescription,
)


def test_acceptance_has_one_name_per_definition() -> None:
    registry = CollectorRegistry()
    drafts = DraftMetrics(registry)
    drafts.add(DraftCounts(10, 25, (10, 10, 5), (8, 5, 2)))
    drafts.add(DraftCounts(10, 10, (5,), (0,)))
    value = registry.get_sample_value
    assert value("hocket_draft_acceptance_rate") == 15 / 30
    assert value("hocket_draft_survival_rate", {"position": "0"}) == 8 / 15
    assert value("hocket_draft_survival_rate", {"position": "2"}) == 2 / 5
    assert value("hocket_acceptance_length") == 35 / 20
    assert value("hocket_draft_tokens_total") == 30
    assert value("hocket_draft_tokens_accepted_total") == 15
    assert value("hocket_draft_position_proposed_total", {"position": "1"}) == 10


def test_nothing_drafted_is_zero_not_a_division() -> None:
    registry = CollectorRegistry()
    DraftMetrics(registry).add(DraftCounts())
    assert registry.get_sample_value("hocket_draft_acceptance_rate") == 0


def test_inter_token_latency_has_one_sample_per_token() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry).observe_tokens(0.4, 4)
    assert registry.get_sample_value("hocket_inter_token_latency_seconds_count") == 4
    total = registry.get_sample_value("hocket_inter_token_latency_seconds_sum")
    assert total is not None
    assert abs(total - 0.4) < 1e-9


def test_a_workers_load_is_shown() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).observe_load(Load(free_blocks=3, num_blocks=9, steps=7))
    assert registry.get_sample_value("hocket_worker_kv_blocks", {"state": "free"}) == 3
    assert registry.get_sample_value("hocket_worker_steps") == 7


def test_a_worker_says_who_it_is_and_then_how_it_reads() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    fingerprint = Fingerprint("w", "kv", 64, "f", "n")
    worker = WorkerDescription(
        *("decode-0.1", 7, Role.DECODE, "a:1", fingerprint, "m", 1, 64, 1, 64, 64, 0, False),
        group="decode-0",
        rank=1,
        group_size=2,
    )
    metrics.observe_identity(worker)
    metrics.observe_identity(replace(worker, transport="cma"))
    samples = [s for f in registry.collect() for s in f.samples if s.name == "hocket_worker_info"]
    assert [s.labels["transport"] for s in samples] == ["cma"]
    told = samples[0].labels
    assert (told["worker"], told["role"], told["epoch"]) == ("decode-0.1", "decode", "7")
    assert (told["group"], told["rank"], told["group_size"]) == ("decode-0", "1", "2")


def test_figures_are_the_metrics_as_values() -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.requests.labels("OK").inc(3)
    metrics.requests.labels("CANCELLED").inc()
    metrics.in_flight.inc(2)
    metrics.first_token_s.observe(0.5)
    metrics.first_token_s.observe(1.5)
    metrics.hand_off_bytes.labels("tcp").inc(4096)
    metrics.observe_usage(Usage(7, 9, 2, DraftCounts(2, 3, (2,), (1,))))
    figures = metrics.figures()
    assert dict(figures.requests_by_outcome) == {"OK": 3, "CANCELLED": 1}
    assert (figures.in_flight, figures.queued) == (2, 0)
    assert figures.first_token == LatencySum(2, 2.0)
    assert figures.inter_token == LatencySum(0, 0.0)
    assert dict(figures.hand_off_bytes_by_transport) == {"tcp": 4096}
    assert (figures.prompt_tokens, figures.cached_tokens) == (7, 2)
    assert (figures.output_tokens, figures.finished_output_tokens) == (0, 9)
    assert figures.drafts == DraftCounts(2, 3, (2,), (1,))


def test_a_page_shows_the_registry_until_it_is_closed() -> None:
    registry = CollectorRegistry()
    DraftMetrics(registry).add(DraftCounts(2, 3, (2,), (1,)))
    page = MetricsPage(registry, "127.0.0.1", 0)
    url = f"http://{page.address}/metrics"
    text = urlopen(url, timeout=5).read().decode()
    assert "hocket_acceptance_length 1.5" in text
    assert 'hocket_draft_survival_rate{position="0"} 0.5' in text
    with pytest.raises(ConfigError, match=f"telemetry.metrics_host.*{page.port}"):
        MetricsPage(registry, "127.0.0.1", page.port)
    page.close()
    with pytest.raises(OSError, match="refused"):
        urlopen(url, timeout=5)
