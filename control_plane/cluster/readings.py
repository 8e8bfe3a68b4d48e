"""Reads what the autoscaler decides on: the registry, the gateway, the pools.

`ClusterObservations` is the `ObservationSource` of the scaling loop: it takes a `Reading` and
hands it to `Windows`, where all the arithmetic is. A source that does not answer is `Missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from control_plane.autoscaler.observations import Missing, Observations, PoolWorkers
from control_plane.autoscaler.windows import GatewayCounts, PoolReading, Reading, Windows
from hocket.clock import Clock
from hocket.types import Role, WorkerDescription


class WorkerList(Protocol):
    """What is needed of `registry.Registry`. May raise `RedisError`."""

    def workers(self) -> Sequence[WorkerDescription]: ...


class ClusterObservations:
    """Implements `ObservationSource`. Called from one thread."""

    def __init__(
        self,
        workers: Callable[[Role], PoolWorkers],
        ready: Callable[[Role], Sequence[str]],
        registry: WorkerList,
        gateway_counts: Callable[[], GatewayCounts | Missing],
        clock: Clock,
    ) -> None:
        """`workers`: the executor's. `ready`: names of the ready workers of a pool."""
        self._workers = workers
        self._ready = ready
        self._registry = registry
        self._gateway_counts = gateway_counts
        self._clock = clock
        self._windows = Windows()

    def observe(self) -> Observations:
        try:
            registered: Sequence[WorkerDescription] | Missing = self._registry.workers()
        except RedisError as error:
            registered = Missing(f"the registry is away: {error}")
        reading = Reading(
            now_s=self._clock.now(),
            gateway=self._gateway_counts(),
            registered=registered,
            prefill=self._pool(Role.PREFILL),
            decode=self._pool(Role.DECODE),
        )
        return self._windows.observe(reading)

    def _pool(self, role: Role) -> PoolReading:
        return PoolReading(self._workers(role), frozenset(self._ready(role)))
