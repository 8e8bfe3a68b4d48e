"""Deadlines of requests, whatever queue they are in: one heap, asked by both schedulers.

Time comes in with every call; nothing here reads a clock.
"""

from __future__ import annotations

import heapq

from hocket.types import RequestKey

# Entries of ended requests that the heap may always keep.
_UNSWEPT = 64


class Deadlines:
    """When each request's time is over. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._at: dict[RequestKey, float] = {}
        self._heap: list[tuple[float, str, RequestKey]] = []

    def __len__(self) -> int:
        return len(self._at)

    @property
    def num_kept(self) -> int:
        """Entries in memory, those of ended requests included."""
        return len(self._heap)

    def add(self, key: RequestKey, at: float) -> None:
        assert key not in self._at, f"{key} has a deadline already"
        self._at[key] = at
        heapq.heappush(self._heap, (at, str(key), key))

    def discard(self, key: RequestKey) -> None:
        """Most requests end long before their time: what they leave in the heap is swept away when
        it is the greater part, so that the heap is as large as what is here, not as the past."""
        self._at.pop(key, None)
        if len(self._heap) > 2 * len(self._at) + _UNSWEPT:
            self._heap = [entry for entry in self._heap if self._is_live(entry[0], entry[2])]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline; None when there is none."""
        self._drop_discarded()
        return self._heap[0][0] if self._heap else None

    def take_expired(self, now: float) -> list[RequestKey]:
        """Removes and returns the requests whose time is over, earliest first."""
        expired: list[RequestKey] = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            expired.append(key)
        return expired

    def _is_live(self, at: float, key: RequestKey) -> bool:
        return self._at.get(key) == at

    def _drop_discarded(self) -> None:
        while self._heap and not self._is_live(self._heap[0][0], self._heap[0][2]):
            heapq.heappop(self._heap)
