"""Of several launchers one acts: the Lease, with two candidates and a clock that stands still."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from control_plane.cluster.kubernetes_lease import KubernetesLease
from hocket.clock import ManualClock
from hocket.errors import ApiUnavailable, ConfigError
from tests.cluster.kubernetes.api_server import ApiServer
from tests.cluster.kubernetes.rig import LEASE, api_of, empty_lease


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def two(server: ApiServer, clock: ManualClock) -> tuple[KubernetesLease, KubernetesLease]:
    server.put("leases", empty_lease())
    api = api_of(server, timeout_s=0.5)
    return tuple(KubernetesLease(api, LEASE, name, clock) for name in "ab")  # pyright: ignore


def test_one_of_two_holds_it_and_the_other_knows_whom_to_name(
    server: ApiServer, two: tuple[KubernetesLease, KubernetesLease], clock: ManualClock
) -> None:
    first, second = two
    for _ in range(20):
        first.renew()
        second.renew()
        assert (first.is_held(), second.is_held()) == (True, False)
        clock.advance(3)
    assert second.holder == "a"
    spec = server.get("leases", LEASE.name)["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("a", 1)
    age = datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])
    assert age.total_seconds() < 60


def test_a_dead_holder_is_followed_when_its_record_has_stood_still(
    two: tuple[KubernetesLease, KubernetesLease], clock: ManualClock
) -> None:
    first, second = two
    first.renew()
    second.renew()
    clock.advance(11)
    # The old one stops before the new one may begin.
    assert not first.is_held()
    second.renew()
    assert not second.is_held()
    clock.advance(5)
    second.renew()
    assert second.is_held()
    first.renew()
    assert (first.is_held(), first.holder) == (False, "b")


def test_at_no_time_do_both_hold_it(
    two: tuple[KubernetesLease, KubernetesLease], clock: ManualClock
) -> None:
    """Whatever pauses either of them has."""
    first, second = two
    held = set[str]()
    for second_of in range(200):
        if second_of % 67 < 40:
            first.renew()
        if second_of % 53 < 30:
            second.renew()
        assert not (first.is_held() and second.is_held()), second_of
        held |= {"a"} if first.is_held() else set()
        held |= {"b"} if second.is_held() else set()
        clock.advance(1)
    assert held == {"a", "b"}


def test_of_two_takers_at_once_one_fails(server: ApiServer, clock: ManualClock) -> None:
    server.put("leases", empty_lease())
    candidates = [KubernetesLease(api_of(server), LEASE, f"c{i}", clock) for i in range(4)]
    together = threading.Barrier(len(candidates))
    # All have read before any of them writes.
    server.before_write.append(lambda: together.wait(5) and None)
    threads = [threading.Thread(target=candidate.renew) for candidate in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [candidate.is_held() for candidate in candidates].count(True) == 1


def test_released_it_can_be_taken_at_once(
    two: tuple[KubernetesLease, KubernetesLease],
) -> None:
    first, second = two
    first.renew()
    second.renew()
    second.release()
    assert first.is_held()
    first.release()
    assert not first.is_held()
    second.renew()
    assert second.is_held()


def test_without_an_answer_it_is_held_a_while_and_then_no_more(
    server: ApiServer, two: tuple[KubernetesLease, KubernetesLease], clock: ManualClock
) -> None:
    first, _ = two
    first.renew()
    server.fails_with = 500
    clock.advance(9)
    with pytest.raises(ApiUnavailable):
        first.renew()
    assert first.is_held()
    clock.advance(2)
    assert not first.is_held()


def test_a_lost_answer_to_a_renewal_is_made_good_by_the_next(
    server: ApiServer, two: tuple[KubernetesLease, KubernetesLease]
) -> None:
    first, second = two
    server.lose_answers = 1
    with pytest.raises(ApiUnavailable):
        first.renew()
    assert not first.is_held()
    second.renew()
    first.renew()
    assert (first.is_held(), second.is_held()) == (True, False)


def test_a_missing_lease_or_right_is_named(
    server: ApiServer, two: tuple[KubernetesLease, KubernetesLease]
) -> None:
    first, _ = two
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}
    server.rules = [rule]
    with pytest.raises(ConfigError, match=r"update Lease .*: 403 .*verbs \[update\]"):
        first.renew()
    server.delete("leases", LEASE.name)
    with pytest.raises(ConfigError, match="get Lease serving/hocket-autoscaler: 404"):
        first.renew()
