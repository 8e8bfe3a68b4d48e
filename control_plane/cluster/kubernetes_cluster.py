"""Hocket inside a RayCluster: found by what KubeRay tells the pod, and kept at its sizes.

`hocket up` runs in the pod of the gateway (`deploy/helm/hocket`). Where that pod has a token for
Kubernetes' API, sizes are replicas of the RayCluster's groups: `Cluster` starts with what is there,
and resizes through `KubernetesExecutor` instead of leaving room to Ray.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from control_plane.cluster.kubernetes_api import KubernetesApi, ObjectName
from control_plane.cluster.kubernetes_executor import KubernetesExecutor, Pools
from control_plane.cluster.kubernetes_lease import KubernetesLease
from control_plane.cluster.kubernetes_plan import Needs, workers_per_replica
from control_plane.cluster.kubernetes_replicas import RayClusterReplicas
from control_plane.cluster.ray_runtime import bundle_of
from control_plane.cluster.repeating import Repeating
from control_plane.cluster.scaling_policy import num_ranks, pool_settings
from hocket import environment
from hocket.clock import SystemClock
from hocket.config import Config
from hocket.types import Role

_log = logging.getLogger(__name__)

_LOOK_S = 3.0


class KubernetesCluster:
    """The RayCluster that this process runs in. Close it before the workers are stopped."""

    def __init__(self, api: KubernetesApi, pod: environment.RayClusterPod, config: Config) -> None:
        """Reads the RayCluster. Raises HocketError when that fails."""
        self._api = api
        self._pod = pod
        self._needs = {
            role: Needs(bundle_of(pool_settings(config, role).placement), num_ranks(config, role))
            for role in Role
        }
        cluster = ObjectName("RayCluster", pod.namespace, pod.cluster)
        self._replicas = RayClusterReplicas(api, cluster)
        self._groups = self._replicas.read(*(role.value for role in Role))
        self._executor: KubernetesExecutor | None = None
        self._thread: Repeating | None = None

    @staticmethod
    def found(config: Config) -> KubernetesCluster | None:
        """The one that this pod may resize; None where there is none, or `cluster.kubernetes` is
        "off".

        Raises:
            HocketError: the API server is not known, or the RayCluster cannot be read.
        """
        pod = environment.ray_cluster_pod()
        if config.cluster.kubernetes == "off" or pod is None:
            return None
        _log.info("sizes are replicas of RayCluster %s/%s", pod.namespace, pod.cluster)
        return KubernetesCluster(KubernetesApi.in_cluster(), pod, config)

    def at_start(self, config: Config) -> Config:
        """The configuration, with pools no larger than their groups are: what an autoscaler has
        taken away since, nothing waits for. What it has added is started once the rest serves.

        Raises:
            ConfigError: a group has no room for a worker.
        """
        for role, needs in self._needs.items():
            group = self._groups[role.value]
            there = group.size * workers_per_replica(group, needs)
            pool = pool_settings(config, role)
            sized = replace(pool, workers=max(1, min(pool.workers, there)))
            config = replace(config, **{role.value: sized})
        return config

    def executor(self, pools: Pools) -> KubernetesExecutor:
        """Acts on sizes from now on, and has the cluster looked at every few seconds."""
        identity = f"{self._pod.name}-{secrets.token_hex(4)}"
        name = ObjectName("Lease", self._pod.namespace, f"{self._pod.cluster}-autoscaler")
        lease = KubernetesLease(self._api, name, identity, SystemClock())
        executor = self._executor = KubernetesExecutor(
            pools, self._replicas, lease, self._needs, self._groups
        )
        executor.tick()
        self._thread = Repeating("kubernetes", _LOOK_S, executor.tick)
        self._thread.start()
        return executor

    def close(self) -> None:
        """Acts no more, and lets another launcher. Safe to call again."""
        if self._thread is not None and self._executor is not None:
            self._thread.stop()
            self._executor.close()
            self._thread = None
        self._api.close()
