"""What breaks around the workers: `up` itself, Ray, the store; and what is seen from outside."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis

from hocket.rpc import generation_pb2 as generation
from tests.end_to_end.running_cluster import (
    OVERRIDES,
    Case,
    Running,
    answers,
    descendants,
    running,
    still_alive,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running() as cluster:
        yield cluster


@pytest.fixture
def folder() -> Iterator[Path]:
    """For temporary files of `hocket up`: short, as Ray's sockets want it."""
    made = Path(tempfile.mkdtemp(prefix="hkt-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_a_stop_string_leaves_the_draft_counts_true(up: Running) -> None:
    request = generation.GenerateRequest(text="Return the")
    request.sampling.temperature = 0.0
    request.stopping.max_tokens = 200
    request.stopping.ignore_eos = True
    whole = up.ask(request)[0]
    request.stopping.stop.append("\n")
    cut = up.ask(request)[0]
    assert cut.finish.matched_stop == "\n"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    for answer in (whole, cut):
        usage = answer.finish.usage
        assert usage.output_tokens == len(answer.token_ids) > 4
        assert usage.emitted_tokens == usage.output_tokens - 1
        assert 0 < usage.verify_steps <= usage.emitted_tokens
        assert usage.accepted_tokens == sum(usage.accepted_by_position) <= usage.drafted_tokens
        # A step emits what it accepted and one more; the last one may be cut before that.
        surplus = usage.emitted_tokens - usage.accepted_tokens - usage.verify_steps
        assert -1 <= surplus <= 0


def test_metrics_of_every_process_can_be_scraped(up: Running, cases: list[Case]) -> None:
    up.ask(cases[1].message(3))
    workers = {w.worker_id: w.metrics_address for w in up.serving.workers}
    pages = {"gateway": up.serving.metrics_address, **workers}
    assert all(address.startswith("127.0.0.1:") for address in pages.values())
    texts = {name: _page(address) for name, address in pages.items()}
    for name in ("gateway", "decode-0"):
        for metric in ("hocket_draft_tokens_accepted_total", "hocket_acceptance_length"):
            assert f"\n{metric} " in texts[name], name
        assert 'hocket_draft_survival_rate{position="0"}' in texts[name]
    assert "\nhocket_requests_in_flight 0.0" in texts["gateway"]
    for name in workers:
        assert 'hocket_worker_kv_blocks{state="free"} 64.0' in texts[name], texts[name]


def test_a_killed_store_disturbs_nobody_and_comes_back(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    for _ in range(2):
        (store,) = _processes("valkey-server")
        os.kill(store, signal.SIGKILL)
        assert up.ask(cases[0].message())[0].token_ids == expected[0]
        until(lambda s=store: _processes("valkey-server") not in ([], [s]), 20, "another store")
        until(lambda: _is_registered(up), 20, "the workers register again")
    # What starts now registers with the new store.
    os.kill(up.cluster.process_ids()["decode-0"], signal.SIGKILL)
    until(lambda: up.cluster.restarts("decode-0") == 1, 20, "decode-0 is replaced")
    until(lambda: answers(up, cases[0].message()), 90, "decode-0 serves again")
    assert up.ask(cases[0].message())[0].token_ids == expected[0]


@pytest.mark.parametrize("moment", ["waiting for", "Ctrl-C"])
def test_nothing_outlives_an_up_that_was_killed(folder: Path, moment: str) -> None:
    process = _up(folder, moment)
    started = descendants(process.pid)
    assert len(started) >= 5
    process.kill()
    process.communicate()
    assert still_alive(started, timeout_s=20) == {}
    until(lambda: not list(folder.iterdir()), 10, "its folder is deleted")


def test_up_ends_with_an_error_when_ray_has_died(folder: Path) -> None:
    process = _up(folder, "Ctrl-C")
    started = descendants(process.pid)
    (raylet,) = [number for number, name in started.items() if name == "raylet"]
    os.kill(raylet, signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: Ray has died (raylet); start again." in told
    assert still_alive(started, timeout_s=10) == {}
    assert list(folder.iterdir()) == []


def _up(folder: Path, line: str) -> subprocess.Popen[str]:
    """`hocket up` that has come as far as to print this."""
    command = [sys.executable, "-m", "hocket.cli", "up"]
    for override in OVERRIDES:
        command += ["--set", override]
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    seen: list[str] = []
    for told in process.stderr:
        seen.append(told)
        if line in told:
            return process
    raise AssertionError("".join(seen))


def _page(address: str) -> str:
    return urlopen(f"http://{address}/metrics", timeout=5).read().decode()


def _processes(name: str) -> list[int]:
    return [number for number, n in descendants(os.getpid()).items() if n == name]


def _is_registered(up: Running) -> bool:
    try:
        return all(up.worker(name) is not None for name in ("prefill-0", "decode-0"))
    except redis.RedisError:
        return False
