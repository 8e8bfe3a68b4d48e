"""A worker of several ranks is one process to whoever watches it."""

from __future__ import annotations

import pytest

from control_plane.cluster.departures import Departure, DepartureTimes
from control_plane.cluster.group_process import GroupProcess
from control_plane.cluster.shut_down import stop_workers
from control_plane.cluster.supervisor import Health
from tests.cluster.memory_workers import MemoryWorker


def group(*healths: Health) -> tuple[GroupProcess, list[MemoryWorker]]:
    ranks = [MemoryWorker(health) for health in healths]
    return GroupProcess({f"decode-0.{i}": rank for i, rank in enumerate(ranks)}), ranks


@pytest.mark.parametrize(
    ("healths", "expected"),
    [
        ([Health.SERVING, Health.SERVING], Health.SERVING),
        ([Health.SERVING, Health.STARTING], Health.STARTING),
        ([Health.STARTING, Health.DEAD], Health.DEAD),
        ([Health.SERVING, Health.DEAD], Health.DEAD),
        ([Health.SERVING, Health.SILENT], Health.SILENT),
    ],
)
def test_a_group_is_as_healthy_as_its_worst_rank(healths: list[Health], expected: Health) -> None:
    process, _ = group(*healths)
    assert process.look() is expected
    assert process.has_started is (Health.STARTING not in healths)


def test_a_dead_rank_is_named_and_a_group_of_one_has_no_ranks_to_name() -> None:
    process, _ = group(Health.SERVING, Health.DEAD)
    process.look()
    assert process.why() == "decode-0.1: its process died"
    alone = GroupProcess({"decode-0": MemoryWorker(Health.DEAD)})
    alone.look()
    assert alone.why() == "its process died"


def test_ranks_whose_pulses_alternate_serve() -> None:
    """A pulse answers when it likes: healthy ranks need not answer the same look."""
    process, ranks = group(Health.SERVING, Health.SILENT)
    found: list[Health] = []
    for _ in range(4):
        found.append(process.look())
        for rank in ranks:
            is_serving = rank.health is Health.SERVING
            rank.health = Health.SILENT if is_serving else Health.SERVING
    assert found == [Health.SILENT, Health.SERVING] * 2


def test_one_rank_that_hangs_keeps_its_group_silent() -> None:
    process, _ = group(Health.SERVING, Health.SILENT)
    assert {process.look() for _ in range(50)} == {Health.SILENT}


def test_no_rank_stops_before_all_are_drained() -> None:
    process, ranks = group(Health.SERVING, Health.SERVING)
    departure = Departure("decode-0", process, DepartureTimes(1.0, 60.0, 20.0), now=0.0)
    ranks[0].has_drained = True
    assert not departure.tick(1.0)
    assert [rank.told for rank in ranks] == [["drain 1 60"]] * 2
    ranks[1].has_drained = True
    assert not departure.tick(2.0)
    ranks[0].has_ended = True
    assert not departure.tick(3.0)
    assert "kill" not in ranks[0].told, "killed while the other rank was leaving"
    ranks[1].has_ended = True
    assert departure.tick(4.0)
    assert [rank.told for rank in ranks] == [["drain 1 60", "stop", "kill"]] * 2


def test_what_stops_already_is_neither_drained_nor_stopped_again_when_everything_ends() -> None:
    process, ranks = group(Health.SERVING, Health.SERVING)
    departure = Departure("decode-0", process, DepartureTimes(1.0, 60.0, 20.0), now=0.0)
    for rank in ranks:
        rank.has_drained = rank.has_ended = True
    assert not departure.tick(1.0)
    stop_workers([process], drain_s=1.0)
    assert [rank.told for rank in ranks] == [["drain 1 60", "stop", "kill"]] * 2
