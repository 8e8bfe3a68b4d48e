"""READs as the importer's thread is asked for them, and as they travel: in batches, by peer.

`hocket/kv/nixl_transfer.py` makes the commands, `hocket/kv/nixl_reads.py` does them. READs of one
peer that wait together travel as one batch: a chain of posts, one after the other, first the
blocks, then, once they are here, the epochs. Over RDMA, NVLink or within a host these are two
posts; what may be TCP is cut, and such a peer is sent one post at a time (`hocket/kv/nixl_agent.py`
says why).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.kv.nixl_agent import Fence, Link, Part, cut_for_tcp
from hocket.kv.transfer import PoolDescription, ReadId

# READs that wait for the same peer are sent together up to here, so that none waits long.
_BATCH_BYTES = 8 * 2**20


@dataclass(slots=True)
class Read:
    """A READ as it is asked for; `word` is where its epoch may land, `moves` how often something
    of it or before it has."""

    id: ReadId
    peer: PoolDescription
    slot: int
    remote_blocks: list[int]
    local_blocks: list[int]
    checksums: Sequence[int] = ()
    word: int = 0
    moves: int = 0


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
class Batch:
    """READs on their way together. `handle` is the post in flight, 0 for none; `posts` are still to
    come. The epoch of slot s lands in word `words[s]`."""

    reads: list[Read]
    words: dict[int, int]
    posts: deque[Part | Fence]
    handle: int = 0


@dataclass(slots=True)
class Peer:
    """A connected peer and its READs, oldest first: `batches` are on their way. A broken one goes
    when the last has ended."""

    link: Link
    waiting: deque[Read] = field(default_factory=deque[Read])
    batches: list[Batch] = field(default_factory=list[Batch])
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

    def moved(self, batch: Batch) -> None:
        """A post of the batch has ended: so much for its READs and those that wait behind it."""
        for read in (*batch.reads, *self.waiting):
            read.moves += 1

    def take_batch(self, block_bytes: int) -> Batch:
        """Takes READs that wait, up to _BATCH_BYTES, but always one. For chunks of one prompt, one
        look at the epoch after the last of them is enough."""
        reads, remote, local = list[Read](), list[int](), list[int]()
        most_blocks = _BATCH_BYTES // block_bytes
        while self.waiting:
            read = self.waiting[0]
            if reads and len(local) + len(read.local_blocks) > most_blocks:
                break
            reads.append(self.waiting.popleft())
            remote += read.remote_blocks
            local += read.local_blocks
        words = {read.slot: read.word for read in reads}
        posts = deque[Part | Fence]()
        if self.may_be_tcp:
            posts += cut_for_tcp(remote, local, block_bytes)
            posts += [Fence([slot], [word]) for slot, word in words.items()]
        else:
            posts.append(Part(remote, local, in_pieces=False))
            posts.append(Fence(list(words), list(words.values())))
        return Batch(reads, words, posts)
