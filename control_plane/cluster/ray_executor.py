"""Acts on sizes by starting and draining workers on Ray, which finds room for them by itself.

The autoscaler's `PoolExecutor` where nodes are there already, or come by Ray's own doing. On
Kubernetes another one patches the RayCluster first.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.autoscaler.observations import PoolWorkers
from control_plane.cluster.pools import WorkerPools
from hocket.types import Role

_NOT_OURS = -1


class RayExecutor:
    """Implements `control_plane.autoscaler.executor.PoolExecutor` over the worker pools."""

    def __init__(self, pools: WorkerPools) -> None:
        """The sizes that the pools have now count as its own."""
        self._pools = pools
        self._written = {role: pools.workers(role).size for role in Role}

    def workers(self, role: Role) -> PoolWorkers:
        return replace(self._pools.workers(role), written_size=self._written[role])

    def resize(self, role: Role, size: int) -> None:
        self._move(role, size)
        self._written[role] = size

    def edit(self, role: Role, size: int) -> None:
        self._move(role, size)
        # Also when it is the very size that was written: now somebody wants it kept.
        self._written[role] = _NOT_OURS

    def release(self, role: Role) -> None:
        self._written[role] = self._pools.workers(role).size

    def notes(self) -> tuple[str, ...]:
        return self._pools.notes()

    def _move(self, role: Role, size: int) -> None:
        # Nodes without workers are not ours to give back.
        self._pools.take_drained(role)
        more = size - self._pools.workers(role).size
        if more > 0:
            self._pools.start(role, more)
        elif more < 0:
            self._pools.drain(role, -more)
