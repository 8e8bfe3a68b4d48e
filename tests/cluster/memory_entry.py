"""A worker class that an actor can be told to run by name: no model, no server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hocket.config import WorkerSettings
from hocket.types import WorkerDescription
from tests.cluster.worker_descriptions import describe

MADE: list[MemoryEntry] = []


class MemoryEntry:
    """`start` returns when the test has set `may_start`; `drain` asks `on_drain`, and returns when
    the test has set `is_empty`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.told: list[str] = []
        self.on_drain: Callable[[], str] = str
        self.has_begun_drain = threading.Event()
        self.is_empty = threading.Event()
        self.is_starting = threading.Event()
        self.may_start = threading.Event()
        MADE.append(self)

    def start(self) -> WorkerDescription:
        self.is_starting.set()
        assert self.may_start.wait(10.0)
        return self.describe()

    def describe(self) -> WorkerDescription:
        settings = self.settings
        return describe(settings.worker_id, epoch=settings.epoch, role=settings.role)

    def is_alive(self) -> bool:
        return True

    def drain(self, deadline_s: float) -> int:
        self.told.append(f"drain {deadline_s:g}{self.on_drain()}")
        self.has_begun_drain.set()
        assert self.is_empty.wait(10.0)
        return 0

    def stop(self) -> None:
        self.told.append("stop")
