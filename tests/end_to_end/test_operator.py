"""What an operator sees of the whole system: status, sizes, and the log lines of one request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.rpc import generation_pb2 as generation
from tests.end_to_end.running_cluster import Running, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running() as cluster:
        yield cluster


def hocket(*arguments: str) -> str:
    command = [sys.executable, "-m", "hocket.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def log_lines(up: Running, wanted: str) -> list[dict[str, Any]]:
    """The lines of all processes that have this in them: what grep finds."""
    files = sorted(Path(up.serving.log_folder).glob("*.jsonl"))
    return [json.loads(line) for f in files for line in f.open() if wanted in line]


def test_one_search_follows_a_request_through_all_processes(up: Running) -> None:
    request = generation.GenerateRequest(text="Return the", request_id="follow-me")
    request.stopping.max_tokens = 12
    request.stopping.ignore_eos = True
    up.ask(request)
    until(lambda: len(log_lines(up, "follow-me")) == 3, 10, "a line of each process")
    lines = {line["process"]: line for line in log_lines(up, "follow-me")}
    assert set(lines) == {"gateway", "prefill-0", "decode-0"}
    gateway = lines["gateway"]
    assert (gateway["request_id"], gateway["outcome"]) == ("follow-me", "OK")
    assert gateway["output_tokens"] == lines["decode-0"]["output_tokens"] == 12
    assert (gateway["prefill_worker"], gateway["decode_worker"]) == ("prefill-0", "decode-0")
    assert lines["prefill-0"]["outcome"] == "handed off"
    assert lines["prefill-0"]["request_id"] == lines["decode-0"]["request_id"]
    assert "Return" not in json.dumps(lines)


def test_a_status_shows_what_is_there(up: Running) -> None:
    up.ask(generation.GenerateRequest(text="Return the"))
    address = up.serving.admin_address
    told: dict[str, Any] = {}

    def tells_of_pools() -> bool:
        told.update(json.loads(hocket("status", "--json", "--address", address)))
        return "pools" in told

    until(tells_of_pools, 30, "whoever runs the pools has said so")
    assert told["pools"]["prefill"] == {"size": 1, "ready": 1, "starting": 0, "draining": 0}
    assert told["pools"]["age_s"] < 30
    assert told["store_fault"] == ""
    workers = {w["worker"]["worker_id"]: w for w in told["workers"]}
    assert set(workers) == {"prefill-0", "decode-0"}
    for worker in workers.values():
        assert worker["is_connected"]
        assert worker["worker"]["metrics_address"]
    assert told["gateway"]["requests"]["OK"] >= 1
    assert told["gateway"]["first_token"]["count"] >= 1
    text = hocket("status", "--address", address)
    assert "decode-0" in text
    assert "only operators change sizes" in text


def test_sizes_can_be_asked_for_and_are_followed(up: Running) -> None:
    address = up.serving.admin_address
    told = hocket("scale", "decode=2", "--wait", "--address", address)
    assert told.splitlines()[0] == "asked for decode=2"
    assert told.splitlines()[-2:] == ["prefill: 1 of 1 ready; decode: 2 of 2 ready", "done"]
    until(lambda: up.worker("decode-1") is not None, 30, "decode-1 is registered")
    hocket("scale", "decode=1", "--wait", "--address", address)
    until(lambda: up.worker("decode-1") is None, 30, "decode-1 is gone")
    assert up.ask(generation.GenerateRequest(text="Return the"))[0].token_ids
