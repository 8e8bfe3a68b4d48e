"""Keeps every place of the cluster filled: a process that died or hangs is started again.

A *place* is a name ("prefill-0", "gateway") and a way to launch its process. `Supervisor.tick`
looks at each place and acts: it is the only code that launches while the cluster serves. Places
come and go with the size of the pools (`pools.py`); whoever removes one owns its process then.

Ray could restart actors itself (`max_restarts`), but it sees only dead processes, not hung ones,
gives up on one whose constructor fails, and would re-run it with the old epoch. One path for all
three is simpler than two that must agree, so actors are created with `max_restarts=0` and live
and die here. Where a process runs is still Ray's: its placement group holds the place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hocket.clock import Clock

_log = logging.getLogger(__name__)

PROCESS_DIED = "its process died"
"""How the reason of one that died without a word ends."""

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 30.0
# A process that served this long is not in a crash loop: its next restart is immediate again.
_SETTLED_S = 5.0


class Health(Enum):
    """What a look at a process found."""

    STARTING = "starting"
    SERVING = "serving"
    SILENT = "silent"
    """Alive as far as anyone knows, but no pulse since the last look."""
    DEAD = "dead"


class Process(Protocol):
    """One life of a place. No method blocks."""

    def look(self) -> Health: ...

    def why(self) -> str:
        """One line on why it is DEAD."""
        ...

    def kill(self) -> None:
        """Ends it at once; harmless when it is dead."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the cluster that must always run."""

    name: str
    launch: Callable[[], Process]
    startup_timeout_s: float
    stuck_s: float


@dataclass(slots=True)
class _Life:
    """A place's present: a process, or the time of the next launch."""

    process: Process | None = None
    launched_at: float = 0.0
    heard_at: float = 0.0
    served_at: float | None = None
    """When it was first found serving."""
    launch_at: float = 0.0
    delay_s: float = _FIRST_DELAY_S
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Replaced:
    """A process was ended, for this reason, and its place will be filled again."""

    name: str
    reason: str


class Supervisor:
    """Owns the processes of all places. Every method may be called from any thread."""

    def __init__(self, places: Sequence[Place], clock: Clock) -> None:
        self._places = {place.name: place for place in places}
        self._clock = clock
        self._lives = {place.name: _Life() for place in places}
        self._lock = threading.RLock()

    def add(self, place: Place) -> None:
        """A new place; the next tick launches its process."""
        with self._lock:
            assert place.name not in self._places, place.name
            self._places[place.name] = place
            self._lives[place.name] = _Life()

    def remove(self, name: str) -> Process | None:
        """Forgets a place. Its process, if it has one, is the caller's from here on: nobody else
        kills it, and nobody starts another."""
        with self._lock:
            del self._places[name]
            return self._lives.pop(name).process

    def processes(self) -> dict[str, Process]:
        """The processes that run now, by place."""
        with self._lock:
            lives = self._lives.items()
            return {name: life.process for name, life in lives if life.process is not None}

    def is_serving(self, name: str) -> bool:
        """Whether the place's process has come up, and has not been found dead or stuck."""
        with self._lock:
            life = self._lives[name]
            return life.process is not None and life.served_at is not None

    def restarts(self, name: str) -> int:
        """How often the place's process was replaced."""
        with self._lock:
            return self._lives[name].restarts

    def tick(self) -> list[Replaced]:
        """One look at every place: launch what is due, replace what is dead or stuck."""
        replaced: list[Replaced] = []
        with self._lock:
            for place in self._places.values():
                reason = self._look(place)
                if reason:
                    replaced.append(Replaced(place.name, reason))
            waits_s = [self._lives[one.name].launch_at - self._clock.now() for one in replaced]
        for one, wait_s in zip(replaced, waits_s, strict=True):
            _log.warning("%s is replaced in %.1f s: %s", one.name, wait_s, one.reason)
        return replaced

    def _look(self, place: Place) -> str:
        """Why the place's process was ended; empty when it was not."""
        life, now = self._lives[place.name], self._clock.now()
        if life.process is None:
            if now >= life.launch_at:
                self._launch(place, life, now)
            return ""
        reason = self._fault(place, life, now)
        if reason:
            life.process.kill()
            self._lives[place.name] = self._after(life, now)
        return reason

    def _launch(self, place: Place, life: _Life, now: float) -> None:
        life.process = place.launch()
        life.launched_at = life.heard_at = now
        life.served_at = None

    def _fault(self, place: Place, life: _Life, now: float) -> str:
        """Why the process must be replaced; empty when it need not."""
        assert life.process is not None
        health = life.process.look()
        if health is Health.DEAD:
            return life.process.why()
        if health is Health.SERVING:
            if life.restarts and life.served_at is None:
                _log.info("%s serves again after %.1f s", place.name, now - life.launched_at)
            life.served_at = now if life.served_at is None else life.served_at
            life.heard_at = now
        silent_s = now - life.heard_at
        has_served = life.served_at is not None
        if has_served and silent_s > place.stuck_s:
            return f"no answer for {silent_s:.1f} s (cluster.stuck_s = {place.stuck_s:g})"
        if not has_served and now - life.launched_at > place.startup_timeout_s:
            return f"not serving after {place.startup_timeout_s:g} s (cluster.startup_timeout_s)"
        return ""

    @staticmethod
    def _after(life: _Life, now: float) -> _Life:
        """The place without its process: the next launch is later the sooner this one failed."""
        has_settled = life.served_at is not None and life.heard_at - life.served_at >= _SETTLED_S
        delay_s = _FIRST_DELAY_S if has_settled else life.delay_s
        return _Life(
            launch_at=now + delay_s,
            delay_s=min(_LONGEST_DELAY_S, delay_s * 4),
            restarts=life.restarts + 1,
        )
