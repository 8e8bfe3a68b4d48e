"""The importer's thread: owns the import agent, the peers and the READs in flight.

Comes from `hocket/kv/nixl_transfer.py`, which puts commands into `inbox` and takes results out.
READs of one peer that wait together travel as one batch: a chain of posts, one after the other,
first the blocks, then, once they are here, the epochs. Over RDMA, NVLink or within a host these are
two posts; what may be TCP is cut, and such a peer is sent one post at a time
(`hocket/kv/nixl_agent.py` says why). Which it is, UCX's log says after the first READ.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.kv.nixl_agent import (
    Fence,
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
# After a post the thread looks again and again for this long (a TCP message on one host takes about
# as long), then after a share of the time it has waited, so that it is late by that share at most.
_SPIN_S = 0.0002
_LATE_SHARE = 1 / 16
_SHORTEST_POLL_S = 0.00005
_LONGEST_POLL_S = 0.002
# READs that wait for the same peer are sent together up to here, so that none waits long.
_BATCH_BYTES = 8 * 2**20
# Results wait at most about this long for others to be told with.
_TELL_AFTER_S = 0.001

_FENCED = ReadResult(ReadState.FENCED)


@dataclass(slots=True)
class Read:
    """A READ as it is asked for; `word` is where its epoch may land."""

    id: ReadId
    peer: PoolDescription
    slot: int
    remote_blocks: list[int]
    local_blocks: list[int]
    word: int = 0


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
class _Batch:
    """READs on their way together. `handle` is the post in flight, 0 for none; `posts` are still to
    come. The epoch of slot s lands in word `words[s]`."""

    reads: list[Read]
    words: dict[int, int]
    posts: deque[Part | Fence]
    handle: int = 0


@dataclass(slots=True)
class _Peer:
    """A connected peer and its READs, oldest first: `batches` are on their way. A broken one goes
    when the last has ended."""

    link: Link
    waiting: deque[Read] = field(default_factory=deque[Read])
    batches: list[_Batch] = field(default_factory=list[_Batch])
    may_be_tcp: bool = True
    is_judged: bool = False
    is_broken: bool = False

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.batches)

    @property
    def takes_batch(self) -> bool:
        """Whether the next READs may leave now."""
        return bool(self.waiting) and not (self.may_be_tcp and self.batches)


class ImportLoop:
    """`run` is the thread. `started` gets one item: the error of the start, or None. `on_end` is
    called in that thread after results."""

    def __init__(self, bindings: Any, pool: RegisteredPool, options: NixlOptions) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.results: dict[ReadId, ReadResult] = {}
        self.started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None
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
        self._last_move = 0.0
        # Results that `on_end` was not called for yet, and since when.
        self._has_news = False
        self._news_since = 0.0

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
            self.on_end()

    def _serve(self) -> None:
        while not self._take_commands(self._wait_s()):
            for peer in list(self._peers.values()):
                self._advance_peer(peer)
            self._tell()
        self._destroy_agent()
        self._tell()

    def _wait_s(self) -> float | None:
        """How long to wait for commands before READs are looked at again; None: there are none."""
        if not any(peer.is_busy for peer in self._peers.values()):
            return None
        waited_s = time.monotonic() - self._last_move
        if waited_s < _SPIN_S:
            return 0.0
        return min(max(waited_s * _LATE_SHARE, _SHORTEST_POLL_S), _LONGEST_POLL_S)

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
            self._end(read, ReadResult(ReadState.FAILED, str(error)))
            return
        read.word = self._free_words.popleft()
        peer.waiting.append(read)

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
        while peer.takes_batch:
            peer.batches.append(self._new_batch(peer))
        for batch in list(peer.batches):
            try:
                has_ended, error = self._advance(peer, batch), ""
            except NixlError as nixl_error:
                # The next READ of this peer connects afresh.
                peer.is_broken = True
                has_ended, error = True, str(nixl_error)
            if has_ended:
                self._release(batch)
                peer.batches.remove(batch)
                for read in batch.reads:
                    self._free_words.append(read.word)
                    self._end(read, self._result(batch, read, error))
        if peer.is_broken and not peer.is_busy:
            self._drop(peer)

    def _new_batch(self, peer: _Peer) -> _Batch:
        """Takes READs that wait, up to _BATCH_BYTES, but always one. For chunks of one prompt, one
        look at the epoch after the last of them is enough."""
        reads, remote, local = list[Read](), list[int](), list[int]()
        most_blocks = _BATCH_BYTES // self._pool.block_bytes
        while peer.waiting:
            read = peer.waiting[0]
            if reads and len(local) + len(read.local_blocks) > most_blocks:
                break
            reads.append(peer.waiting.popleft())
            remote += read.remote_blocks
            local += read.local_blocks
        words = {read.slot: read.word for read in reads}
        posts = deque[Part | Fence]()
        if peer.may_be_tcp:
            posts += cut_for_tcp(remote, local, self._pool.block_bytes)
            posts += [Fence([slot], [word]) for slot, word in words.items()]
        else:
            posts.append(Part(remote, local, in_pieces=False))
            posts.append(Fence(list(words), list(words.values())))
        return _Batch(reads, words, posts)

    def _advance(self, peer: _Peer, batch: _Batch) -> bool:
        """Posts as long as posts end at once; True when the last one did. Epochs are asked for only
        after the blocks' completion was seen: lanes are unordered."""
        agent = self._nixl()
        while not batch.handle or agent.is_done(batch.handle):
            self._last_move = time.monotonic()
            self._release(batch)
            if not batch.posts:
                self._judge(peer)
                return True
            post = batch.posts.popleft()
            if isinstance(post, Part):
                batch.handle = agent.read_part(peer.link, post)
            else:
                batch.handle = agent.read_epochs(peer.link, post)
        return False

    def _result(self, batch: _Batch, read: Read, error: str) -> ReadResult:
        if error:
            return ReadResult(ReadState.FAILED, error)
        return ReadResult(ReadState.DONE, epoch=int(self._words[batch.words[read.slot]]))

    def _release(self, batch: _Batch) -> None:
        """Frees the handle of a post that ended. If NIXL refuses, some memory is lost."""
        handle, batch.handle = batch.handle, 0
        try:
            if handle:
                self._nixl().release(handle)
        except NixlError as error:
            _logger.warning("The handle of a READ was not freed: %s", error)

    def _end(self, read: Read, result: ReadResult) -> None:
        """READs that end close together are told at once: waking who waits costs as much as a
        small READ."""
        now = time.monotonic()
        if not self._has_news:
            self._has_news, self._news_since = True, now
        self.results[read.id] = result
        if now - self._news_since >= _TELL_AFTER_S:
            self._tell()

    def _tell(self) -> None:
        if self._has_news:
            self._has_news = False
            self.on_end()

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
            for read in [*(r for batch in peer.batches for r in batch.reads), *peer.waiting]:
                self._free_words.append(read.word)
                self._end(read, _FENCED)
        self._peers.clear()
