"""Claims about a worker behind synchronous methods, as a Ray actor holds it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from hocket.config import DecodeSettings, ModelSettings, WorkerSettings
from hocket.errors import CheckpointError
from hocket.execution.worker_process import CrashSink, HostedWorker
from hocket.types import Fingerprint, Role, WorkerDescription

SETTINGS = WorkerSettings(Role.DECODE, "decode-0", 7, ModelSettings(), DecodeSettings())


class Running:
    """A worker of nothing: it notes on which thread it was called."""

    def __init__(self) -> None:
        self.alive = True
        self.calls: list[tuple[str, str]] = []

    def description(self) -> WorkerDescription:
        fingerprint = Fingerprint("w", "kv", 64, "float32", "n")
        return WorkerDescription(
            "decode-0", 7, Role.DECODE, "h:1", fingerprint, "m", 1, 64, 1, 8, 7, 3, True
        )

    def is_alive(self) -> bool:
        return self.alive

    async def drain(self, deadline_s: float) -> int:
        self.calls.append((f"drain {deadline_s}", threading.current_thread().name))
        await asyncio.sleep(0)
        return 2

    async def stop(self) -> None:
        self.calls.append(("stop", threading.current_thread().name))
        self.alive = False


def hosted(running: Running) -> HostedWorker:
    async def serve(settings: WorkerSettings, on_crash: CrashSink) -> Running:
        assert settings is SETTINGS
        return running

    return HostedWorker(serve, SETTINGS)


def test_calls_run_on_the_worker_s_own_loop() -> None:
    running = Running()
    worker = hosted(running)
    assert not worker.is_alive()
    assert worker.start().worker_id == "decode-0"
    assert worker.is_alive()
    assert worker.describe().epoch == 7
    assert worker.drain(1.5) == 2
    worker.stop()
    worker.stop()
    assert not worker.is_alive()
    assert running.calls == [("drain 1.5", "decode-0-server"), ("stop", "decode-0-server")]


def test_a_drain_that_comes_after_the_stop_finds_nothing_to_do() -> None:
    running = Running()
    worker = hosted(running)
    worker.start()
    worker.stop()
    assert worker.drain(1.5) == 0
    assert [call for call, _ in running.calls] == ["stop"]


def test_a_worker_that_cannot_start_says_why() -> None:
    async def serve(settings: WorkerSettings, on_crash: CrashSink) -> Running:
        raise CheckpointError("no weights")

    worker = HostedWorker(serve, SETTINGS)
    with pytest.raises(CheckpointError, match="no weights"):
        worker.start()
    worker.stop()


def test_a_crash_is_told_once_the_server_says_so() -> None:
    told: list[Exception] = []

    async def serve(settings: WorkerSettings, on_crash: Callable[[Exception], None]) -> Running:
        on_crash(ValueError("a bug"))
        return Running()

    worker = HostedWorker(serve, SETTINGS, on_crash=told.append)
    worker.start()
    worker.stop()
    assert [str(error) for error in told] == ["a bug"]


def test_by_default_a_crash_ends_the_process() -> None:
    program = (
        "from hocket.execution.worker_process import end_process\n"
        "end_process(ValueError('a bug'))\n"
        "print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (70, "")
    assert "a bug" in done.stderr
