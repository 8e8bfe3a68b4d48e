"""A whole cluster in one process: API server, KubeRay, pods with workers, and our side of it.

Time is a manual clock: `turn` lets a second pass for everyone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kubernetes.client import ApiClient, Configuration

from control_plane.cluster.departures import DepartureTimes
from control_plane.cluster.kubernetes_api import KubernetesApi, ObjectName
from control_plane.cluster.kubernetes_executor import KubernetesExecutor
from control_plane.cluster.kubernetes_lease import KubernetesLease
from control_plane.cluster.kubernetes_plan import Needs
from control_plane.cluster.kubernetes_replicas import RayClusterReplicas
from control_plane.cluster.pools import PoolTimes, WorkerPools
from control_plane.cluster.supervisor import Supervisor
from hocket.clock import ManualClock
from hocket.types import Role
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.kuberay import NAME, NAMESPACE, KubeRay, ray_cluster
from tests.cluster.kubernetes.pods_host import PodsHost

TIMES = PoolTimes(startup_s=1e9, leaving=DepartureTimes(announce_s=0, drain_s=1e9, stuck_s=1e9))
CLUSTER = ObjectName("RayCluster", NAMESPACE, NAME)
LEASE = ObjectName("Lease", NAMESPACE, f"{NAME}-autoscaler")


def api_of(server: ApiServer, timeout_s: float = 5.0) -> KubernetesApi:
    settings = Configuration(host=server.url)
    settings.retries = False
    return KubernetesApi(ApiClient(settings), timeout_s=timeout_s)


def empty_lease() -> dict[str, Any]:
    """As the chart makes it."""
    metadata = {"name": LEASE.name, "namespace": NAMESPACE}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


class Launcher:
    """One `hocket up`: pools, and the executor over them."""

    def __init__(
        self, server: ApiServer, host: PodsHost, clock: ManualClock, identity: str, cpus: float
    ) -> None:
        self.host = host
        self.supervisor = Supervisor([], clock)
        self.pools = WorkerPools(host, self.supervisor, TIMES, clock)
        self.api = api_of(server)
        needs = {Role.PREFILL: Needs({"CPU": cpus}), Role.DECODE: Needs({"CPU": cpus}, host.ranks)}
        replicas = RayClusterReplicas(self.api, CLUSTER, wait=lambda seconds: None)
        lease = KubernetesLease(self.api, LEASE, identity, clock)
        found = replicas.read()
        self.executor = KubernetesExecutor(self.pools, replicas, lease, needs, found)

    def start(self) -> None:
        for role in Role:
            self.pools.start(role, self.executor.workers(role).size)

    def turn(self) -> None:
        self.supervisor.tick()
        self.pools.tick()
        self.executor.tick()

    def stop_pools(self) -> None:
        """From now on it starts no worker: it is about to die."""
        self.host.is_closed = True

    def die(self) -> None:
        """Without a word: its workers go with it."""
        self.api.close()
        for process in self.host.processes:
            process.kill()
        for reservation in list(self.host.reservations):
            reservation.release()


class Rig:
    """See the module."""

    def __init__(
        self,
        server: ApiServer,
        *,
        seed: int = 0,
        places: int = 1,
        decode_ranks: int = 1,
        cluster: dict[str, Any] | None = None,
    ) -> None:
        """`places`: processes per pod."""
        self.server = server
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.server.put("rayclusters", cluster or ray_cluster())
        self.server.put("leases", empty_lease())
        self.kuberay = KubeRay(server, rng=self.rng)
        self.host = PodsHost(self.kuberay, places=places, decode_ranks=decode_ranks)
        self._cpus = 4 / places
        self._lives = 0
        self.kuberay.reconcile()
        self.launcher = self.launch()

    def launch(self, *, starts: bool = True) -> Launcher:
        """Another launcher; one that `starts` has workers."""
        self._lives += 1
        made = Launcher(self.server, self.host, self.clock, f"pod-{self._lives}", self._cpus)
        if starts:
            made.start()
        return made

    def restart(self) -> None:
        """The gateway's pod dies and comes back."""
        self.launcher.die()
        self.host.is_closed = False
        self.launcher = self.launch()

    @property
    def executor(self) -> KubernetesExecutor:
        return self.launcher.executor

    def turn(self, times: int = 1) -> None:
        """A second for everyone."""
        for _ in range(times):
            self.clock.advance(1.0)
            self.launcher.turn()
            self.kuberay.reconcile()

    def group(self, name: str) -> dict[str, Any]:
        groups = self.server.get("rayclusters", NAME)["spec"]["workerGroupSpecs"]
        (found,) = [group for group in groups if group["groupName"] == name]
        return found

    def replicas(self, name: str) -> int:
        return self.group(name)["replicas"]

    def edit(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """`kubectl edit` of one group."""

        def edit(cluster: dict[str, Any]) -> None:
            for group in cluster["spec"]["workerGroupSpecs"]:
                if group["groupName"] == name:
                    change(group)

        self.server.edit("rayclusters", NAME, edit)

    def set_replicas(self, name: str, replicas: int) -> None:
        """`kubectl patch` by an operator."""
        self.edit(name, lambda group: group.update(replicas=replicas))

    def pods(self, name: str) -> list[str]:
        """Pods that do not terminate."""
        return [
            pod["metadata"]["name"]
            for pod in self.kuberay.pods(name)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def serving(self, role: Role) -> set[str]:
        """Pods with a worker that serves."""
        pools = self.launcher.pools
        ready, nodes = pools.ready(role), pools.nodes(role)
        return {node.hostname for name in ready for node in nodes[name]}

    def settle(self) -> None:
        """Until nothing moves any more."""
        self.turn(40)

    def settled(self, role: Role) -> tuple[int, int, int]:
        """Replicas, pods, and workers that serve, when all is quiet."""
        self.settle()
        ready = self.executor.workers(role).ready
        return self.replicas(role.value), len(self.pods(role.value)), ready
