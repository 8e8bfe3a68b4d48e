"""Who holds which KV block: counts only, the bytes are `hocket.kv.paged_cache`'s.

A block is free, held (by one or more holders, counted), or quarantined (held by nobody, given to
nobody, because an abandoned READ may still write into it). A block whose bytes the prefix index
knows (`prefix_index`) is *cached* while nobody holds it: free like the others, but given out last,
and until then anyone may share it:

    free ----allocate--> held --free (last holder)--> free
    cached --share-----> held --free (last holder)--> cached, when indexed
    cached --allocate--> held, and gone from the index
                         held --quarantine--> quarantined --release_quarantined--> free

Plain free blocks are reused first in, first out, so bytes that arrive late, against every rule,
hit a block that is still unused as often as possible. When there is none, the cached block that
was used longest ago is evicted. A block that is not indexed is never shared, one that is indexed
is never quarantined: no READ writes into it. Misuse is a bug of the caller and trips an assertion;
running out is a normal answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_QUARANTINED = -1


class OutOfBlocks(Exception):
    """Fewer free blocks than asked for; nothing was allocated."""

    def __init__(self, wanted: int, num_free: int, num_blocks: int) -> None:
        super().__init__(f"{wanted} blocks wanted, {num_free} of {num_blocks} are free")
        self.wanted = wanted
        self.num_free = num_free


class BlockPool:
    """Blocks 0..num_blocks-1 of one worker. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self._num_holders = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        # Free and indexed, least recently used first. A dict, so that `share` takes one out of
        # the middle.
        self._cached: dict[int, None] = {}
        self._forget: dict[int, Callable[[int], None]] = {}
        self._clear: dict[int, Callable[[int], None]] = {}
        self._num_quarantined = 0

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that the prefix index knows."""
        return len(self._cached)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self._num_quarantined

    def num_holders(self, block: int) -> int:
        """How many hold the block; 0 when it is free or quarantined."""
        return max(0, self._num_holders[block])

    def is_indexed(self, block: int) -> bool:
        """Whether the prefix index knows the block, held or cached."""
        return block in self._forget

    def count_free(self, blocks: Sequence[int]) -> int:
        """How many of the blocks are free: by so much `share` lowers `num_free`."""
        return sum(self._num_holders[block] == 0 for block in blocks)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, cached ones last; the caller is the one holder of each.

        Raises:
            OutOfBlocks: fewer are free; none is taken.
        """
        assert num_blocks >= 0, num_blocks
        if num_blocks > self.num_free:
            raise OutOfBlocks(num_blocks, self.num_free, self.num_blocks)
        blocks = [self._take_free() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def pin(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that are held already; `free` takes it off again."""
        for block in blocks:
            self._assert_held(block)
            self._num_holders[block] += 1

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder to indexed blocks, held or cached; `free` takes it off again.

        The holder reads them; nobody writes an indexed block."""
        for block in blocks:
            assert block in self._forget, f"block {block} is not indexed: it cannot be shared"
            self._cached.pop(block, None)
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one holder off each block; what nobody holds any more is free.

        `blocks` in the order of their tokens: of those that stay cached the last is evicted first,
        so that a prefix loses its end, not the beginning without which the rest is unreachable.
        """
        cached: list[int] = []
        for block in blocks:
            self._assert_held(block)
            self._num_holders[block] -= 1
            if self._num_holders[block] > 0:
                continue
            if block in self._forget:
                cached.append(block)
            else:
                self._add_free(block)
        self._cached.update(dict.fromkeys(reversed(cached)))

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Sets aside blocks with exactly one holder, who gives them up by this call."""
        for block in blocks:
            holders = self._num_holders[block]
            assert holders == 1, f"block {block} has {holders} holders; one can be quarantined"
            assert block not in self._forget, f"block {block} is indexed, yet a READ writes into it"
            self._num_holders[block] = _QUARANTINED
        self._num_quarantined += len(blocks)

    def release_quarantined(self, blocks: Sequence[int]) -> None:
        """Frees quarantined blocks: nothing can write into them any more."""
        for block in blocks:
            assert self._num_holders[block] == _QUARANTINED, f"block {block} is not in quarantine"
            self._num_holders[block] = 0
            self._add_free(block)
        self._num_quarantined -= len(blocks)

    def mark_indexed(self, block: int, forget: Callable[[int], None]) -> None:
        """The prefix index knows the held block from now on; `forget(block)` ends that, when the
        block is given to someone else or turns out to be damaged."""
        self._assert_held(block)
        assert block not in self._forget, f"block {block} is indexed already"
        assert block not in self._clear, f"block {block} is damaged"
        self._forget[block] = forget

    def condemn(self, blocks: Sequence[int], clear: Callable[[int], None]) -> None:
        """The bytes of these held blocks are damaged: the index forgets them, and `clear(block)`
        is called when the last holder lets go, before anyone else gets the block. Until then it
        stays as it is: who reads it must notice the damage, not go on with other bytes."""
        for block in blocks:
            self._assert_held(block)
            self._forget_indexed(block)
            self._clear[block] = clear

    def _take_free(self) -> int:
        if self._free:
            return self._free.popleft()
        block = next(iter(self._cached))
        del self._cached[block]
        self._forget_indexed(block)
        return block

    def _add_free(self, block: int) -> None:
        if clear := self._clear.pop(block, None):
            clear(block)
        self._free.append(block)

    def _forget_indexed(self, block: int) -> None:
        if forget := self._forget.pop(block, None):
            forget(block)

    def _assert_held(self, block: int) -> None:
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        assert self._num_holders[block] > 0, f"block {block} is not held"
