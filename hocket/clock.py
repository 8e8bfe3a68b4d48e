"""Time, for the code that may read it: servers, engines' outermost loops, the supervisor.

Schedulers and hand-off tables never read a clock; they are handed `now`. The control plane's
request path uses its event loop's own time instead. Nothing read here crosses to another host,
except an epoch, which is only ever compared with earlier epochs of the same worker.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds; the zero means nothing."""

    def now(self) -> float:
        """Seconds; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """Stands still until told; for tests and simulations."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time on by `seconds` (not negative)."""
        assert seconds >= 0, seconds
        self._now_s += seconds


def new_epoch() -> int:
    """The name of one life of a worker: larger for every later start of the same worker.

    Microseconds since 1970, so it fits a uint64 and orders restarts, also on another host whose
    clock is off by less than the time a restart takes.
    """
    return time.time_ns() // 1000
