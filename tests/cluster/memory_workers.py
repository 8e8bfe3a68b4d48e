"""Workers in memory, for tests of pools and departures: they are whatever the test says."""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.cluster.pools import NodeName, Reservation
from control_plane.cluster.supervisor import Health
from hocket.types import Role


@dataclass
class MemoryWorker:
    """A process that starts, drains and stops when it is told to. `told` is what was asked of it,
    in order."""

    health: Health = Health.STARTING
    has_drained: bool = False
    has_ended: bool = False
    told: list[str] = field(default_factory=list[str])

    def look(self) -> Health:
        return self.health

    def why(self) -> str:
        return "its process died"

    def kill(self) -> None:
        self.told.append("kill")
        self.health = Health.DEAD

    def begin_drain(self, announce_s: float, drain_s: float) -> None:
        self.told.append(f"drain {announce_s:g} {drain_s:g}")

    def is_drained(self) -> bool:
        return self.has_drained

    def begin_stop(self) -> None:
        self.told.append("stop")

    def has_stopped(self) -> bool:
        return self.has_ended

    @property
    def actor(self) -> None:
        return None

    @property
    def result(self) -> str | None:
        return None if self.health is Health.STARTING else "serves"


@dataclass
class MemoryRoom:
    """Room that is there when the test says so."""

    is_there: bool = True
    is_released: bool = False

    def has_room(self) -> bool:
        return self.is_there

    def wanted(self) -> str:
        return "1 x {'GPU': 8.0}"

    def nodes(self) -> tuple[NodeName, ...]:
        assert not self.is_released, "asked for the nodes of a room that was given back"
        return (NodeName("node-a", "10.0.0.1"),) if self.is_there else ()

    def release(self) -> None:
        self.is_released = True


@dataclass
class MemoryHost:
    """Remembers every room and every life by the worker's name."""

    has_room: bool = True
    rooms: list[MemoryRoom] = field(default_factory=list[MemoryRoom])
    lives: dict[str, list[MemoryWorker]] = field(default_factory=dict[str, list[MemoryWorker]])

    def reserve(self, role: Role) -> MemoryRoom:
        self.rooms.append(MemoryRoom(self.has_room))
        return self.rooms[-1]

    def launch(self, role: Role, index: int, reservation: Reservation) -> MemoryWorker:
        assert reservation.has_room(), "launched without room"
        worker = MemoryWorker()
        self.lives.setdefault(f"{role.value}-{index}", []).append(worker)
        return worker

    def __getitem__(self, name: str) -> MemoryWorker:
        return self.lives[name][-1]
