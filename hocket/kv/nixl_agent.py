"""One NIXL agent over UCX: a pool registered for life, peers, READs. Used from one thread.

This is the only file that speaks to NIXL, through its bindings: the wrapper on top of them lets an
idle agent burn a core (no progress delay) and prints. `nixl_transfer` builds the exporter and the
importer on it. NIXL has no timeouts and can't stop a READ; only destroying the agent ends one.
Its errors are exceptions, from any call; here they leave as `NixlError`, with the call's name.

Over TCP, UCX (1.23) emulates a READ: it asks the owner's process, which answers by messages of at
most TCP_SEGMENT_BYTES. When the reader dies while its owner has more than one message to send to
it, UCX aborts the *owner*. So a READ that may travel over TCP is cut into parts of one message
each (`cut_for_tcp`), and the caller has one of them in flight per owner.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.environment import TCP_SEGMENT_BYTES
from hocket.errors import ConfigError
from hocket.kv.transfer import PoolDescription
from hocket.kv.ucx_log import MAX_AGENT_NAME

# The progress thread's pause. 0, the default, keeps a core busy; this costs about 1 % of one.
_PROGRESS_DELAY_US = 1000
# Room for the header in a TCP message.
_LARGEST_PIECE_BYTES = TCP_SEGMENT_BYTES - 4096
_VARIANTS = {"12": "nixl_cu12", "13": "nixl_cu13"}


class NixlError(Exception):
    """A call into NIXL failed: the call, and what NIXL says."""


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How NIXL is used in this process.

    `cuda_version` is torch's ("12.8", "13.0"; "" without CUDA) and picks the wheel. `tls` is what
    UCX was told: "auto", or "tcp" for nothing but TCP. `ucx_log` is UCX_LOG_FILE as UCX was given
    it (%p stands for the process id): with UCX_PROTO_INFO=y it holds the evidence of the transport
    found (`hocket.kv.ucx_log`); "" without. `require` is `transfer.require`: "rdma" fails READs
    that are found to come by anything else (`hocket.kv.transport`).
    """

    cuda_version: str = ""
    tls: str = "auto"
    ucx_log: str = ""
    require: str = "any"
    has_rdma_devices: bool = False


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """Memory for blocks: block b at `base_address + b * block_bytes`, in "cpu" or "cuda" memory.

    It stays mapped for the life of the process: a peer that still has its description and reads
    unmapped memory crashes this process on some transports.
    """

    base_address: int
    block_bytes: int
    num_blocks: int
    memory: str = "cpu"
    device: int = 0


@dataclass(frozen=True, slots=True)
class _PreparedPool:
    """Handles of a pool's prepared lists: of its blocks, and of their pieces."""

    blocks: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Link:
    """A peer whose memory is prepared for READs: handles of its pool and of its epoch words."""

    agent: str
    pool: _PreparedPool
    epochs: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one posted READ moves: indices of blocks, or of pieces of blocks, on both sides."""

    remote: list[int]
    local: list[int]
    in_pieces: bool


@dataclass(frozen=True, slots=True)
class Fence:
    """A posted READ of epochs: that of `slots[i]` into our `words[i]`."""

    slots: list[int]
    words: list[int]


def new_agent_name(prefix: str) -> str:
    """A name that no other agent has, also not this process's next incarnation."""
    return f"{prefix}-{uuid.uuid4().hex}"[:MAX_AGENT_NAME]


def pieces_per_block(block_bytes: int) -> int:
    """Into how many equal pieces a block is cut so that each fits a TCP message.

    >>> pieces_per_block(64 * 1024), pieces_per_block(61 * 64 * 576 * 2)
    (1, 9)
    """
    num_pieces = -(-block_bytes // _LARGEST_PIECE_BYTES)
    while block_bytes % num_pieces:
        num_pieces += 1
    return num_pieces


def cut_for_tcp(remote: list[int], local: list[int], block_bytes: int) -> list[Part]:
    """Parts that are answered by one TCP message each: pieces of blocks, or runs of blocks that
    are neighbours on both sides (NIXL makes one of them).

    >>> [part.local for part in cut_for_tcp([4, 5, 9], [0, 1, 2], 64 * 1024)]
    [[0, 1], [2]]
    """
    num_pieces = pieces_per_block(block_bytes)
    pairs = list(zip(remote, local, strict=True))
    if num_pieces > 1:
        return [
            Part([theirs * num_pieces + i], [ours * num_pieces + i], in_pieces=True)
            for theirs, ours in pairs
            for i in range(num_pieces)
        ]
    most_blocks = _LARGEST_PIECE_BYTES // block_bytes
    parts: list[Part] = []
    for theirs, ours in pairs:
        run = parts[-1] if parts else Part([], [], in_pieces=True)
        follows = run.remote[-1:] == [theirs - 1] and run.local[-1:] == [ours - 1]
        if not follows or len(run.local) == most_blocks:
            run = Part([], [], in_pieces=True)
            parts.append(run)
        run.remote.append(theirs)
        run.local.append(ours)
    return parts


def load_bindings(cuda_version: str) -> Any:
    """NIXL's bindings, of the wheel built for this CUDA if it is installed, else for CUDA 12.

    Raises:
        ConfigError: no such wheel is installed, or another variant is loaded already.
    """
    wanted = _VARIANTS.get(cuda_version.split(".")[0], "nixl_cu12")
    if importlib.util.find_spec(wanted) is None:
        wanted = "nixl_cu12"
    other = next((v for v in _VARIANTS.values() if v != wanted and v in sys.modules), None)
    if other is not None:
        raise ConfigError(f"{other} is loaded already; {wanted} can't be loaded beside it.")
    try:
        return importlib.import_module(f"{wanted}._bindings")
    except ImportError as error:
        raise ConfigError(
            f"transfer.backend is 'nixl', but {wanted} can't be loaded ({error}). Install it "
            f"(`pip install {wanted.replace('_', '-')}`; Linux only).",
            field="transfer.backend",
        ) from error


class NixlAgent:
    """An agent with one pool and one array of uint64 words registered. `close` destroys it."""

    def __init__(
        self, bindings: Any, name: str, pool: RegisteredPool, words: NDArray[np.uint64]
    ) -> None:
        """Takes 30 ms, the first one of a process 0.5 s. Raises NixlError."""
        self.name = name
        self._nixl = bindings
        self._segments = {"cpu": bindings.DRAM_SEG, "cuda": bindings.VRAM_SEG}
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        self._agent: Any = self._call(bindings.nixlAgent, name, config)
        self._backends = [self._call(self._agent.createBackend, "UCX", {})]
        self._num_pieces = pieces_per_block(pool.block_bytes)
        words_address = words.ctypes.data
        self._register(
            pool.memory, pool.base_address, pool.num_blocks * pool.block_bytes, pool.device
        )
        self._register("cpu", words_address, words.nbytes, 0)
        local = bindings.NIXL_INIT_AGENT
        self._pool = self._prepare_pool(local, pool)
        self._words = self._prepare(local, "cpu", (words_address, 8, 0), len(words))

    def metadata(self) -> bytes:
        """What a peer needs to connect to this agent."""
        return self._call(self._agent.getLocalMD)

    def connect(self, peer: PoolDescription) -> Link:
        """Loads a peer's metadata and prepares its whole pool. Raises NixlError."""
        if peer.memory not in self._segments:
            raise NixlError(f"the peer's memory is {peer.memory!r}; known: cpu, cuda")
        agent: str = self._call(self._agent.loadRemoteMD, peer.agent_metadata).decode()
        if agent != peer.agent:
            raise NixlError(f"the peer calls itself {peer.agent}, its metadata {agent}")
        pool = RegisteredPool(
            peer.base_address, peer.block_bytes, peer.num_blocks, peer.memory, peer.device
        )
        return Link(
            agent,
            pool=self._prepare_pool(agent, pool),
            epochs=self._prepare(agent, "cpu", (peer.epoch_address, 8, 0), peer.num_slots),
        )

    def disconnect(self, link: Link) -> None:
        """Forgets a peer that has no READ in flight. Raises NixlError."""
        for handle in (link.pool.blocks, link.pool.pieces, link.epochs):
            self._call(self._agent.releasedDlistH, handle)
        self._call(self._agent.invalidateRemoteMD, link.agent)

    def read_part(self, link: Link, part: Part) -> int:
        """Posts a READ of blocks or pieces and returns its handle. Neighbours that are contiguous
        on both sides travel as one. Copies within a host happen in this call."""
        ours = self._pool.pieces if part.in_pieces else self._pool.blocks
        theirs = link.pool.pieces if part.in_pieces else link.pool.blocks
        return self._post((ours, part.local), (theirs, part.remote))

    def read_epochs(self, link: Link, fence: Fence) -> int:
        """Posts a READ of slots' epochs into our words and returns its handle."""
        return self._post((self._words, fence.words), (link.epochs, fence.slots))

    def is_done(self, handle: int) -> bool:
        """Whether a posted READ has ended well. Raises NixlError when it ended badly."""
        return self._is_done(self._call(self._agent.getXferStatus, handle))

    def release(self, handle: int) -> None:
        """Frees the handle of a READ that ended. (It would not stop one in flight.)"""
        self._call(self._agent.releaseXferReq, handle)

    def close(self) -> None:
        """Destroys the agent: no READ of it writes any more once this returned (about 0.2 s).
        Handles of READs in flight are gone with it."""
        self._agent = None

    def _register(self, memory: str, address: int, size: int, device: int) -> None:
        regions = self._nixl.nixlRegDList(self._segments[memory], [(address, size, device, "")])
        self._call(self._agent.registerMem, regions, self._backends)

    def _prepare_pool(self, agent: str, pool: RegisteredPool) -> _PreparedPool:
        start, count = pool.base_address, pool.num_blocks
        piece_bytes = pool.block_bytes // self._num_pieces
        return _PreparedPool(
            self._prepare(agent, pool.memory, (start, pool.block_bytes, pool.device), count),
            self._prepare(
                agent, pool.memory, (start, piece_bytes, pool.device), count * self._num_pieces
            ),
        )

    def _prepare(self, agent: str, memory: str, start: tuple[int, int, int], count: int) -> int:
        """A prepared list of `count` equal regions, one after the other; `start` is (address,
        bytes, device) of the first."""
        address, size, device = start
        regions = np.array([[address, size, device, size, count]], dtype=np.uint64)
        prepare = self._agent.prepXferDlist
        return self._call(prepare, agent, self._segments[memory], regions, self._backends)

    def _post(self, ours: tuple[int, list[int]], theirs: tuple[int, list[int]]) -> int:
        """Posts a READ of `theirs` into `ours`, each a prepared list and indices into it."""
        handle = self._call(
            self._agent.makeXferReq,
            self._nixl.NIXL_READ,
            ours[0],
            np.array(ours[1], dtype=np.int32),
            theirs[0],
            np.array(theirs[1], dtype=np.int32),
            "",
            self._backends,
        )
        try:
            self._is_done(self._call(self._agent.postXferReq, handle))
        except NixlError:
            self.release(handle)
            raise
        return handle

    def _is_done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise NixlError(f"a READ ended with {status}")

    @staticmethod
    def _call(function: Any, *arguments: Any) -> Any:
        """NIXL's exceptions share no base of their own, so everything it raises is caught."""
        try:
            return function(*arguments)
        except Exception as error:
            name = getattr(function, "__name__", "call")
            raise NixlError(f"{name}: {type(error).__name__}: {error}") from error
