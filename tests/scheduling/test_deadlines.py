"""Claims about the deadline heap."""

from __future__ import annotations

from hocket.scheduling.deadlines import Deadlines
from hocket.types import RequestKey

A, B, C = RequestKey("a"), RequestKey("b"), RequestKey("c")


def test_expired_requests_come_once_and_earliest_first() -> None:
    deadlines = Deadlines()
    for key, at in ((A, 3.0), (B, 1.0), (C, 9.0)):
        deadlines.add(key, at)
    assert deadlines.next() == 1.0
    assert deadlines.take_expired(3.0) == [B, A]
    assert deadlines.take_expired(3.0) == []
    assert len(deadlines) == 1
    assert deadlines.next() == 9.0


def test_a_discarded_request_never_expires_and_may_come_again() -> None:
    deadlines = Deadlines()
    deadlines.add(A, 1.0)
    deadlines.discard(A)
    deadlines.discard(A)
    assert deadlines.next() is None
    deadlines.add(A, 5.0)
    assert deadlines.take_expired(4.0) == []
    assert deadlines.take_expired(5.0) == [A]


def test_requests_that_ended_early_are_not_kept_until_their_time() -> None:
    deadlines = Deadlines()
    deadlines.add(A, 1e6)
    for number in range(10_000):
        key = RequestKey(f"r{number}")
        deadlines.add(key, 600.0 + number)
        deadlines.discard(key)
    assert deadlines.num_kept < 100
    assert deadlines.next() == 1e6
