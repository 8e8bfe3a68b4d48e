"""READs that go wrong on purpose: an importer in front of an importer, for tests ([faults]).

`FaultyImporter` decides for each READ whether and how it goes wrong, from a seed. The fault happens
to the real thing: the READ travels, and the bytes of the importer's own pool are damaged after they
landed and before checksums are looked at (`notify_landed`), so what finds it is what would find it
in earnest. It keeps a transfer's promises: once a READ has ended, none of its bytes land.

    fault       what becomes of the bytes that landed          how the READ ends
    corrupted   one of them is changed                         DONE, or CORRUPT by its checksum
    truncated   the last block is put back as it was before    DONE, or CORRUPT by its checksum
    dropped     the same; it lands late, after `delay_s`       FENCED by a rebuild, or never
    delayed     nothing                                        as it would, but not before `delay_s`
    failed      nothing                                        FAILED

Works in front of `MemoryImporter` and `NixlImporter`. Built by `hocket.execution.transfer_setup`,
and only when a share is above 0.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.kv.transfer import (
    BlockBytes,
    KVImporter,
    PoolDescription,
    ReadId,
    ReadResult,
    ReadState,
    TransferCounters,
)
from hocket.transfer_settings import FaultSettings

_logger = logging.getLogger(__name__)

_IN_PROGRESS = ReadResult(ReadState.IN_PROGRESS)
_FENCED = ReadResult(ReadState.FENCED)

CallLater = Callable[[float, Callable[[], None]], None]
"""`call_later(seconds, function)` calls it from any thread, about then."""


class DamageableImporter(KVImporter, Protocol):
    """An importer whose landed bytes can be reached before they are verified."""

    @property
    def blocks(self) -> BlockBytes: ...

    def notify_landed(self, on_landed: Callable[[list[int]], None]) -> None: ...


class Fault(Enum):
    """What goes wrong with a READ. The values are the keys of [faults]."""

    CORRUPTED = "corrupted"
    TRUNCATED = "truncated"
    DROPPED = "dropped"
    DELAYED = "delayed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Damage:
    """To be done to the bytes of one READ when they have landed. `before` is its last block as it
    was; `place` picks the byte to change, from 0 to 1."""

    fault: Fault
    before: NDArray[np.uint8]
    place: float
    generation: int


@dataclass(slots=True)
class _Dropped:
    """A dropped READ: it is fenced by a rebuild after `generation`, once its bytes have landed."""

    generation: int
    has_landed: bool = False


class FaultyImporter:
    """A `KVImporter` whose READs go wrong as `settings` says."""

    def __init__(
        self,
        importer: DamageableImporter,
        settings: FaultSettings,
        call_later: CallLater | None = None,
    ) -> None:
        """`call_later` may be handed in by tests; without it there is a thread for each call."""
        self._importer = importer
        self._settings = settings
        self._call_later = call_later or _on_a_timer
        self._chance = random.Random(settings.seed)
        self._on_end: Callable[[], None] = lambda: None
        # By the last local block: a block is the target of one READ at most.
        self._damages: dict[int, _Damage] = {}
        self._dropped: dict[ReadId, _Dropped] = {}
        self._delayed: set[ReadId] = set()
        self._failed: set[ReadId] = set()
        # Raised by every rebuild: what was dropped before does not land any more. The lock orders
        # late bytes, which land in a timer's thread, before the rebuild or not at all.
        self._generation = 0
        self._lock = threading.Lock()
        importer.notify_landed(self._do_damage)
        importer.counters.faults_on = 1
        _logger.warning("Faults are injected ([faults]): never in production. %s", settings)

    @property
    def counters(self) -> TransferCounters:
        return self._importer.counters

    def read_blocks(
        self,
        peer: PoolDescription,
        slot: int,
        remote_blocks: list[int],
        local_blocks: list[int],
        checksums: Sequence[int] = (),
    ) -> ReadId:
        fault, place, last = self._draw(), self._chance.random(), local_blocks[-1]
        # What an earlier READ left behind that failed before it landed.
        self._damages.pop(last, None)
        if fault in (Fault.CORRUPTED, Fault.TRUNCATED, Fault.DROPPED):
            before = self._importer.blocks.read(last).copy()
            self._damages[last] = _Damage(fault, before, place, self._generation)
        read = self._importer.read_blocks(peer, slot, remote_blocks, local_blocks, checksums)
        self._importer.counters.faults += fault is not None
        if fault is Fault.DROPPED:
            self._dropped[read] = _Dropped(self._generation)
        elif fault is Fault.FAILED:
            self._failed.add(read)
        elif fault is Fault.DELAYED:
            self._delayed.add(read)
            self._call_later(self._settings.delay_s, partial(self._let_go, read))
        return read

    def poll(self, read: ReadId) -> ReadResult:
        if read in self._delayed:
            return _IN_PROGRESS
        if read in self._dropped:
            return self._poll_dropped(read, self._dropped[read])
        result = self._importer.poll(read)
        if read in self._failed and result.state is not ReadState.IN_PROGRESS:
            self._failed.remove(read)
            if result.state in (ReadState.DONE, ReadState.CORRUPT):
                return ReadResult(ReadState.FAILED, "a fault was injected: remote disconnected")
        return result

    def notify(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._importer.notify(on_end)

    def transport(self) -> str:
        return self._importer.transport()

    def forget_peer(self, agent: str) -> None:
        self._importer.forget_peer(agent)

    def rebuild(self) -> None:
        self._fence_late_bytes()
        self._importer.rebuild()
        # Dropped READs that have landed are no longer the inner importer's to tell of.
        self._on_end()

    def close(self) -> None:
        self._fence_late_bytes()
        self._importer.close()

    def _draw(self) -> Fault | None:
        """What goes wrong with the next READ, if anything."""
        at = self._chance.random()
        for fault in Fault:
            at -= getattr(self._settings, fault.value)
            if at < 0:
                return fault
        return None

    def _poll_dropped(self, read: ReadId, dropped: _Dropped) -> ReadResult:
        """One that could not travel ends as it did; one that travelled, only by a rebuild."""
        if not dropped.has_landed:
            result = self._importer.poll(read)
            if result.state in (ReadState.FAILED, ReadState.FENCED):
                del self._dropped[read]
                return result
            dropped.has_landed = result.state is not ReadState.IN_PROGRESS
        if dropped.has_landed and dropped.generation < self._generation:
            del self._dropped[read]
            return _FENCED
        return _IN_PROGRESS

    def _let_go(self, read: ReadId) -> None:
        """The delay of a READ is over. In a timer's thread."""
        self._delayed.discard(read)
        self._on_end()

    def _do_damage(self, local_blocks: list[int]) -> None:
        """In the importer's thread: these blocks have landed and nobody has looked at them."""
        damage = self._damages.pop(local_blocks[-1], None)
        if damage is None:
            return
        blocks, last = self._importer.blocks, local_blocks[-1]
        if damage.fault is Fault.CORRUPTED:
            place = damage.place * len(local_blocks)
            block = local_blocks[int(place)]
            changed = blocks.read(block).copy()
            changed[int(place % 1.0 * len(changed))] ^= 0xFF
            blocks.write(block, changed)
            return
        landed = blocks.read(last).copy()
        blocks.write(last, damage.before)
        if damage.fault is Fault.DROPPED:
            late = partial(self._land_late, last, landed, damage.generation)
            self._call_later(self._settings.delay_s, late)

    def _land_late(self, block: int, landed: NDArray[np.uint8], generation: int) -> None:
        """In a timer's thread: a dropped READ's last block arrives, if no rebuild fenced it."""
        with self._lock:
            if generation == self._generation:
                self._importer.blocks.write(block, landed)

    def _fence_late_bytes(self) -> None:
        with self._lock:
            self._generation += 1


def _on_a_timer(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
