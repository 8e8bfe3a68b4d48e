"""What is read, and what is missing when a source does not answer."""

from __future__ import annotations

from redis.exceptions import RedisError

from control_plane.autoscaler.observations import Missing, PoolWorkers
from control_plane.autoscaler.windows import GatewayCounts
from control_plane.cluster.readings import ClusterObservations
from hocket.clock import ManualClock
from hocket.types import Role, WorkerDescription


class Silent:
    def workers(self) -> list[WorkerDescription]:
        raise RedisError("connection refused")


class Empty:
    def workers(self) -> list[WorkerDescription]:
        return []


def observations(registry: Silent | Empty, counts: GatewayCounts | Missing) -> ClusterObservations:
    return ClusterObservations(
        workers=lambda role: PoolWorkers(2, 2) if role is Role.PREFILL else PoolWorkers(3, 3),
        ready=lambda role: (),
        registry=registry,
        gateway_counts=lambda: counts,
        clock=ManualClock(7.0),
    )


def test_a_registry_that_is_away_makes_the_loads_missing_and_nothing_else() -> None:
    observed = observations(Silent(), GatewayCounts("gateway-1")).observe()
    assert observed.now_s == 7.0
    assert observed.prefill == observed.decode
    assert observed.prefill == Missing("the registry is away: connection refused")
    assert (observed.prefill_workers.size, observed.decode_workers.size) == (2, 3)


def test_a_gateway_that_does_not_answer_makes_the_arrivals_missing() -> None:
    observed = observations(Empty(), Missing("the gateway starts")).observe()
    assert observed.arrivals == Missing("the gateway starts")
    assert not isinstance(observed.prefill, Missing)
