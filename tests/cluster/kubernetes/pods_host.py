"""Workers on fake pods: what Ray and the worker processes do, without either.

A worker finds room on running pods with free places, on pods of one replica where it has several
ranks. When its pod goes, its process is dead and waits for room again, as a placement group does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from control_plane.cluster.pools import NodeName
from control_plane.cluster.supervisor import Health
from hocket.types import Role
from tests.cluster.kubernetes.kuberay import KubeRay


@dataclass(eq=False)
class PodReservation:
    """Room for `ranks` processes."""

    host: PodsHost
    role: Role
    ranks: int
    on: list[str] = field(default_factory=list[str])
    is_released: bool = False

    def has_room(self) -> bool:
        return bool(self.on) or self.host.place(self)

    def wanted(self) -> str:
        return f"{self.ranks} processes"

    def nodes(self) -> tuple[NodeName, ...]:
        return tuple(NodeName(name, "") for name in dict.fromkeys(self.on))

    def release(self) -> None:
        self.is_released, self.on = True, []
        if self in self.host.reservations:
            self.host.reservations.remove(self)


@dataclass(eq=False)
class PodProcess:
    """One life of a worker: it serves at the second look after there is room."""

    host: PodsHost
    reservation: PodReservation
    looks: int = 0
    is_dead: bool = False
    drains: bool = False
    stops: bool = False

    @property
    def is_serving(self) -> bool:
        return self.looks > 1 and not self.is_dead

    def look(self) -> Health:
        if self.is_dead:
            return Health.DEAD
        if self.looks or self.reservation.has_room():
            self.looks += 1
        return Health.SERVING if self.looks > 1 else Health.STARTING

    def why(self) -> str:
        return "its pod is gone"

    def kill(self) -> None:
        self.is_dead = True

    def begin_drain(self, announce_s: float, drain_s: float) -> None:
        self.drains = True

    def is_drained(self) -> bool:
        return self.drains and not self.host.holds_drains

    def begin_stop(self) -> None:
        self.stops = True

    def has_stopped(self) -> bool:
        return self.stops


class PodsHost:
    """A `WorkerHost`. `lost`: workers that served when their pod was taken."""

    def __init__(self, kuberay: KubeRay, *, places: int = 1, decode_ranks: int = 1) -> None:
        self._kuberay = kuberay
        self._places = places
        self.ranks = decode_ranks
        self.holds_drains = False
        self.is_closed = False
        self.prefers = ""
        self.reservations: list[PodReservation] = []
        self.processes: list[PodProcess] = []
        self.lost: list[str] = []
        kuberay.on_kill = self._pod_goes

    def reserve(self, role: Role) -> PodReservation:
        reservation = PodReservation(self, role, self.ranks if role is Role.DECODE else 1)
        self.reservations.append(reservation)
        return reservation

    def launch(self, role: Role, index: int, reservation: PodReservation) -> PodProcess:
        process = PodProcess(self, reservation)
        self.processes.append(process)
        return process

    def place(self, reservation: PodReservation) -> bool:
        """Gives it room on the first pods that have it."""
        if self.is_closed:
            return False
        taken = [name for other in self.reservations for name in other.on]
        free: dict[str, list[str]] = {}
        for pod in self._kuberay.pods(reservation.role.value):
            metadata = pod["metadata"]
            if pod["status"]["phase"] != "Running" or "deletionTimestamp" in metadata:
                continue
            name = metadata["name"]
            replica = metadata["labels"].get("ray.io/worker-group-replica-name", name)
            places = self._places - taken.count(name)
            free.setdefault(replica, []).extend([name] * places)
        for places in sorted(free.values(), key=lambda names: self.prefers not in names):
            if len(places) >= reservation.ranks:
                reservation.on = places[: reservation.ranks]
                return True
        return False

    def _pod_goes(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        for reservation in self.reservations:
            if name in reservation.on:
                for process in self.processes:
                    if process.reservation is reservation and not process.is_dead:
                        if process.is_serving and not process.stops:
                            self.lost.append(name)
                        process.kill()
                reservation.on = []
