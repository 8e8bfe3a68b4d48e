"""Random interleavings of everything that happens in such a cluster, each followed by a rest.

Whatever the order of resizes, operators' edits, restarts (ours and KubeRay's), lost answers, pods
that die and drains that last: no pod with a worker that serves is taken unless an operator lowered
replicas or restarted us, and at rest replicas, pods and workers agree.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from hocket.errors import HocketError
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import ray_cluster
from tests.cluster.kubernetes.rig import Rig

DECODE = Role.DECODE
# Hosts of a replica, processes per pod, ranks of a worker.
SHAPES = [(1, 1, 1), (1, 3, 1), (2, 2, 4)]
STEPS = 25
Event = Callable[[Rig], None]


def _resize(rig: Rig) -> None:
    size = rig.rng.randint(0, 6)
    with suppress(HocketError):
        rig.rng.choice([rig.executor.resize, rig.executor.edit])(DECODE, size)


def _raise_replicas(rig: Rig) -> None:
    rig.set_replicas("decode", min(8, rig.replicas("decode") + rig.rng.randint(1, 2)))


def _lower_replicas(rig: Rig) -> None:
    rig.set_replicas("decode", max(0, rig.replicas("decode") - rig.rng.randint(1, 2)))


def _lose_an_answer(rig: Rig) -> None:
    rig.server.lose_answers = 1


def _race_with_kuberay(rig: Rig) -> None:
    """Its status changes between our read and our write."""

    def touch() -> None:
        rig.server.before_write.clear()
        status = {"reason": f"{rig.rng.random()}"}
        rig.server.edit("rayclusters", "hocket", lambda cluster: cluster.update(status=status))

    rig.server.before_write.append(touch)


def _drains_last(rig: Rig) -> None:
    rig.host.holds_drains = not rig.host.holds_drains


def _restart_kuberay(rig: Rig) -> None:
    rig.kuberay.restart()


def _kuberay_is_down(rig: Rig) -> None:
    rig.kuberay.restart()
    rig.kuberay.is_down = not rig.kuberay.is_down


def _restart_hocket(rig: Rig) -> None:
    rig.restart()


def _pod_dies(rig: Rig) -> None:
    if pods := rig.kuberay.pods("decode"):
        rig.kuberay.kill(rig.rng.choice(pods))


def _api_server_is_away(rig: Rig) -> None:
    rig.server.fails_with = 503
    for _ in range(rig.rng.randint(1, 20)):
        rig.clock.advance(1)
        rig.launcher.turn()
    rig.server.fails_with = 0


HARMLESS: list[Event] = [
    _resize,
    _resize,
    _resize,
    _raise_replicas,
    _lose_an_answer,
    _race_with_kuberay,
    _drains_last,
    _restart_kuberay,
    _kuberay_is_down,
    _api_server_is_away,
]
ALL: list[Event] = [*HARMLESS, _lower_replicas, _restart_hocket, _pod_dies]


def _play(server: ApiServer, seed: int, shape: tuple[int, int, int], events: list[Event]) -> Rig:
    hosts, places, ranks = shape
    cluster = ray_cluster(decode=2, numOfHosts=hosts)
    rig = Rig(server, seed=seed, places=places, decode_ranks=ranks, cluster=cluster)
    for _ in range(STEPS):
        rig.rng.choice(events)(rig)
        rig.turn(rig.rng.randint(0, 4))
    rig.host.holds_drains = rig.kuberay.is_down = False
    rig.server.lose_answers = 0
    rig.server.before_write.clear()
    rig.turn(60)
    return rig


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_that_serves_is_ever_taken(
    server: ApiServer, seed: int, shape: tuple[int, int, int]
) -> None:
    rig = _play(server, seed, shape, HARMLESS)
    assert rig.host.lost == []
    assert rig.kuberay.taken_at_will == []
    _assert_at_rest(rig, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(100, 104))
def test_everything_comes_to_rest(
    server: ApiServer, seed: int, shape: tuple[int, int, int]
) -> None:
    _assert_at_rest(_play(server, seed, shape, ALL), shape)


def _assert_at_rest(rig: Rig, shape: tuple[int, int, int]) -> None:
    hosts, places, ranks = shape
    per_replica = hosts * places // ranks
    pool, replicas = rig.executor.workers(DECODE), rig.replicas("decode")
    assert (pool.ready, pool.starting_s, pool.draining) == (pool.size, (), 0)
    assert len(rig.pods("decode")) == replicas * hosts
    # Pods of several workers may be half full, but none is kept empty that we may give back.
    spare = replicas * per_replica - pool.size
    assert spare >= 0
    if pool.size == pool.written_size:
        assert len(rig.serving(DECODE)) == len(rig.pods("decode"))
    assert rig.executor.notes() == ()
