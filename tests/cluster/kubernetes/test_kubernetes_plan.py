"""What a size is in replicas, and which pods are spare: numbers in, names out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.cluster.kubernetes_plan import (
    Needs,
    replicas_for,
    spare_pods,
    workers_per_replica,
)
from control_plane.cluster.kubernetes_replicas import Pod, WorkerGroup
from control_plane.cluster.pools import NodeName
from hocket.errors import ConfigError


def group(*pods: Pod, hosts: int = 1, **resources: float) -> WorkerGroup:
    return WorkerGroup("decode", len(pods), 0, 99, hosts, resources, (), pods)


def pod(name: str, replica: str = "", ip: str = "") -> Pod:
    return Pod(name, ip, replica or name, is_running=True, is_ending=False)


def on(*names: str) -> tuple[NodeName, ...]:
    return tuple(NodeName(name, f"ip-{name}") for name in names)


@pytest.mark.parametrize(
    ("bundle", "ranks", "hosts", "workers"),
    [
        ({"CPU": 16.0, "GPU": 1.0}, 1, 1, 4),
        ({"CPU": 64 / 3}, 1, 1, 3),
        ({"CPU": 8.0, "GPU": 1.0}, 2, 1, 2),
        ({"CPU": 16.0, "GPU": 1.0}, 64, 16, 1),
        ({"CPU": 0.1}, 1, 1, 640),
    ],
)
def test_workers_of_a_replica(
    bundle: dict[str, float], ranks: int, hosts: int, workers: int
) -> None:
    there = group(hosts=hosts, CPU=64.0, GPU=4.0)
    assert workers_per_replica(there, Needs(bundle, ranks)) == workers


def test_a_replica_without_room_for_a_worker_is_refused() -> None:
    there = group(hosts=2, CPU=8.0)
    with pytest.raises(ConfigError, match=r"2 pods with {'CPU': 8.0} each, no room for .* 3 x"):
        workers_per_replica(there, Needs({"CPU": 8.0}, 3))


@pytest.mark.parametrize(("workers", "replicas"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_replicas_hold_all_workers(workers: int, replicas: int) -> None:
    assert replicas_for(workers, 4) == replicas


def test_empty_pods_are_spare_and_no_more_than_asked_for() -> None:
    there = group(pod("a"), pod("b"), pod("c"))
    assert spare_pods(there, [on("b")], 1) == ("a",)
    assert spare_pods(there, [on("b")], 5) == ("a", "c")


def test_pods_that_do_not_run_yet_go_first() -> None:
    waiting = replace(pod("c"), is_running=False)
    assert spare_pods(group(pod("a"), pod("b"), waiting), [], 2) == ("c", "a")


def test_pods_that_leave_already_are_not_counted_twice() -> None:
    there = group(replace(pod("a"), is_ending=True), pod("b"), pod("c"))
    assert spare_pods(replace(there, leaving=("b",)), [], 3) == ("c",)


def test_a_replica_of_several_hosts_goes_whole_or_not_at_all() -> None:
    there = group(*(pod(n, replica=n[0]) for n in ("a1", "a2", "b1", "b2")), hosts=2)
    assert spare_pods(there, [on("a2")], 2) == ("b1", "b2")
    assert spare_pods(there, [on("a2", "b1")], 2) == ()


def test_nothing_is_spare_while_a_worker_is_nowhere() -> None:
    """It waits for room, or its node is no pod any more: Ray may be about to place it anywhere."""
    there = group(pod("a"), pod("b"))
    assert spare_pods(there, [on("a"), ()], 1) == ()
    assert spare_pods(there, [on("a"), on("gone")], 1) == ()
    assert spare_pods(there, [on("a", "gone")], 1) == ()


def test_a_node_is_known_by_its_address_too() -> None:
    there = group(pod("a", ip="ip-x"), pod("b"))
    assert spare_pods(there, [on("x")], 1) == ("b",)


def test_hosts_without_their_replicas_name_are_refused() -> None:
    nameless = replace(pod("a"), replica="")
    with pytest.raises(ConfigError, match="RayMultiHostIndexing"):
        spare_pods(group(nameless, hosts=2), [], 1)
