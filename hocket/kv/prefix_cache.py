"""A worker's prefix cache as its engine uses it: names of a request's blocks, hits, new entries.

Both engines admit a request with `PrefixCache.prefix` and `claim`, and call `index` whenever its
sequence has more complete slots. Names are continued from block to block, never made anew.
`NoPrefixCache` is the worker without one. What a name covers is `prefix_index`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hocket.kv.block_pool import BlockPool
from hocket.kv.prefix_index import PrefixIndex, block_hashes, prefix_root


@dataclass(slots=True)
class Prefix:
    """The named blocks of one request so far; the first `num_indexed` were found or inserted.
    `is_fresh`: what others computed is not for it, as it wants every position of its prompt."""

    root: bytes
    names: list[bytes] = field(default_factory=list[bytes])
    num_indexed: int = 0
    is_fresh: bool = False

    @property
    def findable(self) -> list[bytes]:
        return [] if self.is_fresh else self.names


@dataclass(frozen=True, slots=True)
class Hits:
    """Blocks that `claim` would find now, and how many of them are free ones of the pool."""

    num_blocks: int = 0
    num_free: int = 0


class PrefixCaching(Protocol):
    """What an engine needs of a prefix cache."""

    def prefix(
        self, token_ids: Sequence[int], tenant_salt: bytes, is_fresh: bool = False
    ) -> Prefix:
        """Names the full blocks of a prompt."""
        ...

    def claim(self, prefix: Prefix) -> list[int]:
        """The blocks of its longest indexed prefix, in order, with the caller as one more holder
        of each."""
        ...

    def look_up(self, prefix: Prefix) -> Hits:
        """What `claim` would find; nothing is held."""
        ...

    def index(
        self, prefix: Prefix, token_ids: Sequence[int], blocks: Sequence[int], num_complete: int
    ) -> None:
        """Lets others share the blocks that lie inside of the first `num_complete` slots."""
        ...


class PrefixCache:
    """The prefixes of one block pool. Not thread-safe: the engine thread owns it."""

    def __init__(self, pool: BlockPool, model_revision: str, block_tokens: int) -> None:
        self.entries = PrefixIndex(pool)
        self._pool = pool
        self._model_revision = model_revision
        self._block_tokens = block_tokens

    def prefix(
        self, token_ids: Sequence[int], tenant_salt: bytes, is_fresh: bool = False
    ) -> Prefix:
        root = prefix_root(self._model_revision, "", tenant_salt)
        names = block_hashes(root, token_ids, self._block_tokens)
        return Prefix(root, names, is_fresh=is_fresh)

    def claim(self, prefix: Prefix) -> list[int]:
        blocks = self.entries.claim(prefix.findable)
        prefix.num_indexed = len(blocks)
        return blocks

    def look_up(self, prefix: Prefix) -> Hits:
        blocks = self.entries.match(prefix.findable)
        return Hits(len(blocks), self._pool.count_free(blocks))

    def index(
        self, prefix: Prefix, token_ids: Sequence[int], blocks: Sequence[int], num_complete: int
    ) -> None:
        num_blocks = num_complete // self._block_tokens
        if num_blocks > len(prefix.names):
            start = len(prefix.names) * self._block_tokens
            news = token_ids[start : num_blocks * self._block_tokens]
            parent = prefix.names[-1] if prefix.names else prefix.root
            prefix.names += block_hashes(parent, news, self._block_tokens)
        for position in range(prefix.num_indexed, num_blocks):
            self.entries.insert(prefix.names[position], blocks[position])
        prefix.num_indexed = max(prefix.num_indexed, num_blocks)


class NoPrefixCache:
    """Finds nothing, keeps nothing."""

    def prefix(
        self, token_ids: Sequence[int], tenant_salt: bytes, is_fresh: bool = False
    ) -> Prefix:
        return Prefix(b"")

    def claim(self, prefix: Prefix) -> list[int]:
        return []

    def look_up(self, prefix: Prefix) -> Hits:
        return Hits()

    def index(
        self, prefix: Prefix, token_ids: Sequence[int], blocks: Sequence[int], num_complete: int
    ) -> None:
        pass
