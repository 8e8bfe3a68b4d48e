"""How a worker leaves: announced, drained, stopped, and only then away.

A `Departure` is one worker on its way out, seen by `pools.WorkerPools`. The worker is no place of
the supervisor any more, so nothing starts it again. First its registry entry says that it drains,
and gateways stop placing requests on it; then it refuses new ones, finishes those it has, and keeps
exported blocks until they are read; then it is stopped. All ranks of a group drain before any of
them stops: they step together. What does not go in time is killed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from control_plane.cluster.supervisor import Health, Process

_log = logging.getLogger(__name__)

# One that has not come up is killed when it does not answer within this time. It is asked first,
# because it may have registered in this very moment, and have requests by now.
_UNSTARTED_S = 5.0
# Beyond its limits, a worker gets this long to say that it is done.
_GRACE_S = 30.0


class LeavingProcess(Process, Protocol):
    """One life of a place that can be asked to leave. No method blocks."""

    def begin_drain(self, announce_s: float, drain_s: float) -> None:
        """Has it announce that it drains, wait `announce_s`, then refuse what is new and finish
        what is there, within `drain_s`; what is left then fails."""
        ...

    def is_drained(self) -> bool:
        """Whether `begin_drain` has come to its end."""
        ...

    def begin_stop(self) -> None:
        """Has it take itself off the registry and end."""
        ...

    def has_stopped(self) -> bool:
        """Whether `begin_stop` has come to its end."""
        ...


@dataclass(frozen=True, slots=True)
class DepartureTimes:
    """announce_s: time that gateways get to see that a worker drains, before it refuses requests.
    drain_s: time that its requests get to end. stuck_s: one that does not answer for this long is
    killed."""

    announce_s: float
    drain_s: float
    stuck_s: float


class Departure:
    """One worker on its way out. `tick` until it is True; then its room can be given back."""

    def __init__(
        self, name: str, process: LeavingProcess, times: DepartureTimes, now: float
    ) -> None:
        """Has it begin to drain."""
        self.process = process
        self.began_s = now
        self._name = name
        self._times = times
        self._heard_s = now
        self._stopping_since_s: float | None = None
        process.begin_drain(times.announce_s, times.drain_s)

    def tick(self, now: float) -> bool:
        """Moves on; True once the process is no more."""
        if self._stopping_since_s is not None:
            is_gone = self.process.has_stopped() or now - self._stopping_since_s > _GRACE_S
        elif self.process.is_drained():
            self.process.begin_stop()
            self._stopping_since_s = now
            return False
        else:
            fault = self._fault(now)
            if fault:
                _log.warning("%s is killed, it was to drain: %s", self._name, fault)
            is_gone = bool(fault)
        if is_gone:
            self.process.kill()
        return is_gone

    def _fault(self, now: float) -> str:
        """Why the drain cannot come to its end; empty when it can."""
        health = self.process.look()
        if health is Health.DEAD:
            return self.process.why()
        if health is Health.STARTING and now - self.began_s > _UNSTARTED_S:
            return "it has not started"
        if health is not Health.SILENT:
            self._heard_s = now
        silent_s, drains_s = now - self._heard_s, now - self.began_s
        if silent_s > self._times.stuck_s:
            return f"no answer for {silent_s:.1f} s (cluster.stuck_s = {self._times.stuck_s:g})"
        if drains_s > self._times.announce_s + self._times.drain_s + _GRACE_S:
            return f"not drained after {drains_s:.0f} s"
        return ""
