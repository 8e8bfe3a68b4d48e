"""Real NIXL agents inside the test's process, joined over TCP on loopback, on command.

The twin of `hocket.kv.memory_transfer`, with the same words. A READ that a table starts is held
back; `copy` and `deliver` then really READ its blocks, and the epoch that DONE brings is the one
that NIXL read after them. `fail` and `fence` end a READ that never left, and one that nobody
delivers hangs. Held back, a READ lands when the scenario wants it, say after a cancel: what an
asynchronous transport does now and then happens here every time.

UCX must have been told to use nothing but TCP before this process loads it; `nixl_process.py`
sees to that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hocket.kv.checksum import find_damage
from hocket.kv.nixl_agent import NixlOptions, RegisteredPool
from hocket.kv.nixl_transfer import NixlExporter, NixlImporter
from hocket.kv.transfer import (
    BlockBytes,
    PoolDescription,
    ReadId,
    ReadResult,
    ReadState,
    TransferCounters,
)

_OPTIONS = NixlOptions(tls="tcp")
# NIXL has no timeouts; a READ between two live agents of one process takes a millisecond.
_STUCK_AFTER_S = 20.0

_IN_PROGRESS = ReadResult(ReadState.IN_PROGRESS)
_FENCED = ReadResult(ReadState.FENCED)


@dataclass(slots=True)
class HeldRead:
    """A READ on its way; `num_copied` of its blocks have landed."""

    id: ReadId
    importer: HeldImporter
    peer: PoolDescription
    slot: int
    remote_blocks: list[int]
    local_blocks: list[int]
    checksums: Sequence[int]
    num_copied: int = 0
    result: ReadResult = field(default=_IN_PROGRESS)


class Blocks:
    """Registered memory, one row of bytes per block; `extra` rows lie behind the pool's."""

    def __init__(self, pool: Any, extra: int = 0) -> None:
        """`pool`: the first bytes of every block, or a torch cache's rows (`pool.storage`)."""
        if isinstance(pool, list):
            rows = [np.frombuffer(block, np.uint8) for block in pool]
            self._rows = np.stack(rows + [np.zeros_like(rows[0])] * extra)
        else:
            self._rows = pool.storage.numpy()
        self._num_blocks = len(pool)

    @property
    def registered(self) -> RegisteredPool:
        num_rows, block_bytes = self._rows.shape
        return RegisteredPool(self._rows.ctypes.data, block_bytes, num_rows)

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, block: int) -> bytes:
        return self._rows[block].tobytes()

    def __setitem__(self, block: int | slice, content: bytes | Sequence[bytes]) -> None:
        if isinstance(block, slice):
            for i, row in zip(range(*block.indices(len(self))), content, strict=True):
                self[i] = row
        else:
            self._rows[block] = np.frombuffer(content, np.uint8)


class NixlFabric:
    """The READs in flight between the exporters and importers of one process."""

    def __init__(self, *, is_automatic: bool = True) -> None:
        self.is_automatic = is_automatic
        self.reads: list[HeldRead] = []
        self._exporters: dict[str, HeldExporter] = {}
        # Memory that some agent may still know stays mapped.
        self._memory: list[Blocks] = []
        self._num_reads = 0

    def add_memory(self, blocks: Blocks) -> None:
        self._memory.append(blocks)

    def add_exporter(self, exporter: HeldExporter) -> None:
        self._exporters[exporter.describe().agent] = exporter

    def remove_exporter(self, agent: str) -> None:
        self._exporters.pop(agent, None)
        for read in [r for r in self.reads if r.peer.agent == agent]:
            self.fail(read)

    def next_read_id(self) -> ReadId:
        self._num_reads += 1
        return ReadId(self._num_reads)

    def post(self, read: HeldRead) -> None:
        self.reads.append(read)
        if read.peer.agent not in self._exporters:
            self.fail(read, f"no agent {read.peer.agent}")

    def copy(self, read: HeldRead, num_blocks: int | None = None) -> None:
        """READs the next `num_blocks` blocks (by default all the rest) and forgets the epoch that
        came with them: the READ as a whole stays in flight."""
        end = len(read.remote_blocks) if num_blocks is None else read.num_copied + num_blocks
        if end > read.num_copied:
            result = read.importer.travel(read, end)
            assert result.state in (ReadState.DONE, ReadState.CORRUPT), result

    def deliver(self, read: HeldRead) -> None:
        """READs the rest and reports what NIXL says of it."""
        if read.num_copied == len(read.remote_blocks):
            self.complete(read)
        else:
            self._end(read, read.importer.travel(read, len(read.remote_blocks)))

    def complete(self, read: HeldRead) -> None:
        """READs the epoch and reports DONE, or CORRUPT, whatever has landed."""
        self._end(read, read.importer.read_epoch(read))

    def fail(self, read: HeldRead, error: str = "remote disconnected") -> None:
        self._end(read, ReadResult(ReadState.FAILED, error))

    def fence(self, read: HeldRead) -> None:
        self._end(read, _FENCED)

    def _end(self, read: HeldRead, result: ReadResult) -> None:
        self.reads.remove(read)
        read.result = result
        read.importer.on_end()


class HeldExporter:
    """A NIXL exporter whose pool is read and written as `pool[block]`."""

    def __init__(self, fabric: NixlFabric, pool: Any, num_slots: int) -> None:
        self.pool = Blocks(pool)
        self._fabric = fabric
        self._nixl = NixlExporter(self.pool.registered, num_slots, _OPTIONS)
        fabric.add_memory(self.pool)
        fabric.add_exporter(self)

    def describe(self) -> PoolDescription:
        return self._nixl.describe()

    def slot_epoch(self, slot: int) -> int:
        return self._nixl.slot_epoch(slot)

    def bump_slot_epoch(self, slot: int) -> int:
        return self._nixl.bump_slot_epoch(slot)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return self._nixl.checksums(blocks)

    def close(self) -> None:
        """As if its process were killed."""
        self._fabric.remove_exporter(self.describe().agent)
        self._nixl.close()


class HeldImporter:
    """A NIXL importer that holds its READs back."""

    def __init__(self, fabric: NixlFabric, pool: Any) -> None:
        self.pool = Blocks(pool, extra=1)
        self.num_rebuilds = 0
        self.on_end: Callable[[], None] = lambda: None
        self.forgotten: list[str] = []
        self._fabric = fabric
        self._reads: dict[ReadId, HeldRead] = {}
        self._news = threading.Event()
        fabric.add_memory(self.pool)
        self._nixl = NixlImporter(self.pool.registered, _OPTIONS)
        self._nixl.notify(self._news.set)

    @property
    def blocks(self) -> BlockBytes:
        return self._nixl.blocks

    @property
    def counters(self) -> TransferCounters:
        return self._nixl.counters

    def read_blocks(
        self,
        peer: PoolDescription,
        slot: int,
        remote_blocks: list[int],
        local_blocks: list[int],
        checksums: Sequence[int] = (),
    ) -> ReadId:
        number = self._fabric.next_read_id()
        remote, local = list(remote_blocks), list(local_blocks)
        read = HeldRead(number, self, peer, slot, remote, local, tuple(checksums))
        self._reads[number] = read
        self._fabric.post(read)
        if self._fabric.is_automatic:
            self.on_end()
        return number

    def poll(self, read: ReadId) -> ReadResult:
        held = self._reads[read]
        if held.result.state is ReadState.IN_PROGRESS and self._fabric.is_automatic:
            self._fabric.deliver(held)
        if held.result.state is not ReadState.IN_PROGRESS:
            del self._reads[read]
        return held.result

    def travel(self, read: HeldRead, end: int) -> ReadResult:
        """Really READs the blocks from the first that has not landed up to `end`."""
        part = slice(read.num_copied, end)
        read.num_copied = end
        return self._read(read, part)

    def read_epoch(self, read: HeldRead) -> ReadResult:
        """Really READs the epoch: a fenced READ of one block, which lands behind the pool."""
        behind = replace(read, local_blocks=[len(self.pool)], checksums=())
        result = self._read(behind, slice(1))
        damage = find_damage(self.blocks, read.local_blocks, read.checksums)
        return replace(result, state=ReadState.CORRUPT, error=damage) if damage else result

    def _read(self, read: HeldRead, part: slice) -> ReadResult:
        blocks = read.remote_blocks[part], read.local_blocks[part]
        number = self._nixl.read_blocks(read.peer, read.slot, *blocks, read.checksums[part])
        end = time.monotonic() + _STUCK_AFTER_S
        while (result := self._nixl.poll(number)).state is ReadState.IN_PROGRESS:
            assert time.monotonic() < end, f"{read} is stuck in NIXL"
            self._news.wait(_STUCK_AFTER_S)
            self._news.clear()
        return result

    def notify_landed(self, on_landed: Callable[[list[int]], None]) -> None:
        self._nixl.notify_landed(on_landed)

    def notify(self, on_end: Callable[[], None]) -> None:
        self.on_end = on_end

    def transport(self) -> str:
        return self._nixl.transport()

    def forget_peer(self, agent: str) -> None:
        self.forgotten.append(agent)
        self._nixl.forget_peer(agent)

    def rebuild(self) -> None:
        self.num_rebuilds += 1
        self._nixl.rebuild()
        self._fence_all()

    def close(self) -> None:
        self._fence_all()
        self._nixl.close()

    def _fence_all(self) -> None:
        for read in [r for r in self._fabric.reads if r.importer is self]:
            self._fabric.fence(read)
