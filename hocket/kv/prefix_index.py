"""Which block holds the KV of which prefix: what lets a request skip what another computed.

A block's hash is a chained SHA-256: it covers the block's own tokens, all before them, and whose
they are (`prefix_root`), so equal hashes mean equal KV entries. An engine hashes a prompt's blocks,
claims those that `PrefixIndex` knows, computes the rest, and inserts each block that became
complete (`Sequence.num_complete`); `prefix_cache` does so for it. `BlockPool` keeps an indexed
block that nobody holds until its room is needed, and tells the index when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack

from hocket.kv.block_pool import BlockPool
from hocket.telemetry import GAUGE


def prefix_root(model_revision: str, adapter: str, tenant_salt: bytes) -> bytes:
    """The parent of the first block's hash, 32 bytes. Prefixes of different roots share nothing.

    Each part is preceded by its length, so that no bytes can move from one to the next.
    """
    digest = sha256(b"hocket prefix root")
    for part in (model_revision.encode(), adapter.encode(), tenant_salt):
        digest.update(pack("<Q", len(part)) + part)
    return digest.digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, in order, 32 bytes each: SHA-256 of the parent's
    hash and the block's tokens as little-endian uint32. A part of a block at the end has none.

    A longer sequence goes on from the last hash: with h = block_hashes(root, a, n),
    block_hashes(root, a + b, n) is h + block_hashes(h[-1], b, n) when a ends with a block.
    """
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        tokens = token_ids[start : start + block_tokens]
        parent = sha256(parent + pack(f"<{block_tokens}I", *tokens)).digest()
        hashes.append(parent)
    return hashes


@dataclass(slots=True)
class PrefixCounters:
    """Blocks, since the start of the worker: that `claim` found and did not find, that left the
    index; and those that are in it now, held or cached."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    evicted_blocks: int = 0
    indexed_blocks: int = field(default=0, metadata=GAUGE)


class PrefixIndex:
    """The hashed blocks of one pool. Not thread-safe: the engine thread owns both."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hash_to_block: dict[bytes, int] = {}
        self._block_to_hash: dict[int, bytes] = {}
        self.counters = PrefixCounters()

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is indexed, in order. Nothing is held or
        counted: a block may go with the next `allocate`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._hash_to_block.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def claim(self, hashes: Sequence[bytes]) -> list[int]:
        """`match`, with the caller as one more holder of each block; once per request."""
        blocks = self.match(hashes)
        self._pool.share(blocks)
        self.counters.hit_blocks += len(blocks)
        self.counters.missed_blocks += len(hashes) - len(blocks)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> bool:
        """Others may share the block from now on: it is held, complete in all layers, and nobody
        writes it again. A hash that is indexed keeps the block it has, this one stays its holder's
        alone. True when `block` entered the index.
        """
        if block_hash in self._hash_to_block:
            return False
        self._pool.mark_indexed(block, self._forget)
        self._hash_to_block[block_hash] = block
        self._block_to_hash[block] = block_hash
        self.counters.indexed_blocks += 1
        return True

    def _forget(self, block: int) -> None:
        del self._hash_to_block[self._block_to_hash.pop(block)]
        self.counters.indexed_blocks -= 1
        self.counters.evicted_blocks += 1
