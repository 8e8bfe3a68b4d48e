"""The pools' worker groups in the RayCluster: read, and resized by guarded patches.

`KubernetesExecutor` decides how many replicas a group has and which pods may go; here that becomes
one JSON patch. `workerGroupSpecs` is an atomic list, so a group is addressed by its index, and the
patch applies only if the group at this index still has the name and the object the version that
was read: otherwise read again, look whether the change is still ours to make, and try again.

A group shrinks by naming the pods that go (`scaleStrategy.workersToDelete`); left to itself,
KubeRay takes any. A pod stays named until it is gone: pods that terminate count as running ones
for a KubeRay that was restarted meanwhile, unless they are named, and it would take as many others
for them (`reconcilePods`, v1.7).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.cluster.kubernetes_api import KubernetesApi, ObjectName
from hocket.errors import ConfigError, ResizeRefused

_log = logging.getLogger(__name__)

# KubeRay's status updates are what we collide with; they come in bursts of a few.
_FIRST_WAIT_S = 0.05
_MOST_TRIES = 6
_REPLICA_LABEL = "ray.io/worker-group-replica-name"
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a worker group.

    replica: name of the group of hosts it belongs to; its own name where a replica is one pod;
        "" where KubeRay does not tell.
    is_ending: it terminates.
    """

    name: str
    ip: str
    replica: str
    is_running: bool
    is_ending: bool


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """A worker group as it is now.

    replicas: as written, by whomever. pods_per_replica: numOfHosts.
    resources: of one pod in Ray's books, for example {"CPU": 64.0, "GPU": 4.0}.
    leaving: pods named to go.
    """

    name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    pods_per_replica: int
    resources: Mapping[str, float]
    leaving: tuple[str, ...]
    pods: tuple[Pod, ...]

    @property
    def size(self) -> int:
        """Replicas that KubeRay makes of it: never outside of the group's limits."""
        return self.clamped(self.replicas)

    @property
    def condemned(self) -> dict[str, tuple[str, ...]]:
        """Replicas that were named to go, and of which no pod terminates yet: their pods."""
        replicas = self._by_replica().items()
        return {
            name: tuple(pod.name for pod in pods)
            for name, pods in replicas
            if any(p.name in self.leaving for p in pods) and not any(p.is_ending for p in pods)
        }

    @property
    def num_staying(self) -> int:
        """Replicas that are there and of which no pod terminates or was named to go. If there are
        more than `replicas`, KubeRay takes any of them."""
        return sum(
            not any(pod.is_ending or pod.name in self.leaving for pod in pods)
            for pods in self._by_replica().values()
        )

    def _by_replica(self) -> dict[str, list[Pod]]:
        found: dict[str, list[Pod]] = {}
        for pod in self.pods:
            found.setdefault(pod.replica, []).append(pod)
        return found

    def clamped(self, replicas: int) -> int:
        """`replicas` within the group's limits, and never negative: the API takes anything."""
        return max(0, self.min_replicas, min(replicas, self.max_replicas))


class RayClusterReplicas:
    """The worker groups of one RayCluster. Methods raise what `KubernetesApi` raises."""

    def __init__(
        self, api: KubernetesApi, cluster: ObjectName, wait: Callable[[float], None] = time.sleep
    ) -> None:
        """`wait` is called between two tries, with seconds."""
        self._api = api
        self._cluster = cluster
        self._wait = wait

    def read(self, *names: str) -> dict[str, WorkerGroup]:
        """All groups by name. Raises ConfigError if one of `names` is missing."""
        groups = self._read()[1]
        for name in names:
            self._index(groups, name)
        return groups

    def _index(self, groups: Mapping[str, WorkerGroup], name: str) -> int:
        if name not in groups:
            raise ConfigError(f"{self._cluster} has no worker group {name!r}: {list(groups)}.")
        return list(groups).index(name)

    def resize(
        self,
        group: str,
        replicas: int,
        *,
        expected: int,
        leaving: Sequence[str] = (),
        staying: Sequence[str] = (),
    ) -> None:
        """Sets the replicas of `group` and names the pods `leaving` to go, in one patch.

        The same patch takes names back: of pods that are gone, and of `staying` where these do not
        terminate yet. Harmless when there is nothing to change.

        Raises:
            ResizeRefused: nothing was written: the group has not `expected` replicas, because
                somebody else has changed it; a pod of `leaving` is gone already (KubeRay would
                take another for it); or the object changed too often while we tried.
        """
        refused: ResizeRefused | None = None
        for attempt in range(_MOST_TRIES):
            if attempt:
                self._wait(_FIRST_WAIT_S * 2 ** (attempt - 1))
            version, groups = self._read()
            index = self._index(groups, group)
            found = groups[group]
            if found.replicas != expected:
                raise ResizeRefused(
                    f"group {group} of {self._cluster} has {found.replicas} replicas, not "
                    f"{expected}: somebody else has changed it; it is left alone."
                )
            if gone := set(leaving) - {pod.name for pod in found.pods}:
                raise ResizeRefused(f"pods of group {group} are gone already: {sorted(gone)}.")
            replicas = found.clamped(replicas)
            named = _named(found, leaving, staying)
            operations = _operations(found, index, version, replicas, named)
            if not operations:
                return
            try:
                self._api.patch_ray_cluster(self._cluster, operations)
            except ResizeRefused as error:
                _log.debug("%s, try %d", error, attempt + 1)
                refused = error
                continue
            return
        raise ResizeRefused(
            f"group {group} of {self._cluster} was not resized in {_MOST_TRIES} tries: {refused}"
        )

    def _read(self) -> tuple[str, dict[str, WorkerGroup]]:
        """The object's version, and its groups in their order. Pods are read first: one that was
        made in between is then missed, never taken for one that is gone."""
        pods = self._api.list_pods(self._cluster)
        found = self._api.read_ray_cluster(self._cluster)
        groups = [_group(spec, pods) for spec in found["spec"].get("workerGroupSpecs") or []]
        return found["metadata"]["resourceVersion"], {group.name: group for group in groups}


def _named(group: WorkerGroup, leaving: Sequence[str], staying: Sequence[str]) -> list[str]:
    """The pods that are to go, after a patch."""
    keep = {pod.name for pod in group.pods if pod.is_ending or pod.name not in staying}
    return list(dict.fromkeys((*(name for name in group.leaving if name in keep), *leaving)))


def _operations(
    group: WorkerGroup, index: int, version: str, replicas: int, named: list[str]
) -> list[dict[str, Any]]:
    """The patch; empty when there is nothing to change."""
    path = f"/spec/workerGroupSpecs/{index}"
    changes: list[dict[str, Any]] = []
    if replicas != group.replicas:
        changes.append({"op": "add", "path": f"{path}/replicas", "value": replicas})
    if named != list(group.leaving):
        strategy = {"workersToDelete": named}
        changes.append({"op": "add", "path": f"{path}/scaleStrategy", "value": strategy})
    if not changes:
        return []
    return [
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "test", "path": f"{path}/groupName", "value": group.name},
        *changes,
    ]


def _group(spec: dict[str, Any], pods: list[Any]) -> WorkerGroup:
    name, hosts = spec["groupName"], max(1, spec.get("numOfHosts", 1))
    leaving = tuple((spec.get("scaleStrategy") or {}).get("workersToDelete") or ())
    replicas, least = spec.get("replicas"), spec.get("minReplicas") or 0
    return WorkerGroup(
        name=name,
        replicas=least if replicas is None else replicas,
        min_replicas=least,
        max_replicas=spec.get("maxReplicas", _UNLIMITED),
        pods_per_replica=hosts,
        resources=_resources(spec.get("resources") or {}),
        leaving=leaving,
        pods=tuple(
            _pod(pod, hosts)
            for pod in pods
            if (pod.metadata.labels or {}).get("ray.io/group") == name
        ),
    )


def _resources(written: Mapping[str, str]) -> dict[str, float]:
    """KubeRay writes "cpu" where Ray says "CPU"; other names are Ray's own."""
    from kubernetes.utils.quantity import parse_quantity

    return {
        "CPU" if name == "cpu" else name: float(parse_quantity(amount))
        for name, amount in written.items()
    }


def _pod(pod: Any, hosts: int) -> Pod:
    name, labels, status = pod.metadata.name, pod.metadata.labels or {}, pod.status
    return Pod(
        name=name,
        ip=(status and status.pod_ip) or "",
        replica=labels.get(_REPLICA_LABEL, "") if hosts > 1 else name,
        is_running=bool(status) and status.phase == "Running",
        is_ending=pod.metadata.deletion_timestamp is not None,
    )
