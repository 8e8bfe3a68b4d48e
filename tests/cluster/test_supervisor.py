"""Places are kept filled: the supervisor with processes in memory and a clock by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from control_plane.cluster.supervisor import Health, Place, Supervisor
from hocket.clock import ManualClock


@dataclass
class MemoryProcess:
    """A process that is whatever the test says."""

    health: Health = Health.STARTING
    is_killed: bool = False

    def look(self) -> Health:
        return Health.DEAD if self.is_killed else self.health

    def why(self) -> str:
        return "it ended"

    def kill(self) -> None:
        self.is_killed = True


@dataclass
class Launches:
    """Hands out processes and remembers them."""

    made: list[MemoryProcess] = field(default_factory=list)

    def __call__(self) -> MemoryProcess:
        self.made.append(MemoryProcess())
        return self.made[-1]


def supervised() -> tuple[Supervisor, Launches, ManualClock]:
    launches, clock = Launches(), ManualClock()
    place = Place("decode-0", launches, startup_timeout_s=60.0, stuck_s=10.0)
    supervisor = Supervisor([place], clock)
    supervisor.tick()
    return supervisor, launches, clock


def pass_time(supervisor: Supervisor, clock: ManualClock, seconds: float) -> str:
    """Ticks every half second; returns the reasons of what was replaced."""
    reasons: list[str] = []
    for _ in range(round(seconds / 0.5)):
        clock.advance(0.5)
        reasons += [replaced.reason for replaced in supervisor.tick()]
    return ", ".join(reasons)


def test_a_place_that_is_added_is_launched_and_watched() -> None:
    supervisor, _, clock = supervised()
    launches = Launches()
    supervisor.add(Place("decode-1", launches, startup_timeout_s=60.0, stuck_s=10.0))
    assert not supervisor.is_serving("decode-1")
    supervisor.tick()
    launches.made[0].health = Health.SERVING
    pass_time(supervisor, clock, 1)
    assert supervisor.is_serving("decode-1")
    launches.made[0].health = Health.DEAD
    pass_time(supervisor, clock, 1)
    assert len(launches.made) == 2
    assert not supervisor.is_serving("decode-1")


def test_a_place_that_is_removed_gives_its_process_away_and_is_not_filled_again() -> None:
    supervisor, launches, clock = supervised()
    launches.made[0].health = Health.SERVING
    pass_time(supervisor, clock, 1)
    assert supervisor.remove("decode-0") is launches.made[0]
    launches.made[0].health = Health.DEAD
    assert pass_time(supervisor, clock, 100) == ""
    assert len(launches.made) == 1
    assert not launches.made[0].is_killed, "its new owner may still need it"


def test_a_place_that_is_removed_between_two_lives_is_never_launched_again() -> None:
    supervisor, launches, clock = supervised()
    launches.made[0].health = Health.DEAD
    supervisor.tick()
    assert supervisor.remove("decode-0") is None
    pass_time(supervisor, clock, 100)
    assert len(launches.made) == 1


def test_a_healthy_process_is_left_alone() -> None:
    supervisor, launches, clock = supervised()
    launches.made[0].health = Health.SERVING
    pass_time(supervisor, clock, 100)
    assert len(launches.made) == 1
    assert supervisor.restarts("decode-0") == 0


def test_a_dead_process_is_replaced_within_a_second() -> None:
    supervisor, launches, clock = supervised()
    launches.made[0].health = Health.SERVING
    pass_time(supervisor, clock, 5)
    launches.made[0].health = Health.DEAD
    assert pass_time(supervisor, clock, 1) == "it ended"
    assert len(launches.made) == 2
    assert supervisor.processes() == {"decode-0": launches.made[1]}


def test_a_silent_process_is_killed_and_replaced_only_after_stuck_s() -> None:
    supervisor, launches, clock = supervised()
    launches.made[0].health = Health.SERVING
    pass_time(supervisor, clock, 5)
    launches.made[0].health = Health.SILENT
    pass_time(supervisor, clock, 10)
    assert not launches.made[0].is_killed
    assert "stuck_s" in pass_time(supervisor, clock, 1.5)
    assert launches.made[0].is_killed
    assert len(launches.made) == 2


def test_a_pulse_in_time_resets_the_silence() -> None:
    supervisor, launches, clock = supervised()
    (process,) = launches.made
    for health in (Health.SERVING, Health.SILENT) * 5:
        process.health = health
        pass_time(supervisor, clock, 8)
    assert len(launches.made) == 1


def test_a_process_that_never_serves_is_replaced_at_the_startup_timeout() -> None:
    supervisor, launches, clock = supervised()
    pass_time(supervisor, clock, 60)
    assert len(launches.made) == 1
    assert "startup_timeout_s" in pass_time(supervisor, clock, 2)
    assert len(launches.made) == 2


def test_a_crash_loop_slows_down_to_half_a_minute() -> None:
    supervisor, launches, clock = supervised()
    for _ in range(2000):
        launches.made[-1].health = Health.DEAD
        clock.advance(0.2)
        supervisor.tick()
    # 0.1, 0.4, 1.6, 6.4, 25.6 s, then every 30 s: about 17 launches in 400 s.
    assert 10 < len(launches.made) < 25
    assert supervisor.restarts("decode-0") >= len(launches.made) - 1


def test_a_process_that_served_a_while_is_replaced_at_once_however_often_it_dies() -> None:
    supervisor, launches, clock = supervised()
    for life in range(1, 7):
        launches.made[-1].health = Health.SERVING
        pass_time(supervisor, clock, 6)
        launches.made[-1].health = Health.DEAD
        pass_time(supervisor, clock, 1)
        assert len(launches.made) == life + 1


def test_a_restart_that_waits_says_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, launches, clock = supervised()
    for _ in range(200):
        launches.made[-1].health = Health.DEAD
        clock.advance(0.2)
        supervisor.tick()
    said = [record.getMessage() for record in caplog.records]
    waits = ("0.1", "0.4", "1.6", "6.4", "25.6", "30.0")
    assert said == [f"decode-0 is replaced in {wait} s: it ended" for wait in waits]


def test_a_process_that_served_long_restarts_without_delay_after_an_old_crash_loop() -> None:
    supervisor, launches, clock = supervised()
    for _ in range(500):
        launches.made[-1].health = Health.DEAD
        clock.advance(0.2)
        supervisor.tick()
    pass_time(supervisor, clock, 40)
    launches.made[-1].health = Health.SERVING
    pass_time(supervisor, clock, 70)
    before = len(launches.made)
    launches.made[-1].health = Health.DEAD
    pass_time(supervisor, clock, 1)
    assert len(launches.made) == before + 1
