"""Metrics under their own names, log lines in JSON."""

from __future__ import annotations

import io
import json
import logging
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

from hocket.errors import ConfigError
from hocket.telemetry import (
    DraftMetrics,
    GatewayMetrics,
    JsonFormatter,
    MetricsPage,
    WorkerMetrics,
    configure_logging,
)
from hocket.types import DraftCounts, Load


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


def test_a_log_line_is_json_with_its_request() -> None:
    record = logging.makeLogRecord(
        {"msg": "took %d ms", "args": (5,), "levelname": "INFO", "name": "x", "request_id": "r1"}
    )
    line = json.loads(JsonFormatter("gateway").format(record))
    assert line["message"] == "took 5 ms"
    assert (line["process"], line["level"], line["request_id"]) == ("gateway", "info", "r1")


def test_logging_goes_to_one_stream() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        stream = io.StringIO()
        configure_logging("warning", "worker", stream)
        configure_logging("warning", "worker", stream)
        logging.getLogger("a.b").info("no")
        logging.getLogger("a.b").warning("yes")
        assert [json.loads(x)["message"] for x in stream.getvalue().splitlines()] == ["yes"]
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


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
