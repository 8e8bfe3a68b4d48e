"""How KV blocks cross between workers: the one seam between hand-off logic and transport.

`nixl_transfer` moves bytes over NIXL; `memory_transfer` moves them inside one process, on command,
for tests. Decode READs; nobody writes into another process's memory. Callers own the policy
(deadlines, fence, quarantine): a transfer only starts READs and says how they went.

Threading: every method may be called from any one thread at a time; the NIXL implementation
hands work to a thread of its own, so no method here but `close` blocks on bytes or on a peer.
(`KVExporter.checksums` computes in the caller's thread.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hocket.telemetry import GAUGE


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """A registered block pool and its epoch words, as a peer needs them to read it.

    Block b lies at `base_address + b * block_bytes`; slot s has its uint64 epoch word at
    `epoch_address + 8 * s`, always in host memory. All addresses are the owner's.
    """

    agent: str
    agent_metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int
    memory: str
    epoch_address: int
    num_slots: int


class ReadState(Enum):
    """Where a READ stands. All but IN_PROGRESS are final; after any of those, no more bytes land.

    CORRUPT: all bytes landed, and they are not those that were announced: a checksum differs.
    FENCED: `rebuild` destroyed the agent under the READ. Nothing is known to be wrong with the
    peer, so the same READ may be started again.
    """

    IN_PROGRESS = "in progress"
    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a READ stands now. `error` is set when FAILED or CORRUPT, `epoch` when DONE or CORRUPT.
    `moves` grows while IN_PROGRESS, whenever a part of it has landed or of a READ that goes before
    it on the same way; a transfer that does not know leaves it at 0.

    Look at the epoch first: an owner that took its blocks back explains any bytes.
    """

    state: ReadState
    error: str = ""
    epoch: int | None = None
    moves: int = 0


@dataclass(frozen=True, slots=True)
class ReadId:
    """Names a READ that was started; unique for the life of the transfer."""

    number: int


@dataclass(slots=True)
class TransferCounters:
    """What an importer counts by itself, since the start of the process, for metrics. (How READs
    ended, their owner counts.)

    `refused_reads` failed because their transport is not the required one. `downgraded_peers`
    were read over TCP although this host has RDMA devices. `faults` are READs that went wrong on
    purpose; `faults_on` is 1 where that can happen.
    """

    refused_reads: int = 0
    downgraded_peers: int = 0
    faults: int = 0
    faults_on: int = field(default=0, metadata=GAUGE)


class BlockBytes(Protocol):
    """The bytes of a pool's own blocks, wherever they lie."""

    def read(self, block: int) -> NDArray[np.uint8]:
        """Its bytes, [block_bytes]: a view that changes with the block, or a copy where the host
        can't address them. Not to be written to."""
        ...

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Replaces its bytes, [block_bytes]."""
        ...


class KVExporter(Protocol):
    """The side that owns blocks and lets peers read them."""

    def describe(self) -> PoolDescription:
        """What a peer needs to read this pool. Constant for the exporter's life."""
        ...

    def slot_epoch(self, slot: int) -> int:
        """The slot's epoch word now."""
        ...

    def bump_slot_epoch(self, slot: int) -> int:
        """Raise the slot's epoch by one, before its blocks go to anyone else; returns the new
        value. Epochs of a slot never repeat."""
        ...

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """XXH3 (64 bits) of each block's bytes as they are now: to announce with finished blocks.
        Costs a pass over the bytes; a GPU's blocks are copied to the host for it."""
        ...

    def close(self) -> None:
        """Destroy the agent. Peers' READs fail from here on. Idempotent."""
        ...


class KVImporter(Protocol):
    """The side that reads peers' blocks into its own pool."""

    @property
    def counters(self) -> TransferCounters:
        """What it counts by itself; read from any thread."""
        ...

    def read_blocks(
        self,
        peer: PoolDescription,
        slot: int,
        remote_blocks: list[int],
        local_blocks: list[int],
        checksums: Sequence[int] = (),
    ) -> ReadId:
        """Start one fenced READ of `remote_blocks[i]` into `local_blocks[i]` (same length, not
        empty): first the blocks; then, posted only after their completion was polled (lanes are
        unordered), the slot's epoch word. DONE brings the epoch as it was after the bytes. With
        `checksums`, one per block, DONE also means that every block's bytes have them; else the
        READ ends as CORRUPT.

        Connects to the peer first when needed. Errors are reported by `poll`, never raised.
        The caller must not give a local block to anyone before `poll` says that the READ ended,
        and must not use the bytes unless the epoch is the one it was promised."""
        ...

    def poll(self, read: ReadId) -> ReadResult:
        """How the READ stands. A final result is forgotten once it was returned."""
        ...

    def notify(self, on_end: Callable[[], None]) -> None:
        """From now on calls `on_end`, from any thread, after each READ's end can be polled, so
        that nobody has to poll before."""
        ...

    def transport(self) -> str:
        """What moves blocks, as the transport itself says: "cma", "tcp", "rc_mlx5", "memory";
        several joined by "+"; "unknown" without evidence; "" before any block was read."""
        ...

    def forget_peer(self, agent: str) -> None:
        """Drop a peer that is gone or was replaced. READs in flight stay pollable."""
        ...

    def rebuild(self) -> None:
        """Start to destroy the import agent and build a new one: the fence for READs that never
        end. Every READ in flight ends as FENCED once the old agent is gone, unless it ended by
        itself before; new READs wait for the new agent."""
        ...

    def close(self) -> None:
        """Destroy the agent and end the thread. READs in flight are fenced. Idempotent."""
        ...
