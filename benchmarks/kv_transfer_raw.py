"""Raw NIXL for `kv_transfer.py`: what there is to be measured against, through its bare bindings.

Prepared lists over the whole pool on both sides, one transfer per call, polled without a pause.
No fence, no thread of its own, no bookkeeping. The progress thread pauses as Hocket's does: without
a pause every agent keeps a core busy, and on few cores that slows all that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.kv.nixl_agent import Part, RegisteredPool, pieces_per_block

PROGRESS_DELAY_US = 1000


@dataclass(frozen=True)
class RawPeer:
    """The owner's prepared lists: of its blocks, and of their pieces."""

    blocks: int
    pieces: int


class RawAgent:
    """An agent with one pool in host memory registered."""

    def __init__(self, bindings: Any, name: str, pool: RegisteredPool) -> None:
        self._nixl = bindings
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        self._agent = bindings.nixlAgent(name, config)
        self._backends = [self._agent.createBackend("UCX", {})]
        self._num_pieces = pieces_per_block(pool.block_bytes)
        whole = (pool.base_address, pool.num_blocks * pool.block_bytes, 0, "")
        regions = bindings.nixlRegDList(bindings.DRAM_SEG, [whole])
        self._agent.registerMem(regions, self._backends)
        self._ours = self._prepare(bindings.NIXL_INIT_AGENT, pool)

    def metadata(self) -> bytes:
        return self._agent.getLocalMD()

    def connect(self, metadata: bytes, pool: RegisteredPool) -> RawPeer:
        """Loads the owner's metadata and prepares its pool."""
        return self._prepare(self._agent.loadRemoteMD(metadata).decode(), pool)

    def read(self, peer: RawPeer, remote: list[int], local: list[int]) -> None:
        """One transfer of these blocks; returns when it has ended."""
        self._read(peer.blocks, remote, self._ours.blocks, local)

    def read_parts(self, peer: RawPeer, parts: list[Part]) -> None:
        """One transfer per part, one after the other: the one-message rule (see
        `hocket/kv/nixl_agent.py`)."""
        for part in parts:
            self._read(peer.pieces, part.remote, self._ours.pieces, part.local)

    def _prepare(self, agent: str, pool: RegisteredPool) -> RawPeer:
        lists: list[int] = []
        for num_pieces in (1, self._num_pieces):
            size = pool.block_bytes // num_pieces
            count = pool.num_blocks * num_pieces
            regions = np.array([[pool.base_address, size, 0, size, count]], dtype=np.uint64)
            segment = self._nixl.DRAM_SEG
            lists.append(self._agent.prepXferDlist(agent, segment, regions, self._backends))
        return RawPeer(*lists)

    def _read(self, theirs: int, remote: list[int], ours: int, local: list[int]) -> None:
        nixl, agent = self._nixl, self._agent
        handle = agent.makeXferReq(
            nixl.NIXL_READ,
            ours,
            np.array(local, dtype=np.int32),
            theirs,
            np.array(remote, dtype=np.int32),
            "",
            self._backends,
        )
        status = agent.postXferReq(handle)
        while status == nixl.NIXL_IN_PROG:
            status = agent.getXferStatus(handle)
        assert status == nixl.NIXL_SUCCESS, status
        agent.releaseXferReq(handle)
