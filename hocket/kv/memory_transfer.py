"""KV transfer inside one process, on command: the transport of tests and of one-process set-ups.

`MemoryFabric` stands for the network: it knows every exporter by its agent's name and holds the
READs in flight. With `is_automatic` a READ is delivered when it is polled; without it, a test says
what happens to each: `copy` (all or some of its blocks), `deliver` (the rest, then the epoch),
`complete` without moving a byte, `fail`, or nothing at all (a hung peer). A READ that nobody ended
can still be delivered after its request was cancelled, which is what the quarantine is for.
No threads, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.kv.checksum import checksums_of, find_damage
from hocket.kv.transfer import (
    PoolDescription,
    ReadId,
    ReadResult,
    ReadState,
    TransferCounters,
)

_IN_PROGRESS = ReadResult(ReadState.IN_PROGRESS)
_FENCED = ReadResult(ReadState.FENCED)


@dataclass(slots=True)
class MemoryRead:
    """A READ on its way; `num_copied` of its blocks have landed."""

    id: ReadId
    importer: MemoryImporter
    peer: PoolDescription
    slot: int
    remote_blocks: list[int]
    local_blocks: list[int]
    checksums: Sequence[int] = ()
    num_copied: int = 0
    result: ReadResult = field(default=_IN_PROGRESS)


class MemoryFabric:
    """Connects exporters and importers of one process."""

    def __init__(self, *, is_automatic: bool = True) -> None:
        """`is_automatic` may be changed at any time."""
        self.is_automatic = is_automatic
        self.reads: list[MemoryRead] = []
        self._exporters: dict[str, MemoryExporter] = {}
        self._num_agents = 0
        self._num_reads = 0

    def add_exporter(self, exporter: MemoryExporter) -> str:
        """Makes an exporter reachable; returns its agent's name, new for every exporter."""
        self._num_agents += 1
        agent = f"memory-{self._num_agents}"
        self._exporters[agent] = exporter
        return agent

    def remove_exporter(self, agent: str) -> None:
        """The peer is gone, as if its process were killed: READs in flight from it fail."""
        self._exporters.pop(agent, None)
        for read in [r for r in self.reads if r.peer.agent == agent]:
            self.fail(read)

    def next_read_id(self) -> ReadId:
        self._num_reads += 1
        return ReadId(self._num_reads)

    def post(self, read: MemoryRead) -> None:
        """Puts a READ in flight; one for a peer that is not there fails."""
        self.reads.append(read)
        if read.peer.agent not in self._exporters:
            self.fail(read, f"no agent {read.peer.agent}")

    def copy(self, read: MemoryRead, num_blocks: int | None = None) -> None:
        """Lands the next `num_blocks` blocks (by default all the rest), as they are at the owner
        now. The READ stays in flight."""
        owner = self._exporters[read.peer.agent]
        end = len(read.remote_blocks) if num_blocks is None else read.num_copied + num_blocks
        for i in range(read.num_copied, end):
            read.importer.pool[read.local_blocks[i]] = owner.pool[read.remote_blocks[i]]
        read.num_copied = end

    def deliver(self, read: MemoryRead) -> None:
        """Lands the rest, then reads the epoch, as it is now, and reports DONE, or CORRUPT."""
        self.copy(read)
        self.complete(read)

    def complete(self, read: MemoryRead) -> None:
        """Reads the epoch, as it is now, and reports DONE, or CORRUPT, whatever has landed."""
        epoch = self._exporters[read.peer.agent].slot_epoch(read.slot)
        self._end(read, read.importer.verify(read, epoch))

    def fail(self, read: MemoryRead, error: str = "remote disconnected") -> None:
        """Reports FAILED; what landed before stays."""
        self._end(read, ReadResult(ReadState.FAILED, error))

    def fence(self, read: MemoryRead) -> None:
        """Reports FENCED."""
        self._end(read, _FENCED)

    def _end(self, read: MemoryRead, result: ReadResult) -> None:
        self.reads.remove(read)
        read.result = result
        read.importer.on_end()


class MemoryBlocks:
    """`BlockBytes` of a pool that is a list of `bytes`, or of rows of an array on the host."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def read(self, block: int) -> NDArray[np.uint8]:
        row = self._pool[block]
        return np.frombuffer(row, np.uint8) if isinstance(row, bytes) else np.asarray(row)

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        row = self._pool[block]
        if isinstance(row, bytes):
            self._pool[block] = data.tobytes()
        else:
            np.asarray(row)[:] = data


class MemoryExporter:
    """A `KVExporter` whose pool is `pool[block]`: the bytes of one block each."""

    def __init__(
        self, fabric: MemoryFabric, pool: list[bytes], num_slots: int, first_epoch: int = 1
    ) -> None:
        self.pool = pool
        self._fabric = fabric
        self._epochs = [first_epoch] * num_slots
        self._agent = fabric.add_exporter(self)

    def describe(self) -> PoolDescription:
        return PoolDescription(
            agent=self._agent,
            agent_metadata=b"",
            base_address=0,
            block_bytes=len(self.pool[0]),
            num_blocks=len(self.pool),
            device=0,
            memory="cpu",
            epoch_address=0,
            num_slots=len(self._epochs),
        )

    def slot_epoch(self, slot: int) -> int:
        return self._epochs[slot]

    def bump_slot_epoch(self, slot: int) -> int:
        self._epochs[slot] += 1
        return self._epochs[slot]

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return checksums_of(MemoryBlocks(self.pool), blocks)

    def close(self) -> None:
        self._fabric.remove_exporter(self._agent)


class MemoryImporter:
    """A `KVImporter` into `pool[block]`."""

    def __init__(self, fabric: MemoryFabric, pool: list[bytes]) -> None:
        self.pool = pool
        self.blocks = MemoryBlocks(pool)
        self._counters = TransferCounters()
        self.num_rebuilds = 0
        self.on_end: Callable[[], None] = lambda: None
        self.on_landed: Callable[[list[int]], None] = lambda _: None
        self.forgotten: list[str] = []
        self._fabric = fabric
        self._reads: dict[ReadId, MemoryRead] = {}
        self._has_read = False

    @property
    def counters(self) -> TransferCounters:
        return self._counters

    def read_blocks(
        self,
        peer: PoolDescription,
        slot: int,
        remote_blocks: list[int],
        local_blocks: list[int],
        checksums: Sequence[int] = (),
    ) -> ReadId:
        assert remote_blocks
        assert len(remote_blocks) == len(local_blocks), (remote_blocks, local_blocks)
        number = self._fabric.next_read_id()
        remote, local = list(remote_blocks), list(local_blocks)
        read = MemoryRead(number, self, peer, slot, remote, local, tuple(checksums))
        self._reads[number] = read
        self._fabric.post(read)
        if self._fabric.is_automatic:
            self.on_end()
        return number

    def poll(self, read: ReadId) -> ReadResult:
        posted = self._reads[read]
        if posted.result.state is ReadState.IN_PROGRESS and self._fabric.is_automatic:
            self._fabric.deliver(posted)
        if posted.result.state is not ReadState.IN_PROGRESS:
            del self._reads[read]
            self._has_read = self._has_read or posted.result.state is ReadState.DONE
        return posted.result

    def notify(self, on_end: Callable[[], None]) -> None:
        self.on_end = on_end

    def notify_landed(self, on_landed: Callable[[list[int]], None]) -> None:
        """As `NixlImporter`'s."""
        self.on_landed = on_landed

    def verify(self, read: MemoryRead, epoch: int) -> ReadResult:
        """How a READ ends whose epoch was read."""
        self.on_landed(read.local_blocks)
        damage = find_damage(self.blocks, read.local_blocks, read.checksums)
        state = ReadState.CORRUPT if damage else ReadState.DONE
        return ReadResult(state, damage, epoch)

    def transport(self) -> str:
        return "memory" if self._has_read else ""

    def forget_peer(self, agent: str) -> None:
        self.forgotten.append(agent)

    def rebuild(self) -> None:
        self.num_rebuilds += 1
        for read in [r for r in self._fabric.reads if r.importer is self]:
            self._fabric.fence(read)

    def close(self) -> None:
        for read in [r for r in self._fabric.reads if r.importer is self]:
            self._fabric.fence(read)
