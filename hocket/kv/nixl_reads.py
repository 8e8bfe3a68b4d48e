"""The importer's thread: owns the import agent, the peers and the READs in flight.

Comes from `hocket/kv/nixl_transfer.py`, which puts commands into `inbox` and takes results out.
READs travel in batches (`hocket/kv/nixl_batches.py`). After a peer's first one UCX's log says which
transport that was: whether later ones have to be cut for TCP, and whether it is allowed at all
(`hocket/kv/transport.py`). When a batch is here, its blocks' checksums are looked at.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hocket.kv.checksum import find_damage
from hocket.kv.nixl_agent import (
    Link,
    NixlAgent,
    NixlError,
    NixlOptions,
    Part,
    RegisteredPool,
    new_agent_name,
)
from hocket.kv.nixl_batches import Batch, Close, Command, Forget, Peer, Read, Rebuild
from hocket.kv.pool_bytes import blocks_of
from hocket.kv.transfer import PoolDescription, ReadId, ReadResult, ReadState, TransferCounters
from hocket.kv.transport import UNKNOWN, is_downgrade, is_tcp, why_not_read
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
# Results wait at most about this long for others to be told with.
_TELL_AFTER_S = 0.001
# An import agent younger than this is not made anew because it can't connect to a peer.
_TRUSTED_S = 1.0

_FENCED = ReadResult(ReadState.FENCED)


class ImportLoop:
    """`run` is the thread. `started` gets one item: the error of the start, or None. `on_end` is
    called in that thread after results; before, `on_landed` for each READ whose blocks and epoch
    are here, with its local blocks, in the moment before their checksums are looked at."""

    def __init__(self, bindings: Any, pool: RegisteredPool, options: NixlOptions) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.results: dict[ReadId, ReadResult] = {}
        self.started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.on_end: Callable[[], None] = lambda: None
        self.on_landed: Callable[[list[int]], None] = lambda _: None
        self.blocks = blocks_of(pool)
        self.counters = TransferCounters()
        self.transport = ""
        # The bug that ended the thread.
        self.crash: Exception | None = None
        self._bindings = bindings
        self._pool = pool
        self._options = options
        self._words = np.zeros(_NUM_WORDS, dtype=np.uint64)
        self._free_words = deque(range(_NUM_WORDS))
        self._agent: NixlAgent | None = None
        self._made_at = 0.0
        self._peers: dict[str, Peer] = {}
        # A peer came by a transport that is not allowed.
        self._is_tainted = False
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
            if self._is_tainted:
                self._rebuild()
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
                peer = Peer(self._connect(read.peer))
                self._peers[read.peer.agent] = peer
        except NixlError as error:
            self._end(read, ReadResult(ReadState.FAILED, str(error)))
            return
        read.word = self._free_words.popleft()
        peer.waiting.append(read)

    def _connect(self, pool: PoolDescription) -> Link:
        """An agent that was made while the network was down uses none of its devices for ever, so
        one that reaches nobody is made anew, but not again and again. Raises NixlError."""
        agent = self._nixl()
        try:
            return agent.connect(pool)
        except NixlError as error:
            is_needed = any(peer.is_busy for peer in self._peers.values())
            if is_needed or time.monotonic() - self._made_at < _TRUSTED_S:
                raise
            _logger.warning("A peer is tried again with a new import agent: %s", error)
        self._rebuild()
        return self._nixl().connect(pool)

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

    def _advance_peer(self, peer: Peer) -> None:
        while peer.takes_batch:
            peer.batches.append(peer.take_batch(self._pool.block_bytes))
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

    def _advance(self, peer: Peer, batch: Batch) -> bool:
        """Posts as long as posts end at once; True when the last one did. Epochs are asked for only
        after the blocks' completion was seen: lanes are unordered."""
        agent = self._nixl()
        while not batch.handle or agent.is_done(batch.handle):
            self._last_move = time.monotonic()
            if batch.handle:
                peer.moved(batch)
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

    def _result(self, batch: Batch, read: Read, error: str) -> ReadResult:
        if error:
            return ReadResult(ReadState.FAILED, error)
        epoch = int(self._words[batch.words[read.slot]])
        self.on_landed(read.local_blocks)
        damage = find_damage(self.blocks, read.local_blocks, read.checksums)
        state = ReadState.CORRUPT if damage else ReadState.DONE
        return ReadResult(state, damage, epoch)

    def _release(self, batch: Batch) -> None:
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

    def _judge(self, peer: Peer) -> None:
        """After a peer's first READ: which transport was that? Raises NixlError when it is not
        allowed."""
        if peer.is_judged:
            return
        peer.is_judged = True
        options = self._options
        found = "tcp" if options.tls == "tcp" else self._found_transport()
        self.transport = found
        peer.may_be_tcp = found == UNKNOWN or is_tcp(found)
        if is_downgrade(found, options.tls, options.has_rdma_devices):
            if not self.counters.downgraded_peers:
                _logger.warning(
                    "KV blocks come over TCP (%r) although this host has RDMA devices; "
                    "transfer.require=rdma would refuse that.",
                    found,
                )
            self.counters.downgraded_peers += 1
        if why_not := why_not_read(found, options.require):
            # UCX's account is of an agent, not of a peer: from now on it accuses this agent's later
            # peers, too. A new agent has none.
            self._is_tainted = True
            self.counters.refused_reads += sum(len(batch.reads) for batch in peer.batches)
            raise NixlError(why_not)

    def _found_transport(self) -> str:
        log = read_log_of_this_process(self._options.ucx_log)
        return transports_in_log(log, self._nixl().name, self._pool.memory) or UNKNOWN

    def _drop(self, peer: Peer) -> None:
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
        self._made_at = time.monotonic()
        return NixlAgent(self._bindings, new_agent_name("imp"), self._pool, self._words)

    def _rebuild(self) -> None:
        self._is_tainted = False
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
