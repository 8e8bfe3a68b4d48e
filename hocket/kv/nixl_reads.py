"""The importer's thread: owns the import agent, the peers and the READs in flight.

Comes from `hocket/kv/nixl_transfer.py`, which puts commands into `inbox` and takes results out.
A READ is a chain of posts, one after the other: its parts, then the epoch word. Over RDMA, NVLink
or within a host it has one part; what may be TCP is cut, and such a peer is sent one post at a
time (`hocket/kv/nixl_agent.py` says why). Which it is, UCX's log says after the first READ.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.kv.nixl_agent import (
    Link,
    NixlAgent,
    NixlError,
    NixlOptions,
    Part,
    RegisteredPool,
    cut_for_tcp,
    new_agent_name,
)
from hocket.kv.transfer import PoolDescription, ReadId, ReadResult, ReadState
from hocket.kv.ucx_log import read_log_of_this_process, transports_in_log

_logger = logging.getLogger(__name__)

# READs that can be in flight; each needs a word for the epoch to land in.
_NUM_WORDS = 4096
_SHORTEST_POLL_S = 0.00005
_LONGEST_POLL_S = 0.002

_FENCED = ReadResult(ReadState.FENCED)


@dataclass(slots=True)
class Read:
    """A READ as it is asked for, and how far it is: `handle` is the post in flight, 0 for none;
    `parts` are still to be posted, None before the first; `word` receives the epoch."""

    id: ReadId
    peer: PoolDescription
    slot: int
    remote_blocks: list[int]
    local_blocks: list[int]
    word: int = 0
    parts: deque[Part] | None = None
    reads_epoch: bool = False
    handle: int = 0


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop this peer once its READs have ended."""

    agent: str


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Destroy the agent and build a new one."""


@dataclass(frozen=True, slots=True)
class Close:
    """Destroy the agent and end."""


Command = Read | Forget | Rebuild | Close


@dataclass(slots=True)
class _Peer:
    """A connected peer and its READs, oldest first. A broken one goes when the last has ended."""

    link: Link
    reads: list[Read] = field(default_factory=list[Read])
    may_be_tcp: bool = True
    is_judged: bool = False
    is_broken: bool = False

    @property
    def active(self) -> list[Read]:
        return self.reads[:1] if self.may_be_tcp else list(self.reads)


class ImportLoop:
    """`run` is the thread. `started` gets one item: the error of the start, or None."""

    def __init__(self, bindings: Any, pool: RegisteredPool, options: NixlOptions) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.results: dict[ReadId, ReadResult] = {}
        self.started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.transport = ""
        # The bug that ended the thread.
        self.crash: Exception | None = None
        self._bindings = bindings
        self._pool = pool
        self._options = options
        self._words = np.zeros(_NUM_WORDS, dtype=np.uint64)
        self._free_words = deque(range(_NUM_WORDS))
        self._agent: NixlAgent | None = None
        self._peers: dict[str, _Peer] = {}
        self._num_posts = 0

    def run(self) -> None:
        try:
            self._agent = self._new_agent()
        except Exception as error:
            self.started.put(error)
            return
        self.started.put(None)
        try:
            self._serve()
        except Exception as error:
            _logger.exception("The KV import thread ends.")
            self.crash = error

    def _serve(self) -> None:
        poll_s = _SHORTEST_POLL_S
        while True:
            is_busy = any(peer.reads for peer in self._peers.values())
            if self._take_commands(poll_s if is_busy else None):
                self._destroy_agent()
                return
            num_before = self._num_posts
            for peer in list(self._peers.values()):
                self._advance_peer(peer)
            is_moving = self._num_posts != num_before
            poll_s = _SHORTEST_POLL_S if is_moving else min(poll_s * 1.5, _LONGEST_POLL_S)

    def _take_commands(self, timeout_s: float | None) -> bool:
        """Does what the inbox says, waiting for it up to `timeout_s`; True: close."""
        try:
            command = self.inbox.get(timeout=timeout_s)
            while True:
                match command:
                    case Read():
                        self._take_read(command)
                    case Forget(agent):
                        if agent in self._peers:
                            self._peers[agent].is_broken = True
                    case Rebuild():
                        self._rebuild()
                    case Close():
                        return True
                command = self.inbox.get_nowait()
        except queue.Empty:
            return False

    # READs.

    def _take_read(self, read: Read) -> None:
        try:
            self._check(read)
            peer = self._peers.get(read.peer.agent)
            if peer is None:
                peer = _Peer(self._nixl().connect(read.peer))
                self._peers[read.peer.agent] = peer
        except NixlError as error:
            self.results[read.id] = ReadResult(ReadState.FAILED, str(error))
            return
        read.word = self._free_words.popleft()
        peer.reads.append(read)

    def _check(self, read: Read) -> None:
        """What the peer says of itself must fit what is asked of it."""
        peer = read.peer
        if peer.block_bytes != self._pool.block_bytes:
            raise NixlError(f"the peer's blocks have {peer.block_bytes} bytes")
        if not 0 <= min(read.remote_blocks) <= max(read.remote_blocks) < peer.num_blocks:
            raise NixlError(f"the peer has {peer.num_blocks} blocks, not {read.remote_blocks}")
        if not 0 <= read.slot < peer.num_slots:
            raise NixlError(f"the peer has {peer.num_slots} slots, not {read.slot}")
        if not self._free_words:
            raise NixlError(f"{_NUM_WORDS} READs are in flight, the limit")

    def _advance_peer(self, peer: _Peer) -> None:
        for read in peer.active:
            try:
                result = self._advance(peer, read)
            except NixlError as error:
                # The next READ of this peer connects afresh.
                peer.is_broken = True
                result = ReadResult(ReadState.FAILED, str(error))
            if result is not None:
                self._release(read)
                self._free_words.append(read.word)
                peer.reads.remove(read)
                self.results[read.id] = result
        if peer.is_broken and not peer.reads:
            self._drop(peer)

    def _advance(self, peer: _Peer, read: Read) -> ReadResult | None:
        """Posts as long as posts end at once; the result when the last one did. The epoch is asked
        for only after the blocks' completion was seen: lanes are unordered."""
        agent = self._nixl()
        if read.parts is None:
            read.parts = self._parts(peer, read)
        while not read.handle or agent.is_done(read.handle):
            if read.reads_epoch:
                self._judge(peer)
                return ReadResult(ReadState.DONE, epoch=int(self._words[read.word]))
            self._release(read)
            if read.parts:
                read.handle = agent.read_part(peer.link, read.parts.popleft())
            else:
                read.handle = agent.read_word(peer.link, read.slot, read.word)
                read.reads_epoch = True
            self._num_posts += 1
        return None

    def _parts(self, peer: _Peer, read: Read) -> deque[Part]:
        if peer.may_be_tcp:
            return deque(cut_for_tcp(read.remote_blocks, read.local_blocks, self._pool.block_bytes))
        return deque([Part(read.remote_blocks, read.local_blocks, in_pieces=False)])

    def _release(self, read: Read) -> None:
        """Frees the handle of a post that ended. If NIXL refuses, some memory is lost."""
        handle, read.handle = read.handle, 0
        try:
            if handle:
                self._nixl().release(handle)
        except NixlError as error:
            _logger.warning("The handle of a READ was not freed: %s", error)

    # Peers and the agent.

    def _judge(self, peer: _Peer) -> None:
        """After a peer's first READ: which transport was that?"""
        if peer.is_judged:
            return
        peer.is_judged = True
        if self._options.tls == "tcp":
            self.transport = "tcp"
            return
        log = read_log_of_this_process(self._options.ucx_log)
        found = transports_in_log(log, self._nixl().name, self._pool.memory)
        self.transport = found or "unknown"
        peer.may_be_tcp = not found or "tcp" in found.split("+")

    def _drop(self, peer: _Peer) -> None:
        """An error of NIXL's changes nothing: the peer is not used again under this link."""
        del self._peers[peer.link.agent]
        try:
            self._nixl().disconnect(peer.link)
        except NixlError as error:
            _logger.warning("Peer %s was not forgotten cleanly: %s", peer.link.agent, error)

    def _nixl(self) -> NixlAgent:
        """The agent; made again if the last rebuild could not. Raises NixlError."""
        if self._agent is None:
            self._agent = self._new_agent()
        return self._agent

    def _new_agent(self) -> NixlAgent:
        return NixlAgent(self._bindings, new_agent_name("imp"), self._pool, self._words)

    def _rebuild(self) -> None:
        self._destroy_agent()
        try:
            self._nixl()
        except NixlError:
            _logger.exception("The import agent was not rebuilt; the next READ tries again.")

    def _destroy_agent(self) -> None:
        """No byte of a READ lands after this; those in flight end as FENCED."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        for peer in self._peers.values():
            for read in peer.reads:
                self._free_words.append(read.word)
                self.results[read.id] = _FENCED
        self._peers.clear()
