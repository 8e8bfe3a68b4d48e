"""KV transfer over NIXL: decode workers READ prefill workers' blocks.

A worker has one agent that exports, for life, and one that imports and may be rebuilt. The
exporter is passive: NIXL's progress thread serves the peers' READs. All calls of the importer's
agent come from a thread of its own, because copies within a host run inside the posting call; the
engine hands it READs and looks at results. Next: `hocket/kv/nixl_reads.py`, that thread.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hocket.errors import InternalError
from hocket.kv.checksum import checksums_of
from hocket.kv.nixl_agent import (
    NixlAgent,
    NixlOptions,
    RegisteredPool,
    load_bindings,
    new_agent_name,
)
from hocket.kv.nixl_batches import Close, Forget, Read, Rebuild
from hocket.kv.nixl_reads import ImportLoop
from hocket.kv.pool_bytes import blocks_of
from hocket.kv.transfer import (
    BlockBytes,
    PoolDescription,
    ReadId,
    ReadResult,
    ReadState,
    TransferCounters,
)

_logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0


class NixlExporter:
    """A `KVExporter`. Built and closed by one thread; the rest from any."""

    def __init__(self, pool: RegisteredPool, num_slots: int, options: NixlOptions) -> None:
        """Registers the pool and the epoch words. The pool stays mapped for the process's life.

        Raises:
            ConfigError: NIXL is not installed.
            NixlError: it does not work here.
        """
        # Epochs start anywhere, so that a reader of an earlier life finds none that it knows.
        start = secrets.randbits(62)
        self._epochs = np.full(num_slots, start, dtype=np.uint64)
        self._lock = threading.Lock()
        self._blocks = blocks_of(pool)
        bindings = load_bindings(options.cuda_version)
        self._agent: NixlAgent | None = NixlAgent(
            bindings, new_agent_name("exp"), pool, self._epochs
        )
        self._description = PoolDescription(
            agent=self._agent.name,
            agent_metadata=self._agent.metadata(),
            base_address=pool.base_address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            device=pool.device,
            memory=pool.memory,
            epoch_address=self._epochs.ctypes.data,
            num_slots=num_slots,
        )

    def describe(self) -> PoolDescription:
        return self._description

    def slot_epoch(self, slot: int) -> int:
        return int(self._epochs[slot])

    def bump_slot_epoch(self, slot: int) -> int:
        # Leaving the lock orders the new epoch before whatever is written into the blocks next.
        with self._lock:
            self._epochs[slot] += np.uint64(1)
            return int(self._epochs[slot])

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return checksums_of(self._blocks, blocks)

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class NixlImporter:
    """A `KVImporter`: the face that the engine thread sees. `ImportLoop` does the work."""

    def __init__(self, pool: RegisteredPool, options: NixlOptions) -> None:
        """Starts the thread and waits for its first agent.

        Raises:
            ConfigError: NIXL is not installed.
            NixlError: it does not work here.
        """
        self._pool = pool
        self._numbers = itertools.count(1)
        self._in_flight: dict[ReadId, Read] = {}
        self._loop = ImportLoop(load_bindings(options.cuda_version), pool, options)
        self._thread = threading.Thread(target=self._loop.run, name="kv-import", daemon=True)
        self._thread.start()
        error = self._loop.started.get()
        if error is not None:
            self._thread.join()
            raise error

    @property
    def blocks(self) -> BlockBytes:
        """The pool that it reads into."""
        return self._loop.blocks

    @property
    def counters(self) -> TransferCounters:
        return self._loop.counters

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
        assert 0 <= min(local_blocks) <= max(local_blocks) < self._pool.num_blocks, local_blocks
        id = ReadId(next(self._numbers))
        read = Read(id, peer, slot, list(remote_blocks), list(local_blocks), tuple(checksums))
        self._in_flight[id] = read
        self._loop.inbox.put(read)
        return id

    def poll(self, read: ReadId) -> ReadResult:
        """As the protocol says. Raises InternalError when the thread has died of a bug."""
        assert read in self._in_flight, read
        result = self._loop.results.pop(read, None)
        if result is None:
            if self._loop.crash is not None:
                raise InternalError("The KV import thread has died.") from self._loop.crash
            return ReadResult(ReadState.IN_PROGRESS, moves=self._in_flight[read].moves)
        del self._in_flight[read]
        return result

    def notify(self, on_end: Callable[[], None]) -> None:
        self._loop.on_end = on_end

    def notify_landed(self, on_landed: Callable[[list[int]], None]) -> None:
        """From now on calls `on_landed`, in the importer's thread, with the local blocks of each
        READ that has landed, before they are verified: where faults are injected."""
        self._loop.on_landed = on_landed

    def transport(self) -> str:
        return self._loop.transport

    def forget_peer(self, agent: str) -> None:
        self._loop.inbox.put(Forget(agent))

    def rebuild(self) -> None:
        self._loop.inbox.put(Rebuild())

    def close(self) -> None:
        self._loop.inbox.put(Close())
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.error("The KV import thread is stuck in a transfer and was left behind.")
