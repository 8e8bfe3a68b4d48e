"""Placement groups of workers, in a real Ray: room that is not there, room that is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from control_plane.cluster.ray_runtime import RayRuntime, temporary_folder
from control_plane.cluster.ray_workers import RayReservation, RayWorkers
from hocket.config import load_config
from hocket.types import Role

pytestmark = pytest.mark.e2e
CONFIG = load_config(
    None,
    ["decode.placement.num_gpus=1000", "prefill.placement.resources={slot=1.0}"],
)


@pytest.fixture(scope="module")
def workers() -> Iterator[RayWorkers]:
    folder = temporary_folder()
    runtime = RayRuntime(CONFIG, folder, verbose=False)
    yield RayWorkers(CONFIG, "127.0.0.1", None)
    runtime.close()
    shutil.rmtree(folder, ignore_errors=True)


def get_room(reservation: RayReservation, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reservation.has_room():
        assert time.monotonic() < deadline, "no room in time"
        time.sleep(0.05)


def test_a_local_ray_that_lacks_gpus_says_what_it_has(workers: RayWorkers) -> None:
    assert not workers.can_ever_fit(Role.DECODE, 1)
    assert workers.can_ever_fit(Role.PREFILL, 1)
    error = str(workers.no_room(Role.DECODE, 1))
    assert "decode.placement: Ray has no room for 1 x " in error
    assert "'GPU': 1000" in error
    assert "it has {'CPU': " in error


def test_asking_for_room_that_is_not_there_returns_at_once_and_can_be_cancelled(
    workers: RayWorkers,
) -> None:
    reservation = workers.reserve(Role.DECODE)
    assert not reservation.has_room()
    assert reservation.nodes() == ()
    assert "'GPU': 1000" in reservation.wanted()
    reservation.release()
    reservation.release()


def test_room_is_on_a_node_with_a_name_and_is_given_back(workers: RayWorkers) -> None:
    """The local Ray has exactly as many slots as the prefill pool may have workers."""
    rooms: list[RayReservation] = []
    while workers.can_ever_fit(Role.PREFILL, len(rooms) + 1):
        rooms.append(workers.reserve(Role.PREFILL))
        get_room(rooms[-1])
    (node,) = rooms[0].nodes()
    assert node.ip == "127.0.0.1"
    assert node.hostname
    one_more = workers.reserve(Role.PREFILL)
    assert not one_more.has_room()
    rooms.pop().release()
    get_room(one_more)
    for room in [*rooms, one_more]:
        room.release()
