"""What a pool's size means in replicas of its worker group, and which pods are spare. Pure.

`KubernetesExecutor` brings the group as it is and where the workers are, and carries out what is
decided here. A replica is `numOfHosts` pods that live and die together; it holds whole workers:

    group_size 1,  4 processes per pod, 1 pod   a replica: 4 workers a replica
    group_size 8,  8 processes per pod, 1 pod   a replica: 1 worker a replica
    group_size 64, 4 processes per pod, 16 pods a replica: 1 worker a replica
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.cluster.kubernetes_replicas import Pod, WorkerGroup
from control_plane.cluster.pools import NodeName
from hocket.errors import ConfigError

# Shares of a pod are written in decimals: a third, three times, is a pod.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Needs:
    """What one worker takes: `ranks` processes with `bundle` each in Ray's books."""

    bundle: Mapping[str, float]
    ranks: int = 1


def workers_per_replica(group: WorkerGroup, needs: Needs) -> int:
    """How many workers Ray can place on the pods of one replica.

    Raises:
        ConfigError: not even one; or the group does not say what its pods have.
    """
    has = {name: group.resources.get(name, 0.0) for name in needs.bundle}
    processes = min(
        math.floor(has[name] / amount + _ROUNDING) for name, amount in needs.bundle.items()
    )
    workers = processes * group.pods_per_replica // needs.ranks
    if workers < 1:
        raise ConfigError(
            f"A replica of worker group {group.name} has {group.pods_per_replica} pods with {has} "
            f"each, no room for a worker of {needs.ranks} x {dict(needs.bundle)}."
        )
    return workers


def replicas_for(workers: int, per_replica: int) -> int:
    """Fewest replicas that hold so many workers."""
    return -(-workers // per_replica)


def spare_pods(
    group: WorkerGroup, placed: Iterable[Sequence[NodeName]], count: int
) -> tuple[str, ...]:
    """The pods of up to `count` replicas that hold no worker; first those that do not run yet.

    `placed`: the nodes of each worker of the pool, draining ones included; none of a worker that
    waits for room. While any worker waits for room or is not found on the pods, nothing is spare:
    Ray may be about to place it anywhere.

    Raises:
        ConfigError: replicas have several pods, and KubeRay does not say which belong together.
    """
    workers = list(placed)
    occupied = occupied_pods(group, workers)
    are_found = all(
        nodes and all(any(_is_on(pod, [node]) for pod in group.pods) for node in nodes)
        for nodes in workers
    )
    if not are_found:
        return ()
    replicas: dict[str, list[Pod]] = {}
    for pod in group.pods:
        if not pod.replica:
            raise ConfigError(
                f"Pod {pod.name} of worker group {group.name} has no label that tells its replica; "
                "groups of several hosts need KubeRay's feature gate RayMultiHostIndexing "
                "(on by default since 1.7)."
            )
        replicas.setdefault(pod.replica, []).append(pod)
    taken = {pod.replica for pod in group.pods if pod.name in occupied}
    spare = [
        pods
        for name, pods in replicas.items()
        if name not in taken and not any(p.is_ending or p.name in group.leaving for p in pods)
    ]
    spare.sort(key=lambda pods: all(pod.is_running for pod in pods))
    return tuple(pod.name for pods in spare[:count] for pod in pods)


def occupied_pods(group: WorkerGroup, placed: Iterable[Sequence[NodeName]]) -> set[str]:
    """The pods of the group that a worker is on."""
    return {pod.name for nodes in placed for pod in group.pods if _is_on(pod, nodes)}


def _is_on(pod: Pod, nodes: Sequence[NodeName]) -> bool:
    """Whether one of the nodes is the pod: Ray's host name is the pod's name."""
    return any(node.hostname == pod.name or (pod.ip and node.ip == pod.ip) for node in nodes)
