"""Pools grow and shrink: workers in memory, a clock by hand."""

from __future__ import annotations

import pytest

from control_plane.cluster.departures import DepartureTimes
from control_plane.cluster.pools import Drained, NodeName, PoolTimes, WorkerPools
from control_plane.cluster.ray_executor import RayExecutor
from control_plane.cluster.supervisor import Health, Supervisor
from hocket.clock import ManualClock
from hocket.types import Role
from tests.cluster.memory_workers import MemoryHost

DECODE, PREFILL = Role.DECODE, Role.PREFILL
LEAVING = DepartureTimes(announce_s=2.0, drain_s=600.0, stuck_s=20.0)


class World:
    """Both pools, their host, and time."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.clock = ManualClock()
        self.host = MemoryHost(has_room)
        self.supervisor = Supervisor([], self.clock)
        times = PoolTimes(startup_s=120.0, leaving=LEAVING)
        self.pools = WorkerPools(self.host, self.supervisor, times, self.clock)

    def look(self, seconds: float = 0.2) -> None:
        self.clock.advance(seconds)
        self.pools.tick()
        self.supervisor.tick()
        self.pools.tick()

    def serve(self, *names: str) -> None:
        for name in names:
            self.host[name].health = Health.SERVING
        self.look()

    def names(self) -> list[str]:
        """Workers that run or drain."""
        return sorted(self.pools.processes())


@pytest.fixture
def world() -> World:
    """One prefill and three decode workers that serve."""
    made = World()
    made.pools.start(PREFILL, 1)
    made.pools.start(DECODE, 3)
    made.look()
    made.serve("prefill-0", "decode-0", "decode-1", "decode-2")
    return made


def test_a_worker_starts_when_there_is_room_and_is_ready_when_it_serves() -> None:
    world = World()
    world.pools.start(DECODE, 1)
    assert world.pools.workers(DECODE).starting_s == (0.0,)
    world.look(7.0)
    assert world.pools.workers(DECODE).starting_s == (7.0,)
    world.serve("decode-0")
    pool = world.pools.workers(DECODE)
    assert (pool.size, pool.ready, pool.starting_s) == (1, 1, ())
    assert pool.start_up_s == pytest.approx(7.2)
    assert world.pools.ready(DECODE) == ("decode-0",)


def test_a_worker_without_room_waits_says_so_and_holds_nobody_up(world: World) -> None:
    world.host.has_room = False
    world.pools.start(DECODE, 1)
    world.host.has_room = True
    world.pools.start(DECODE, 1)
    world.look(30.0)
    world.serve("decode-4")
    assert world.pools.without_room(DECODE) == 1
    assert world.pools.workers(DECODE).starting_s == (30.2,)
    (note,) = world.pools.notes()
    assert note == "decode-3 waits for room since 30 s: 1 x {'GPU': 8.0}"
    world.host.rooms[-2].is_there = True
    world.look()
    world.serve("decode-3")
    assert world.pools.workers(DECODE).ready == 5


def test_a_worker_that_waits_for_room_is_cancelled_before_anybody_drains(world: World) -> None:
    world.host.has_room = False
    world.pools.start(DECODE, 1)
    world.pools.drain(DECODE, 1)
    assert world.host.rooms[-1].is_released
    pool = world.pools.workers(DECODE)
    assert (pool.size, pool.ready, pool.draining, pool.starting_s) == (3, 3, 0, ())
    assert world.pools.take_drained(DECODE) == [Drained("decode-3", ())]


def test_a_worker_that_still_starts_goes_before_one_that_serves(world: World) -> None:
    world.pools.start(DECODE, 1)
    world.look()
    world.pools.drain(DECODE, 1)
    worker = world.host["decode-3"]
    assert worker.told == ["drain 2 600"], "it may be registered by now, and have requests"
    worker.has_drained = worker.has_ended = True
    world.look()
    world.look()
    assert worker.told == ["drain 2 600", "stop", "kill"]
    pool = world.pools.workers(DECODE)
    assert (pool.ready, pool.draining) == (3, 0)
    assert len(world.host.lives["decode-3"]) == 1, "what was taken away was started again"


def test_a_worker_that_hangs_while_it_starts_is_soon_gone(world: World) -> None:
    world.pools.start(DECODE, 1)
    world.look()
    world.pools.drain(DECODE, 1)
    world.look(4.0)
    assert world.pools.workers(DECODE).draining == 1
    world.look(2.0)
    assert world.host["decode-3"].told == ["drain 2 600", "kill"]
    assert world.pools.workers(DECODE).draining == 0


def test_a_worker_that_comes_up_while_it_is_taken_away_finishes_what_it_got(world: World) -> None:
    world.pools.start(DECODE, 1)
    world.look()
    world.pools.drain(DECODE, 1)
    worker = world.host["decode-3"]
    worker.health = Health.SERVING
    world.look(60.0)
    assert worker.told == ["drain 2 600"]


def test_the_newest_ready_worker_drains_then_stops_then_gives_its_room_back(world: World) -> None:
    worker, room = world.host["decode-2"], world.host.rooms[3]
    world.pools.drain(DECODE, 1)
    assert worker.told == ["drain 2 600"]
    pool = world.pools.workers(DECODE)
    assert (pool.size, pool.ready, pool.draining) == (2, 2, 1)
    world.look(500.0)
    assert worker.told == ["drain 2 600"], "it was stopped before it was empty"
    worker.has_drained = True
    world.look()
    assert worker.told[-1] == "stop"
    assert not room.is_released
    worker.has_ended = True
    world.look()
    assert worker.told[-1] == "kill"
    assert room.is_released
    assert world.pools.take_drained(DECODE) == [
        Drained("decode-2", (NodeName("node-a", "10.0.0.1"),))
    ]
    assert world.pools.take_drained(DECODE) == []
    assert world.names() == ["decode-0", "decode-1", "prefill-0"]


def test_a_name_is_free_again_only_when_its_worker_is_gone(world: World) -> None:
    """A later life under the name of one that drains would end it, with its requests."""
    world.pools.drain(DECODE, 1)
    world.pools.start(DECODE, 1)
    world.look()
    assert world.names() == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0"]
    world.host["decode-2"].has_drained = world.host["decode-2"].has_ended = True
    world.look()
    world.look()
    world.pools.start(DECODE, 1)
    world.look()
    assert len(world.host.lives["decode-2"]) == 2


def test_a_draining_worker_that_dies_is_not_started_again(world: World) -> None:
    world.pools.drain(DECODE, 1)
    world.host["decode-2"].health = Health.DEAD
    world.look()
    world.look(60.0)
    assert len(world.host.lives["decode-2"]) == 1
    assert world.pools.workers(DECODE).draining == 0


@pytest.mark.parametrize(("health", "within_s"), [(Health.SILENT, 25.0), (Health.SERVING, 640.0)])
def test_a_drain_that_hangs_or_never_ends_is_cut(
    world: World, health: Health, within_s: float
) -> None:
    worker = world.host["decode-2"]
    world.pools.drain(DECODE, 1)
    worker.health = health
    for _ in range(10):
        assert "kill" not in worker.told
        world.look(within_s / 12)
    for _ in range(3):
        world.look(within_s / 12)
    assert worker.told == ["drain 2 600", "kill"]
    assert world.pools.workers(DECODE).draining == 0


def test_a_worker_that_does_not_stop_is_killed(world: World) -> None:
    worker = world.host["decode-2"]
    world.pools.drain(DECODE, 1)
    worker.has_drained = True
    world.look()
    world.look(29.0)
    assert worker.told[-1] == "stop"
    world.look(2.0)
    assert worker.told[-1] == "kill"


def test_a_worker_that_died_starts_again_and_counts_from_then(world: World) -> None:
    world.look(100.0)
    world.host["decode-1"].health = Health.DEAD
    world.look()
    world.look(5.0)
    pool = world.pools.workers(DECODE)
    assert (pool.size, pool.ready, pool.starting_s) == (3, 2, (5.0,))
    assert len(world.host.lives["decode-1"]) == 2
    world.serve("decode-1")
    assert world.pools.workers(DECODE).ready == 3


def test_all_workers_can_be_taken_away_and_more_than_there_are(world: World) -> None:
    world.pools.drain(DECODE, 7)
    pool = world.pools.workers(DECODE)
    assert (pool.size, pool.draining) == (0, 3)
    assert world.pools.workers(PREFILL).size == 1


def test_an_executor_knows_its_own_sizes_from_an_operators(world: World) -> None:
    executor = RayExecutor(world.pools)
    assert executor.workers(DECODE).written_size == 3
    executor.edit(DECODE, 4)
    pool = executor.workers(DECODE)
    assert pool.size == 4
    assert pool.written_size != 4
    executor.release(DECODE)
    assert executor.workers(DECODE).written_size == 4
    executor.resize(DECODE, 2)
    pool = executor.workers(DECODE)
    assert (pool.size, pool.written_size, pool.draining) == (2, 2, 1)
    executor.resize(DECODE, 2)
    assert executor.workers(DECODE).size == 2


def test_an_operator_who_asks_for_the_present_size_wants_it_kept(world: World) -> None:
    executor = RayExecutor(world.pools)
    executor.edit(DECODE, 3)
    pool = executor.workers(DECODE)
    assert (pool.size, pool.ready) == (3, 3)
    assert pool.written_size != 3


def test_where_workers_run_is_told_by_name(world: World) -> None:
    assert world.pools.nodes(PREFILL) == {"prefill-0": (NodeName("node-a", "10.0.0.1"),)}
