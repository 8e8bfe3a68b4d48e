"""Who keeps the pools' sizes: Ray by itself, or the RayCluster that this process runs in."""

from __future__ import annotations

from typing import Protocol

from control_plane.autoscaler.executor import PoolExecutor
from control_plane.cluster.kubernetes_cluster import KubernetesCluster
from control_plane.cluster.pools import WorkerPools
from control_plane.cluster.ray_executor import RayExecutor
from hocket.config import Config


class Sizes(Protocol):
    """Found by `sizes_of` before anything is started; closed before workers are stopped."""

    def at_start(self, config: Config) -> Config:
        """The configuration, with the pools' sizes to start with."""
        ...

    def executor(self, pools: WorkerPools) -> PoolExecutor:
        """Acts on sizes from now on."""
        ...

    def close(self) -> None:
        """Acts no more. Safe to call again."""
        ...


class RaySizes:
    """Nodes are there already, or come by Ray's own doing: sizes are workers, and no more."""

    def at_start(self, config: Config) -> Config:
        return config

    def executor(self, pools: WorkerPools) -> RayExecutor:
        return RayExecutor(pools)

    def close(self) -> None:
        pass


def sizes_of(config: Config) -> Sizes:
    """Whoever keeps them here. Raises HocketError when Kubernetes does and cannot be asked."""
    return KubernetesCluster.found(config) or RaySizes()
