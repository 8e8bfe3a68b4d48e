"""The executor in a whole cluster: grow, drain first, give back, restarts, operators, outages."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.errors import ApiUnavailable, ConfigError, ResizeRefused
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import ray_cluster
from tests.cluster.kubernetes.rig import Rig

DECODE = Role.DECODE


def rig_with(server: ApiServer, decode: int, **settings: Any) -> Rig:
    """A rig that has come to rest with so many decode replicas, our own."""
    hosts = settings.pop("hosts", 1)
    cluster = ray_cluster(decode=decode, numOfHosts=hosts)
    rig = Rig(server, cluster=cluster, **settings)
    rig.settle()
    return rig


def assert_nothing_was_lost(rig: Rig) -> None:
    assert rig.host.lost == []
    assert rig.kuberay.taken_at_will == []


def test_growing_raises_replicas_and_workers_take_the_new_pods(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.executor.resize(DECODE, 3)
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size, pool.ready, len(pool.starting_s)) == (3, 3, 1, 2)
    assert rig.replicas("decode") == 3
    assert rig.settled(DECODE) == (3, 3, 3)
    assert rig.settled(Role.PREFILL) == (1, 1, 1)
    assert_nothing_was_lost(rig)


def test_shrinking_drains_first_then_takes_the_pod_that_was_drained(server: ApiServer) -> None:
    rig = rig_with(server, 3)
    rig.host.holds_drains = True
    rig.executor.resize(DECODE, 2)
    rig.turn(10)
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size, pool.ready, pool.draining) == (2, 2, 2, 1)
    assert rig.replicas("decode") == 3
    serving = rig.serving(DECODE)
    rig.host.holds_drains = False
    assert rig.settled(DECODE) == (2, 2, 2)
    assert set(rig.pods("decode")) == serving
    assert_nothing_was_lost(rig)


def test_shrinking_in_quick_steps_takes_no_pod_that_serves(server: ApiServer) -> None:
    """For a KubeRay that was restarted, pods that terminate count as running unless they are
    named."""
    rig = rig_with(server, 5)
    rig.kuberay.grace_turns = 12
    for size in (4, 3, 2, 1):
        rig.executor.resize(DECODE, size)
        rig.turn(3)
        rig.kuberay.restart()
    assert rig.settled(DECODE) == (1, 1, 1)
    assert_nothing_was_lost(rig)


def test_growing_again_while_a_worker_drains_keeps_it_until_it_is_done(server: ApiServer) -> None:
    rig = rig_with(server, 2)
    rig.host.holds_drains = True
    rig.executor.resize(DECODE, 1)
    rig.turn(3)
    rig.executor.resize(DECODE, 2)
    rig.turn(10)
    pool = rig.executor.workers(DECODE)
    assert (pool.ready, pool.draining, rig.replicas("decode")) == (2, 1, 3)
    rig.host.holds_drains = False
    assert rig.settled(DECODE) == (2, 2, 2)
    assert_nothing_was_lost(rig)


def test_a_worker_that_finds_no_machine_is_given_up_with_its_pod(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.kuberay.room = 3
    rig.executor.resize(DECODE, 3)
    rig.turn(10)
    pool = rig.executor.workers(DECODE)
    assert (pool.ready, len(pool.starting_s)) == (1, 2)
    assert any("decode-1 waits for room" in note for note in rig.executor.notes())
    rig.executor.resize(DECODE, 1)
    assert rig.settled(DECODE) == (1, 1, 1)
    assert_nothing_was_lost(rig)


def test_sizes_beyond_the_limits_are_cut(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.executor.resize(DECODE, 99)
    assert rig.executor.workers(DECODE).written_size == 8
    assert rig.settled(DECODE) == (8, 8, 8)


@pytest.mark.parametrize("own", [True, False], ids=["autoscaler", "hocket scale"])
def test_whose_size_it_is_shows(server: ApiServer, own: bool) -> None:
    rig = rig_with(server, 2)
    (rig.executor.resize if own else rig.executor.edit)(DECODE, 1)
    rig.settle()
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size) == (1, 1 if own else 2)
    assert rig.replicas("decode") == 1
    rig.executor.release(DECODE)
    assert rig.executor.workers(DECODE).written_size == 1
    assert_nothing_was_lost(rig)


def test_an_operator_who_raises_replicas_gets_workers_on_the_new_pods(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.set_replicas("decode", 3)
    assert rig.settled(DECODE) == (3, 3, 3)
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size) == (3, 1)
    # The hold is over: the autoscaler goes on from there.
    rig.executor.resize(DECODE, 2)
    assert rig.settled(DECODE) == (2, 2, 2)
    assert rig.executor.workers(DECODE).written_size == 2
    assert_nothing_was_lost(rig)


def test_an_operator_who_lowers_replicas_costs_only_the_pods_that_kuberay_takes(
    server: ApiServer,
) -> None:
    rig = rig_with(server, 5)
    rig.set_replicas("decode", 3)
    assert rig.settled(DECODE) == (3, 3, 3)
    assert len(rig.host.lost) == len(rig.kuberay.taken_at_will) == 2
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size, len(pool.starting_s)) == (3, 5, 0)


def test_an_edit_that_was_not_seen_yet_is_not_overwritten(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.set_replicas("decode", 4)
    with pytest.raises(ResizeRefused, match="has 4 replicas, not 1"):
        rig.executor.resize(DECODE, 2)
    assert rig.replicas("decode") == 4
    assert rig.settled(DECODE) == (4, 4, 4)


def test_an_edit_while_a_pod_is_given_back_is_not_overwritten(server: ApiServer) -> None:
    rig = rig_with(server, 3)
    rig.executor.resize(DECODE, 2)

    def raise_it() -> None:
        if server.calls[-1] == "patch rayclusters":
            server.before_write.clear()
            rig.set_replicas("decode", 6)

    server.before_write.append(raise_it)
    assert rig.settled(DECODE) == (6, 6, 6)
    assert (rig.executor.workers(DECODE).size, rig.executor.workers(DECODE).written_size) == (6, 2)
    assert_nothing_was_lost(rig)


def test_a_limit_that_was_lowered_is_kept(server: ApiServer) -> None:
    rig = rig_with(server, 4)
    rig.edit("decode", lambda group: group.update(maxReplicas=2))
    rig.settle()
    assert len(rig.pods("decode")) == rig.executor.workers(DECODE).size == 2
    rig.executor.resize(DECODE, 4)
    assert rig.settled(DECODE) == (2, 2, 2)


def test_a_pod_that_kuberay_has_not_taken_yet_is_let_off_when_it_is_needed(
    server: ApiServer,
) -> None:
    rig = rig_with(server, 3)
    rig.kuberay.is_down = True
    rig.executor.resize(DECODE, 2)
    rig.settle()
    (named,) = rig.group("decode")["scaleStrategy"]["workersToDelete"]
    assert len(rig.pods("decode")) == 3
    rig.executor.resize(DECODE, 3)
    assert rig.group("decode")["scaleStrategy"]["workersToDelete"] == []
    rig.settle()
    assert named in rig.serving(DECODE)
    rig.kuberay.is_down = False
    assert rig.settled(DECODE) == (3, 3, 3)
    assert_nothing_was_lost(rig)


def test_a_pod_that_was_to_go_stays_when_a_worker_had_to_move_there(server: ApiServer) -> None:
    rig = rig_with(server, 3)
    rig.kuberay.is_down = True
    rig.executor.resize(DECODE, 2)
    rig.settle()
    (named,) = rig.group("decode")["scaleStrategy"]["workersToDelete"]
    rig.kuberay.kill(next(p for p in rig.kuberay.pods("decode") if _name(p) != named))
    rig.settle()
    assert named in rig.serving(DECODE)
    rig.host.lost.clear()
    rig.kuberay.is_down = False
    assert rig.settled(DECODE) == (2, 2, 2)
    assert_nothing_was_lost(rig)


def test_no_more_pods_are_let_off_than_replicas_are_raised(server: ApiServer) -> None:
    rig = rig_with(server, 4)
    rig.kuberay.is_down = True
    rig.executor.resize(DECODE, 2)
    rig.settle()
    rig.executor.resize(DECODE, 3)
    assert rig.replicas("decode") == 3
    assert len(rig.group("decode")["scaleStrategy"]["workersToDelete"]) == 1
    rig.settle()
    rig.kuberay.is_down = False
    assert rig.settled(DECODE) == (3, 3, 3)
    assert_nothing_was_lost(rig)


def test_a_pod_that_is_let_off_counts_as_a_replica_again(server: ApiServer) -> None:
    """Three workers per pod: Ray puts new ones on the pod that was to go, not on half full ones."""
    rig = rig_with(server, 3, places=3)
    rig.kuberay.is_down = True
    rig.executor.resize(DECODE, 4)
    rig.settle()
    assert (rig.replicas("decode"), rig.executor.workers(DECODE).ready) == (2, 4)
    (named,) = rig.group("decode")["scaleStrategy"]["workersToDelete"]
    rig.host.prefers = named
    rig.executor.resize(DECODE, 6)
    rig.turn(3)
    assert named in rig.serving(DECODE)
    rig.kuberay.is_down = False
    replicas, pods, ready = rig.settled(DECODE)
    assert (pods, ready) == (replicas, 6)
    assert_nothing_was_lost(rig)


def _name(pod: dict[str, Any]) -> str:
    return pod["metadata"]["name"]


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_restart_between_drain_and_patch_comes_to_rest(server: ApiServer, after: int) -> None:
    rig = rig_with(server, 3)
    server.rules = [{**server.rules[0], "verbs": ["get", "list", "update"]}]
    rig.executor.resize(DECODE, 2)
    rig.turn(after)
    rig.restart()
    server.rules = [{**server.rules[0], "verbs": ["*"]}]
    # What is written there is what counts.
    assert rig.settled(DECODE) == (3, 3, 3)
    rig.executor.resize(DECODE, 2)
    assert rig.settled(DECODE) == (2, 2, 2)
    assert rig.kuberay.taken_at_will == []


def test_a_restart_between_patch_and_start_fills_the_pods(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    server.before_write.append(rig.launcher.stop_pools)
    rig.executor.resize(DECODE, 3)
    server.before_write.clear()
    rig.restart()
    assert rig.settled(DECODE) == (3, 3, 3)
    pool = rig.executor.workers(DECODE)
    assert pool.size == pool.written_size == 3


def test_a_lost_answer_is_no_operators_edit(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    server.lose_answers = 1
    with pytest.raises(ApiUnavailable):
        rig.executor.resize(DECODE, 3)
    rig.turn(5)
    pool = rig.executor.workers(DECODE)
    # It was not taken; what it left is given back.
    assert (pool.size, pool.written_size) == (1, 1)
    assert rig.settled(DECODE) == (1, 1, 1)
    assert_nothing_was_lost(rig)


def test_an_outage_of_the_api_server_changes_nothing(server: ApiServer) -> None:
    rig = rig_with(server, 2)
    server.fails_with = 500
    rig.turn(30)
    pool = rig.executor.workers(DECODE)
    assert (pool.size, pool.written_size, pool.ready) == (2, 2, 2)
    assert any("500" in note for note in rig.executor.notes())
    with pytest.raises(ResizeRefused, match="the lease"):
        rig.executor.resize(DECODE, 3)
    server.fails_with = 0
    rig.turn(2)
    assert rig.executor.notes() == ()
    rig.executor.resize(DECODE, 3)
    assert rig.settled(DECODE) == (3, 3, 3)
    assert_nothing_was_lost(rig)


def test_of_two_launchers_one_resizes_and_the_other_says_whose_it_is(server: ApiServer) -> None:
    rig = rig_with(server, 2)
    other = rig.launch(starts=False)
    other.turn()
    assert other.executor.notes()[0] == "Kubernetes: sizes are pod-1's to change"
    with pytest.raises(ResizeRefused, match="pod-1's to change"):
        other.executor.resize(DECODE, 1)
    rig.executor.resize(DECODE, 3)
    rig.turn(20)
    other.turn()
    pool = other.executor.workers(DECODE)
    assert (pool.size, pool.written_size) == (3, 3)
    rig.launcher.die()
    for _ in range(20):
        rig.clock.advance(1)
        other.turn()
    pool = other.executor.workers(DECODE)
    # Nobody has edited anything: there is nothing to hold.
    assert pool.size == pool.written_size == 3
    other.executor.resize(DECODE, 4)
    assert rig.replicas("decode") == 4
    other.die()


def test_a_closed_launcher_is_followed_at_once(server: ApiServer) -> None:
    rig = rig_with(server, 1)
    rig.executor.close()
    other = rig.launch(starts=False)
    other.turn()
    other.executor.resize(DECODE, 2)
    assert rig.replicas("decode") == 2
    other.die()


def test_a_pod_goes_only_when_all_its_workers_are_gone(server: ApiServer) -> None:
    """Four workers per pod: sizes move by one, pods by four."""
    rig = rig_with(server, 2, places=4)
    assert rig.executor.workers(DECODE).size == 8
    for size, pods in ((7, 2), (5, 2), (4, 1), (5, 2), (9, 3), (4, 1), (1, 1)):
        rig.executor.resize(DECODE, size)
        replicas, running, ready = rig.settled(DECODE)
        assert (running, ready) == (replicas, size)
        assert replicas >= pods
        assert rig.executor.workers(DECODE).size == size
    assert_nothing_was_lost(rig)


def test_a_group_over_several_pods_comes_and_goes_whole(server: ApiServer) -> None:
    """Ranks 0 to 7, two per pod: a worker is four pods."""
    rig = rig_with(server, 1, hosts=4, places=2, decode_ranks=8)
    rig.executor.resize(DECODE, 3)
    assert rig.settled(DECODE) == (3, 12, 3)
    rig.executor.resize(DECODE, 1)
    assert rig.settled(DECODE) == (1, 4, 1)
    assert_nothing_was_lost(rig)


def test_a_group_that_fits_no_replica_is_refused_at_the_start(server: ApiServer) -> None:
    with pytest.raises(ConfigError, match=r"has 1 pods with .* no room for a worker of 8 x"):
        Rig(server, places=4, decode_ranks=8)


def test_a_pod_that_dies_is_replaced_and_its_worker_comes_back(server: ApiServer) -> None:
    rig = rig_with(server, 2)
    rig.kuberay.kill(rig.kuberay.pods("decode")[0])
    assert rig.settled(DECODE) == (2, 2, 2)
    assert rig.executor.workers(DECODE).written_size == 2
