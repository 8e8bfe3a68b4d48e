"""The scaling loop with an executor in memory: operators' edits, decisions, what is published."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import pytest
from redis.exceptions import RedisError

from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
)
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from control_plane.cluster.scaling_loop import ScalingLoop, ScalingPlan
from control_plane.cluster.scaling_store import AskedSize, PoolStatus, ScalingStatus
from hocket.clock import ManualClock
from hocket.errors import HocketError, WorkerUnavailable
from hocket.types import Role

PREFILL, DECODE = Role.PREFILL, Role.DECODE
POOL = PoolLimits(min_workers=1, max_workers=4, max_step_down=1)
LIMITS = Limits(POOL, POOL, up_window_s=0.0, down_window_s=20.0, operator_hold_s=100.0)


@dataclass
class MemoryExecutor:
    """Every worker that is asked for is ready at once. `refusal`: what the next resize raises."""

    pools: dict[Role, PoolWorkers] = field(
        default_factory=lambda: dict.fromkeys(Role, PoolWorkers(1, 1, 1))
    )
    refusal: HocketError | None = None

    def workers(self, role: Role) -> PoolWorkers:
        return self.pools[role]

    def resize(self, role: Role, size: int) -> None:
        self._move(role, size)
        self.pools[role] = replace(self.pools[role], written_size=size)

    def edit(self, role: Role, size: int) -> None:
        self._move(role, size)
        self.pools[role] = replace(self.pools[role], written_size=-1)

    def release(self, role: Role) -> None:
        self.pools[role] = replace(self.pools[role], written_size=self.pools[role].size)

    def notes(self) -> tuple[str, ...]:
        return ("decode-3 waits for room",)

    def _move(self, role: Role, size: int) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        self.pools[role] = replace(self.pools[role], size=size, ready=size)


@dataclass
class MemoryBoard:
    """A store in memory; away when the test says so."""

    asked: dict[Role, AskedSize] = field(default_factory=dict[Role, AskedSize])
    published: list[ScalingStatus] = field(default_factory=list[ScalingStatus])
    is_away: bool = False
    serial: int = 0

    def ask(self, role: Role, size: int | None) -> None:
        self.serial += 1
        self.asked[role] = AskedSize(size, self.serial, 0.0)

    def sizes(self) -> dict[Role, AskedSize]:
        self._check()
        return dict(self.asked)

    def forget(self, role: Role) -> None:
        self._check()
        self.asked.pop(role, None)

    def publish(self, status: ScalingStatus) -> None:
        self._check()
        self.published.append(status)

    def _check(self) -> None:
        if self.is_away:
            raise RedisError("it is away")


class World:
    """A loop, what it acts on, and a load that the test sets in requests."""

    def __init__(self, *, is_autoscaled: bool) -> None:
        self.clock = ManualClock()
        self.executor = MemoryExecutor()
        self.board = MemoryBoard()
        self.waiting_tokens: float | None = 0
        plan = ScalingPlan(is_autoscaled, 10.0, Targets(), LIMITS)
        self.loop = ScalingLoop(
            self.executor, self, self.board, plan, self.clock, unix_s=self.clock.now
        )

    def observe(self) -> Observations:
        tokens = self.waiting_tokens
        if tokens is None:
            arrivals: Arrivals | Missing = Missing("the gateway does not answer")
        else:
            arrivals = Arrivals(10.0, 0, 0)
        return Observations(
            self.clock.now(),
            self.executor.workers(PREFILL),
            self.executor.workers(DECODE),
            arrivals,
            PrefillLoad(1 if tokens else 0, tokens or 0, tokens_per_s=1000.0),
            DecodeLoad(),
        )

    def turns(self, seconds: float) -> ScalingStatus:
        for _ in range(round(seconds / 0.5)):
            self.clock.advance(0.5)
            self.loop.turn()
        return self.board.published[-1]

    def sizes(self) -> tuple[int, int]:
        return self.executor.workers(PREFILL).size, self.executor.workers(DECODE).size


def test_an_operators_size_acts_within_a_turn_also_without_the_autoscaler() -> None:
    world = World(is_autoscaled=False)
    world.board.ask(DECODE, 3)
    status = world.turns(0.5)
    assert world.sizes() == (1, 3)
    assert not status.is_autoscaled
    assert status.decode == PoolStatus(3, 3, 0, 0)
    assert status.reasons == ("decode: 1 → 3, asked for by an operator", "decode-3 waits for room")


def test_a_request_is_taken_once_and_an_equal_one_again() -> None:
    world = World(is_autoscaled=False)
    world.board.ask(DECODE, 3)
    world.turns(5)
    world.executor.resize(DECODE, 2)
    world.turns(5)
    assert world.sizes() == (1, 2)
    world.board.ask(DECODE, 3)
    world.turns(0.5)
    assert world.sizes() == (1, 3)


@pytest.mark.parametrize(("asked", "nearest"), [(0, 1), (99, 4)])
def test_a_size_outside_of_the_limits_is_moved_to_the_nearest_and_said(
    asked: int, nearest: int
) -> None:
    world = World(is_autoscaled=False)
    world.board.ask(PREFILL, asked)
    status = world.turns(0.5)
    assert world.sizes() == (nearest, 1)
    assert f"an operator asked for {asked}; the limits are 1 to 4" in status.reasons[0]


def test_a_refused_size_is_asked_for_again_in_the_next_turn() -> None:
    world = World(is_autoscaled=False)
    world.executor.refusal = WorkerUnavailable("somebody changed the pool in between")
    world.board.ask(DECODE, 3)
    world.turns(0.5)
    assert world.sizes() == (1, 1)
    world.turns(0.5)
    assert world.sizes() == (1, 3)


def test_without_the_autoscaler_load_changes_nothing() -> None:
    world = World(is_autoscaled=False)
    world.waiting_tokens = 1e6
    world.turns(60)
    assert world.sizes() == (1, 1)


def test_load_grows_and_its_end_shrinks_with_reasons() -> None:
    world = World(is_autoscaled=True)
    world.waiting_tokens = 1e6
    status = world.turns(15)
    assert world.sizes() == (4, 1)
    assert status.is_autoscaled
    assert any("1 → 4" in reason for reason in status.reasons)
    world.waiting_tokens = 0
    world.turns(120)
    assert world.sizes() == (1, 1)


def test_missing_figures_hold_the_sizes() -> None:
    world = World(is_autoscaled=True)
    world.waiting_tokens = 1e6
    world.turns(15)
    world.waiting_tokens = None
    status = world.turns(300)
    assert world.sizes()[0] == 4
    assert any("the gateway does not answer" in reason for reason in status.reasons)


def test_an_operators_size_is_kept_against_the_load_then_left() -> None:
    world = World(is_autoscaled=True)
    world.board.ask(PREFILL, 2)
    world.waiting_tokens = 1e6
    world.turns(90)
    assert world.sizes() == (2, 1)
    assert PREFILL in world.board.asked
    world.turns(30)
    assert world.sizes() == (4, 1)
    assert PREFILL not in world.board.asked, "a size that is over is still shown as a target"


def test_an_equal_request_starts_the_operators_time_again() -> None:
    world = World(is_autoscaled=True)
    world.board.ask(PREFILL, 2)
    world.waiting_tokens = 1e6
    world.turns(90)
    world.board.ask(PREFILL, 2)
    world.turns(90)
    assert world.sizes() == (2, 1)
    world.turns(30)
    assert world.sizes() == (4, 1)


def test_a_size_that_is_given_back_is_the_autoscalers_at_once() -> None:
    world = World(is_autoscaled=True)
    world.board.ask(PREFILL, 2)
    world.waiting_tokens = 1e6
    world.turns(15)
    world.board.ask(PREFILL, None)
    status = world.turns(10)
    assert world.sizes() == (4, 1)
    assert world.board.asked == {}
    assert any("2 → 4" in reason for reason in status.reasons)


def test_giving_back_without_an_autoscaler_keeps_the_size_and_says_so() -> None:
    world = World(is_autoscaled=False)
    world.board.ask(DECODE, 3)
    world.turns(1)
    world.board.ask(DECODE, None)
    status = world.turns(1)
    assert world.sizes() == (1, 3)
    assert status.reasons[0] == "decode: stays at 3, the autoscaler is off"


def test_the_store_being_away_is_logged_once_and_holds_up_no_decision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(is_autoscaled=True)
    world.board.is_away = True
    world.waiting_tokens = 1e6
    with caplog.at_level(logging.WARNING), pytest.raises(IndexError):
        world.turns(15)
    assert world.sizes() == (4, 1)
    assert [record.message for record in caplog.records] == [
        "the store of sizes is away, the pools are kept: it is away"
    ]
    world.board.is_away = False
    world.turns(1)
    assert world.board.published


def test_a_decision_is_logged_when_it_moves_a_size_or_says_something_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(is_autoscaled=True)
    with caplog.at_level(logging.INFO):
        world.turns(100)
        # The second one no longer waits for the end of the down window.
        assert len(caplog.records) == 2, "decisions that said the same"
        world.waiting_tokens = 1e6
        world.turns(10)
    assert "prefill 1 (1 ready) → 4" in caplog.records[-1].message
