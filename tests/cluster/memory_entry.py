"""A worker class that an actor can be told to run by name: no model, no server."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hocket.config import WorkerSettings
from hocket.types import Fingerprint, Load, WorkerDescription

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
        return WorkerDescription(
            worker_id=self.settings.worker_id,
            epoch=self.settings.epoch,
            role=self.settings.role,
            address="127.0.0.1:1",
            fingerprint=Fingerprint("digest", "layout", 64, "bfloat16", "1-invariant"),
            model="hocket-tiny",
            num_blocks=1,
            block_tokens=64,
            block_bytes=1,
            max_context_tokens=64,
            max_prompt_tokens=63,
            max_draft_tokens=0,
            has_mtp=False,
            load=Load(),
        )

    def is_alive(self) -> bool:
        return True

    def drain(self, deadline_s: float) -> int:
        self.told.append(f"drain {deadline_s:g}{self.on_drain()}")
        self.has_begun_drain.set()
        assert self.is_empty.wait(10.0)
        return 0

    def stop(self) -> None:
        self.told.append("stop")
