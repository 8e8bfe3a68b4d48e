"""The workers of both pools while the cluster serves: started, watched, drained, taken away.

`WorkerPools` owns them. What a worker runs on is a `WorkerHost`: Ray (`ray_workers.py`), or memory
in tests. A worker is what starts and stops as one: "decode-3" is one process, or a group of
`decode.group_size` ranks. It is a place of the `Supervisor` from the moment there is room for it
until it begins to drain:

    start → waits for room → starting ⇄ ready → draining → gone (`take_drained`)

`start` and `drain` return at once; `tick` moves everything on. Executors of the autoscaler
(`ray_executor.py`, Kubernetes) stand on this.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Protocol, cast

from control_plane.autoscaler.observations import PoolWorkers
from control_plane.cluster.departures import Departure, DepartureTimes, LeavingProcess
from control_plane.cluster.supervisor import Place, Process, Supervisor
from hocket.clock import Clock
from hocket.types import Role

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeName:
    """A node of the Ray cluster: its host name (of a pod: the pod's name) and its address."""

    hostname: str
    ip: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A worker that is gone for good, and the nodes it ran on; none if it never had room."""

    name: str
    nodes: tuple[NodeName, ...]


class Reservation(Protocol):
    """Room for one worker, asked for. No method blocks for long."""

    def has_room(self) -> bool:
        """Whether the room is there."""
        ...

    def wanted(self) -> str:
        """What is asked for, in words."""
        ...

    def nodes(self) -> tuple[NodeName, ...]:
        """The nodes it is on; none while there is no room."""
        ...

    def release(self) -> None:
        """Gives the room back, or stops asking for it. Safe to call again."""
        ...


class WorkerHost(Protocol):
    """What workers run on."""

    def reserve(self, role: Role) -> Reservation:
        """Asks for room for one more worker; returns at once."""
        ...

    def launch(self, role: Role, index: int, reservation: Reservation) -> LeavingProcess:
        """Begins a new life of the worker `index` of a pool, in its room."""
        ...


@dataclass(frozen=True, slots=True)
class PoolTimes:
    """startup_s: see `Place`. leaving: see `Departure`; `stuck_s` holds for all workers."""

    startup_s: float
    leaving: DepartureTimes


@dataclass(slots=True)
class _Worker:
    """since_s: when it was asked for, or last stopped serving."""

    role: Role
    index: int
    reservation: Reservation
    since_s: float
    is_placed: bool = False
    is_ready: bool = False
    departure: Departure | None = None

    @property
    def name(self) -> str:
        return f"{self.role.value}-{self.index}"

    @property
    def serves(self) -> bool:
        return self.is_ready and self.departure is None

    def note(self, now: float) -> str:
        """What is waited for."""
        if self.departure is not None:
            return f"{self.name} drains since {now - self.departure.began_s:.0f} s"
        since = f"since {now - self.since_s:.0f} s"
        if self.is_placed:
            return f"{self.name} starts {since}"
        return f"{self.name} waits for room {since}: {self.reservation.wanted()}"


class WorkerPools:
    """Both pools. Every method may be called from any thread; none waits for a worker."""

    def __init__(
        self, host: WorkerHost, supervisor: Supervisor, times: PoolTimes, clock: Clock
    ) -> None:
        self._host = host
        self._supervisor = supervisor
        self._times = times
        self._clock = clock
        self._lock = threading.RLock()
        # The newest last.
        self._workers: list[_Worker] = []
        self._drained: dict[Role, list[Drained]] = {role: [] for role in Role}
        self._start_up_s = dict.fromkeys(Role, 0.0)

    def workers(self, role: Role) -> PoolWorkers:
        """The pool now. `written_size` is `size`: who wrote sizes is the executors' to know."""
        with self._lock:
            now = self._clock.now()
            pool = [worker for worker in self._workers if worker.role is role]
            staying = [worker for worker in pool if worker.departure is None]
            starting = [worker for worker in staying if not worker.is_ready]
            return PoolWorkers(
                size=len(staying),
                written_size=len(staying),
                ready=len(staying) - len(starting),
                starting_s=tuple(now - worker.since_s for worker in starting),
                draining=len(pool) - len(staying),
                start_up_s=self._start_up_s[role],
            )

    def ready(self, role: Role) -> tuple[str, ...]:
        """The names of the workers that serve."""
        with self._lock:
            return tuple(w.name for w in self._workers if w.role is role and w.serves)

    def without_room(self, role: Role) -> int:
        """Workers that wait for room."""
        with self._lock:
            return sum(w.role is role and not w.is_placed for w in self._workers)

    def nodes(self, role: Role) -> dict[str, tuple[NodeName, ...]]:
        """The nodes of every worker that is not gone, by its name; none while it waits for
        room."""
        with self._lock:
            return {w.name: w.reservation.nodes() for w in self._workers if w.role is role}

    def start(self, role: Role, count: int) -> None:
        """Begins `count` more. One that finds no room stays starting, and `notes` says so."""
        with self._lock:
            for _ in range(count):
                # A name is free again only when the worker that had it is gone.
                taken = {worker.index for worker in self._workers if worker.role is role}
                index = next(index for index in range(len(taken) + 1) if index not in taken)
                now = self._clock.now()
                self._workers.append(_Worker(role, index, self._host.reserve(role), now))
        self.tick()

    def drain(self, role: Role, count: int) -> None:
        """Takes `count` away: first those that serve nobody yet (waiting for room, then starting),
        then ready ones; of each kind the newest first. What has processes drains: also one that
        starts may be registered in this very moment, and have requests by now."""
        with self._lock:
            now = self._clock.now()
            staying = [w for w in self._workers if w.role is role and w.departure is None]
            leaving = staying[::-1]
            leaving.sort(key=lambda worker: (worker.is_ready, worker.is_placed))
            for worker in leaving[:count]:
                process = self._supervisor.remove(worker.name) if worker.is_placed else None
                if process is None:
                    self._gone(worker)
                    continue
                worker.departure = Departure(
                    worker.name, _leaving(process), self._times.leaving, now
                )
                _log.info("%s drains", worker.name)

    def take_drained(self, role: Role) -> list[Drained]:
        """The workers that have gone since the last call."""
        with self._lock:
            drained, self._drained[role] = self._drained[role], []
            return drained

    def notes(self) -> tuple[str, ...]:
        """What is being waited for, a line for each worker."""
        with self._lock:
            now = self._clock.now()
            return tuple(worker.note(now) for worker in self._workers if not worker.serves)

    def processes(self) -> dict[str, LeavingProcess]:
        """The processes of all workers, those that drain included, by name."""
        with self._lock:
            running = self._supervisor.processes()
            names = [w.name for w in self._workers if w.name in running]
            leaving = {w.name: w.departure.process for w in self._workers if w.departure}
            return {name: _leaving(running[name]) for name in names} | leaving

    def tick(self) -> None:
        """Moves every worker on that can be."""
        with self._lock:
            now = self._clock.now()
            for worker in list(self._workers):
                if worker.departure is not None:
                    if worker.departure.tick(now):
                        self._gone(worker)
                elif not worker.is_placed:
                    if worker.reservation.has_room():
                        self._place(worker)
                else:
                    self._look(worker, now)

    def _place(self, worker: _Worker) -> None:
        times = self._times

        def launch() -> LeavingProcess:
            return self._host.launch(worker.role, worker.index, worker.reservation)

        self._supervisor.add(Place(worker.name, launch, times.startup_s, times.leaving.stuck_s))
        worker.is_placed = True

    def _look(self, worker: _Worker, now: float) -> None:
        is_serving = self._supervisor.is_serving(worker.name)
        if is_serving and not worker.is_ready:
            self._start_up_s[worker.role] = now - worker.since_s
        elif worker.is_ready and not is_serving:
            worker.since_s = now
        worker.is_ready = is_serving

    def _gone(self, worker: _Worker) -> None:
        nodes = worker.reservation.nodes()
        worker.reservation.release()
        self._workers.remove(worker)
        self._drained[worker.role].append(Drained(worker.name, nodes))
        _log.info("%s is gone", worker.name)


def _leaving(process: Process) -> LeavingProcess:
    """A process of one of our places: `WorkerHost.launch` has made it."""
    return cast(LeavingProcess, process)
