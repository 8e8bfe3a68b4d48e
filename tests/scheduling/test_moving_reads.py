"""How long a READ may take: as long as it moves. A stuck one is given up soon."""

from __future__ import annotations

import pytest

from hocket.kv.block_pool import BlockPool
from hocket.scheduling.import_ownership import ImportOwnership
from hocket.scheduling.import_words import ImportLimits, NotReceived, PostRead, ReadEnd
from hocket.types import RequestKey

A = RequestKey("a")
EPOCH = 7
READ_TIMEOUT_S = 4.0
LIMITS = ImportLimits(
    progress_timeout_s=6.0,
    read_timeout_s=READ_TIMEOUT_S,
    max_quarantine_share=1.0,
    quarantine_timeout_s=30.0,
    max_read_attempts=1,
)


class Reading:
    """A prompt of two blocks, one READ each; prefill keeps saying that it is alive."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pool = BlockPool(8)
        self.owned = ImportOwnership(self.pool, LIMITS)
        self.owned.open(A, 2, EPOCH, self.now)
        self.owned.peer_opened(A, self.now)
        self.owned.receive(A, self.pool.allocate(2), self.now)
        for block in (0, 1):
            self.owned.chunk_ready(A, block, [block], [], self.now)
        posted = [word for word in self.owned.take_words() if isinstance(word, PostRead)]
        self.first, self.second = (word.number for word in posted)

    def wait(self, seconds: float) -> list[NotReceived]:
        self.now += seconds
        self.owned.alive(A, self.now)
        return [end for end in self.owned.tick(self.now) if isinstance(end, NotReceived)]


def test_a_read_that_moves_outlives_its_timeout_and_so_does_the_one_behind_it() -> None:
    reading = Reading()
    for moves in range(1, 11):
        assert reading.wait(READ_TIMEOUT_S * 0.9) == []
        reading.owned.read_moved(reading.first, moves, reading.now)
        reading.owned.read_moved(reading.second, moves, reading.now)
    reading.owned.read_ended(reading.first, ReadEnd.DONE, reading.now, EPOCH)
    reading.owned.read_ended(reading.second, ReadEnd.DONE, reading.now, EPOCH)
    reading.owned.whole(A, reading.now)
    assert len(reading.owned.tick(reading.now)) == 1
    assert reading.owned.counters.reads_timed_out == 0


@pytest.mark.parametrize("moves", [0, 3])
def test_a_read_that_stands_still_is_given_up(moves: int) -> None:
    reading = Reading()
    for number in (reading.first, reading.second):
        reading.owned.read_moved(number, moves, reading.now)
    assert reading.wait(READ_TIMEOUT_S * 0.9) == []
    for number in (reading.first, reading.second):
        reading.owned.read_moved(number, moves, reading.now)
    (lost,) = reading.wait(READ_TIMEOUT_S * 0.2)
    assert "did not end within 4 s" in str(lost.error)
    assert reading.pool.num_quarantined == 2


def test_an_abandoned_read_stays_in_quarantine_since_it_was_abandoned_however_it_moves() -> None:
    reading = Reading()
    reading.owned.cancel(A, reading.now)
    for moves in range(1, 11):
        reading.now += LIMITS.quarantine_timeout_s / 9
        reading.owned.read_moved(reading.first, moves, reading.now)
        reading.owned.tick(reading.now)
    assert reading.owned.counters.rebuilds == 1
