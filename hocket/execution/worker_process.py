"""Runs a worker's server on an event loop of its own thread, behind a small synchronous face.

A Ray actor, a test or `python -m prefill_workers` holds a `HostedWorker` and calls it from any
thread. When the engine ends by itself, so does the process: what supervises it starts a new one,
with a new epoch. That is simpler to be sure of than a worker that mends itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from hocket.config import WorkerSettings
from hocket.types import WorkerDescription

STOP_TIMEOUT_S = 30.0

_Answer = TypeVar("_Answer")
_logger = logging.getLogger(__name__)


class RunningWorker(Protocol):
    """What a worker package's `serve` returns."""

    def description(self) -> WorkerDescription: ...

    def is_alive(self) -> bool: ...

    async def drain(self, deadline_s: float) -> int: ...

    async def stop(self) -> None: ...


CrashSink = Callable[[Exception], None]
Serve = Callable[[WorkerSettings, CrashSink], Awaitable[RunningWorker]]


def end_process(error: Exception) -> None:
    """Ends this process at once: its engine is gone, and nothing on it can be saved."""
    _logger.critical("The worker's process ends: %s: %s", type(error).__name__, error)
    os._exit(70)


class HostedWorker:
    """One worker behind synchronous methods; `serve` is its package's."""

    def __init__(
        self, serve: Serve, settings: WorkerSettings, on_crash: CrashSink = end_process
    ) -> None:
        self._serve = serve
        self._settings = settings
        self._on_crash = on_crash
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"{settings.worker_id}-server", daemon=True
        )
        self._worker: RunningWorker | None = None

    def start(self) -> WorkerDescription:
        """Loads the model and serves; returns when requests can come.

        Raises:
            HocketError: the checkpoint or the settings cannot work.
        """
        self._thread.start()
        self._worker = self._wait(self._started())
        return self._worker.description()

    def describe(self) -> WorkerDescription:
        """The worker as it is now, with its load."""
        return self._running.description()

    def is_alive(self) -> bool:
        """Whether the engine turns; False before `start` and after `stop`."""
        return self._worker is not None and self._worker.is_alive()

    def drain(self, deadline_s: float) -> int:
        """Takes nothing new and finishes what is here; returns how many requests it failed. On a
        worker that was stopped meanwhile there is nothing."""
        worker = self._worker
        return self._wait(worker.drain(deadline_s)) if worker is not None else 0

    def stop(self) -> None:
        """Ends the worker; requests that are still here fail. Safe to call again."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._wait(worker.stop(), STOP_TIMEOUT_S)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def _running(self) -> RunningWorker:
        assert self._worker is not None, "start() first"
        return self._worker

    async def _started(self) -> RunningWorker:
        return await self._serve(self._settings, self._on_crash)

    def _wait(
        self, awaited: Coroutine[Any, Any, _Answer], timeout_s: float | None = None
    ) -> _Answer:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(timeout_s)
