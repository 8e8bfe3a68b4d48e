"""Which beginnings of prompts a worker should still have in its prefix cache.

The gateway hashes a prompt's blocks as workers do (`hocket.kv.prefix_index`) and remembers, for
each life of a worker, the blocks of the prompts that it has computed, as many as it has room for
and the latest used ones: what the worker itself keeps. `pool.WorkerPool` looks up how much of a new
prompt that is, the scorers count it, and what the worker really found is compared with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hocket.kv.prefix_index import block_hashes, prefix_root

# Per worker, so that a gateway of many large workers stays small: 4 million tokens.
MOST_BLOCKS = 65_536


class PromptPrefix:
    """The full blocks of one prompt, by their hashes.

    Hashes are compared only with those of prompts that went to the same worker, so they need not
    name its weights; tenants with another salt have nothing in common.
    """

    def __init__(self, token_ids: Sequence[int], tenant_salt: bytes = b"") -> None:
        """Hashes nothing yet: about 6 microseconds per block, when `hashes` is called."""
        self._token_ids = token_ids
        self._root = prefix_root("", "", tenant_salt)
        self._hashes: dict[int, list[bytes]] = {}

    def hashes(self, block_tokens: int) -> list[bytes]:
        """One per full block of so many tokens, in order; computed once."""
        if block_tokens not in self._hashes:
            hashes = block_hashes(self._root, self._token_ids, block_tokens)
            self._hashes[block_tokens] = hashes
        return self._hashes[block_tokens]


NO_PREFIX = PromptPrefix(())
"""Of a prompt of which nothing can be cached."""


class KnownPrefixes:
    """The blocks that one life of a worker should have cached."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: that the worker has room for."""
        self._most = min(num_blocks, MOST_BLOCKS)
        # The one that was used longest ago comes first.
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def count(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first one on, are there."""
        for index, block_hash in enumerate(hashes):
            if block_hash not in self._hashes:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[bytes]) -> None:
        """The worker has computed, or found, all of these blocks of one prompt."""
        # Backwards: of a prompt, the last blocks are given up first.
        for block_hash in reversed(hashes):
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._most:
            self._hashes.popitem(last=False)
