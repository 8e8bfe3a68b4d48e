"""What ends a start, and what does not: workers in memory."""

from __future__ import annotations

from collections.abc import Callable
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


def start_up(
    host: MemoryHost, unroutable: Callable[[int], str] = lambda n: "", *, limit_s: float = 60.0
) -> StartUp:
    clock = SystemClock()

    def gateway() -> MemoryWorker:
        return MemoryWorker(Health.SERVING)

    supervisor = Supervisor([Place(GATEWAY, gateway, 60.0, 60.0)], clock)
    pools = WorkerPools(host, supervisor, PoolTimes(60.0, LEAVING), clock)
    pools.start(Role.DECODE, 1)
    limit = f"cluster.startup_timeout_s={limit_s:g}"
    config = load_config(None, ["prefill.workers=0", "decode.group_size=2", limit])
    return StartUp(config, supervisor, pools, cast(Any, host), lambda text: None, unroutable)


def start(kind: type[MemoryWorker]) -> FailingHost:
    host = FailingHost(kind)
    with pytest.raises(InternalError, match="decode-0 did not start: "):
        start_up(host).wait()
    return host


class ServingHost(MemoryHost):
    """Whose workers serve at once."""

    def launch(self, role: Role, index: int, reservation: Any) -> MemoryWorker:
        worker = super().launch(role, index, reservation)
        worker.health = Health.SERVING
        return worker


def test_a_worker_that_no_canary_passes_ends_the_start_with_the_reason() -> None:
    why = "decode-0.1 failed its canary: No answer from prefill-0 at 10.9.9.9:1"
    with pytest.raises(InternalError, match=r"not serving after 1 s .*: decode-0\.1 failed its"):
        start_up(ServingHost(), lambda num_ranks: why, limit_s=1.0).wait()


def test_it_has_started_when_all_ranks_can_be_reached_by_requests() -> None:
    asked: list[int] = []
    answers = iter(["decode-0.0 waits for its canary", ""])

    def unroutable(num_ranks: int) -> str:
        asked.append(num_ranks)
        return next(answers)

    start_up(ServingHost(), unroutable).wait()
    assert asked == [2, 2]


def test_a_process_that_died_without_a_word_gets_one_more_life() -> None:
    assert len(start(MemoryWorker).lives["decode-0"]) == 2


def test_one_that_says_why_ends_the_start() -> None:
    assert len(start(FailingWorker).lives["decode-0"]) == 1
