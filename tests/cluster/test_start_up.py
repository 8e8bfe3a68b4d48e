"""What ends a start, and what does not: workers in memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

from control_plane.cluster.pools import PoolTimes, WorkerPools
from control_plane.cluster.start_up import GATEWAY, StartUp
from control_plane.cluster.supervisor import Health, Place, Supervisor
from hocket.clock import SystemClock
from hocket.config import load_config
from hocket.errors import InternalError
from hocket.types import Role
from tests.cluster.memory_workers import MemoryHost, MemoryWorker
from tests.cluster.test_pools import LEAVING


class FailingWorker(MemoryWorker):
    """Fails for a reason of its own."""

    def why(self) -> str:
        return "model.dtype is wrong"


class FailingHost(MemoryHost):
    """Whose workers die at once; `lives` counts how often."""

    def __init__(self, kind: type[MemoryWorker]) -> None:
        super().__init__()
        self._kind = kind

    def launch(self, role: Role, index: int, reservation: Any) -> MemoryWorker:
        worker = self._kind(health=Health.DEAD)
        self.lives.setdefault(f"{role.value}-{index}", []).append(worker)
        return worker


def start(kind: type[MemoryWorker]) -> FailingHost:
    host, clock = FailingHost(kind), SystemClock()
    supervisor = Supervisor([Place(GATEWAY, MemoryWorker, 60.0, 60.0)], clock)
    pools = WorkerPools(host, supervisor, PoolTimes(60.0, LEAVING), clock)
    pools.start(Role.DECODE, 1)
    config = load_config(None, ["prefill.workers=0"])
    start_up = StartUp(config, supervisor, pools, cast(Any, host), lambda text: None)
    with pytest.raises(InternalError, match="decode-0 did not start: "):
        start_up.wait()
    return host


def test_a_process_that_died_without_a_word_gets_one_more_life() -> None:
    assert len(start(MemoryWorker).lives["decode-0"]) == 2


def test_one_that_says_why_ends_the_start() -> None:
    assert len(start(FailingWorker).lives["decode-0"]) == 1
