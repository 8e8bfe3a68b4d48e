"""KubeRay's part, as its `reconcilePods` (v1.7) plays it, on the objects of an `ApiServer`.

Named pods are deleted whatever the replicas are; what is too many then is taken in any order; a
group of several hosts goes as a whole. It waits for the pods that it has deleted itself to be gone;
others that terminate, and its own after a restart, count as running unless they are named.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.cluster.kubernetes.api_server import ApiServer

NAME, NAMESPACE = "hocket", "serving"
Pod = dict[str, Any]


def ray_cluster(
    prefill: int = 1, decode: int = 1, *, most: int = 8, least: int = 0, **decode_group: Any
) -> dict[str, Any]:
    """A RayCluster with a group of one 4-CPU pod per replica for each pool."""
    groups = [_group("gateway", 1, 1, 1)]
    groups += [_group("prefill", prefill, least, most)]
    groups += [{**_group("decode", decode, least, most), **decode_group}]
    template = {"spec": {"containers": [{"name": "ray", "image": "hocket"}]}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "headGroupSpec": {"rayStartParams": {}, "template": template},
            "workerGroupSpecs": groups,
        },
    }


def _group(name: str, replicas: int, least: int, most: int) -> dict[str, Any]:
    return {
        "groupName": name,
        "replicas": replicas,
        "minReplicas": least,
        "maxReplicas": most,
        "numOfHosts": 1,
        "resources": {"cpu": "4"},
        "template": {"spec": {"containers": [{"name": "ray", "image": "hocket"}]}},
    }


class KubeRay:
    """The operator, the scheduler and the kubelet. `reconcile` is one turn of all three."""

    def __init__(
        self, server: ApiServer, *, rng: random.Random, grace_turns: int = 2, room: int = 100
    ) -> None:
        """`grace_turns`: how long a pod terminates. `room`: pods that find a machine."""
        self._server = server
        self._rng = rng
        self.grace_turns = grace_turns
        self.room = room
        self.is_down = False
        self.on_run: Callable[[Pod], None] = lambda pod: None
        self.on_kill: Callable[[Pod], None] = lambda pod: None
        self.taken_at_will: list[str] = []
        self._ends: dict[str, int] = {}
        self._awaited: set[str] = set()
        self._count = 0

    def restart(self) -> None:
        """The operator forgets what it was waiting for."""
        self._awaited.clear()

    def reconcile(self) -> None:
        self._end_pods()
        self._run_pods()
        if not self.is_down:
            self._reconcile_groups()
            self._run_pods()

    def _reconcile_groups(self) -> None:
        cluster = self._server.get("rayclusters", NAME)
        for group in cluster["spec"]["workerGroupSpecs"]:
            pods = {pod["metadata"]["name"] for pod in self.pods(group["groupName"])}
            if pods & self._awaited:
                continue
            if group.get("numOfHosts", 1) > 1:
                self._reconcile_hosts(group)
            else:
                self._reconcile_pods(group)

    def pods(self, group: str) -> list[Pod]:
        """All of a group, those that terminate included."""
        return self._server.listed("pods", {"ray.io/group": group})

    def _delete(self, pods: list[Pod]) -> None:
        for pod in pods:
            self._awaited.add(pod["metadata"]["name"])
            self.kill(pod)

    def kill(self, pod: Pod) -> None:
        """Deletes a pod, as anybody may: it terminates from now on."""
        name = pod["metadata"]["name"]
        if name in self._ends:
            return
        self._ends[name] = self.grace_turns

        def mark(body: Pod) -> None:
            body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

        self._server.edit("pods", name, mark)
        self.on_kill(pod)

    def _reconcile_pods(self, group: dict[str, Any]) -> None:
        named = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
        pods = self.pods(group["groupName"])
        going = [pod for pod in pods if pod["metadata"]["name"] in named]
        self._delete(going)
        running = [pod for pod in pods if pod not in going]
        difference = _desired(group) - len(running)
        for _ in range(difference):
            self._create(group, "")
        self._take(self._rng.sample(running, max(0, -difference)))

    def _reconcile_hosts(self, group: dict[str, Any]) -> None:
        named = (group.get("scaleStrategy") or {}).get("workersToDelete") or []
        replicas: dict[str, list[Pod]] = {}
        for pod in self.pods(group["groupName"]):
            label = pod["metadata"]["labels"]["ray.io/worker-group-replica-name"]
            replicas.setdefault(label, []).append(pod)
        for pods in replicas.values():
            if len(pods) < group["numOfHosts"]:
                self._delete(pods)
                return
        going = [
            pod
            for pods in replicas.values()
            if any(pod["metadata"]["name"] in named for pod in pods)
            for pod in pods
        ]
        if going:
            self._delete(going)
            return
        difference = _desired(group) - len(replicas)
        for _ in range(difference):
            self._count += 1
            replica = f"{group['groupName']}-{self._count}"
            for _ in range(group["numOfHosts"]):
                self._create(group, replica)
        for label in self._rng.sample(sorted(replicas), max(0, -difference)):
            self._take(replicas[label])

    def _take(self, pods: list[Pod]) -> None:
        self.taken_at_will += [pod["metadata"]["name"] for pod in pods]
        self._delete(pods)

    def _create(self, group: dict[str, Any], replica: str) -> None:
        self._count += 1
        labels = {"ray.io/cluster": NAME, "ray.io/group": group["groupName"]}
        if replica:
            labels["ray.io/worker-group-replica-name"] = replica
        name = f"{NAME}-{group['groupName']}-worker-{self._count}"
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
            "spec": {"containers": [{"name": "ray", "image": "hocket"}]},
            "status": {"phase": "Pending"},
        }
        self._server.put("pods", pod)

    def _run_pods(self) -> None:
        pods = self._server.listed("pods")
        free = self.room - sum(pod["status"]["phase"] == "Running" for pod in pods)
        for pod in pods:
            if free > 0 and pod["status"]["phase"] == "Pending" and not _is_ending(pod):
                free -= 1
                self._count += 1
                address = f"127.1.{self._count // 250}.{self._count % 250 + 1}"
                pod["status"] = {"phase": "Running", "podIP": address}
                self.on_run(pod)
                self._server.put("pods", pod)

    def _end_pods(self) -> None:
        for name in list(self._ends):
            self._ends[name] -= 1
            if self._ends[name] < 0:
                del self._ends[name]
                self._awaited.discard(name)
                self._server.delete("pods", name)


def _is_ending(pod: Pod) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _desired(group: dict[str, Any]) -> int:
    """Replicas that KubeRay wants: within the limits."""
    return min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
