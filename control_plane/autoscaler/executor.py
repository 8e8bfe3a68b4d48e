"""The two seams of the autoscaler: where observations come from, and who acts on sizes.

The loop around them (`control_plane.cluster.scaling_loop`) observes, decides, resizes what changed
and keeps the state. One process runs it, the launcher; a new one starts with an empty `State`.
"""

from __future__ import annotations

from typing import Protocol

from control_plane.autoscaler.observations import Observations, PoolWorkers
from hocket.types import Role


class ObservationSource(Protocol):
    """Gathers one window from the gateways, the workers and the executor."""

    def observe(self) -> Observations:
        """What happened since the last call. What cannot be had is `Missing`; never raises for
        that, and never fills in zeros."""
        ...


class PoolExecutor(Protocol):
    """Starts and stops the workers of both pools: Ray groups, or replicas in a RayCluster."""

    def workers(self, role: Role) -> PoolWorkers:
        """The pool now; never blocks."""
        ...

    def resize(self, role: Role, size: int) -> None:
        """Asks for `size` workers and returns without waiting for them.

        Growing starts workers. Shrinking takes those away that serve nobody yet, then drains ready
        ones (they finish, and keep exported blocks until these are read) and stops each once it is
        empty. Twice the same size is harmless. Only after success is `written_size` the new size.

        Raises:
            HocketError: the size was not taken, for example because somebody changed the pool in
                between; the next decision sees the pool as it is.
        """
        ...

    def edit(self, role: Role, size: int) -> None:
        """As `resize`, for an operator (`hocket scale prefill=3`): `written_size` is then another
        size, so that the autoscaler sees whose size this is and keeps it.

        Raises:
            HocketError: as `resize`.
        """
        ...

    def release(self, role: Role) -> None:
        """Takes an operator's size over as the executor's own (`hocket scale prefill=auto`):
        `written_size` becomes `size`, and the autoscaler goes on from there at once."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What it waits for, a line each; for `hocket status`."""
        ...
