"""Who holds which KV block: counts only, the bytes are `hocket.kv.paged_cache`'s.

A block is free, held (by one or more holders, counted), or quarantined (held by nobody, given to
nobody, because an abandoned READ may still write into it):

    free --allocate--> held --free (last holder)--> free
                        |
                        +--quarantine--> quarantined --release_quarantined--> free

Blocks are reused first in, first out: the block that was freed longest ago goes first, so bytes
that arrive late, against every rule, hit a block that is still unused as often as possible.
Misuse is a bug of the caller and trips an assertion; running out is a normal answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

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
        self._num_quarantined = 0

    @property
    def num_blocks(self) -> int:
        return len(self._num_holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        return self._num_quarantined

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self._num_quarantined

    def num_holders(self, block: int) -> int:
        """How many hold the block; 0 when it is free or quarantined."""
        return max(0, self._num_holders[block])

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks; the caller is the one holder of each.

        Raises:
            OutOfBlocks: fewer are free; none is taken.
        """
        assert num_blocks >= 0, num_blocks
        if num_blocks > len(self._free):
            raise OutOfBlocks(num_blocks, len(self._free), self.num_blocks)
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def pin(self, blocks: Sequence[int]) -> None:
        """Adds a holder to blocks that are held already; `free` takes it off again."""
        for block in blocks:
            self._assert_held(block)
            self._num_holders[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one holder off each block; what nobody holds any more is free."""
        for block in blocks:
            self._assert_held(block)
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                self._free.append(block)

    def quarantine(self, blocks: Sequence[int]) -> None:
        """Sets aside blocks with exactly one holder, who gives them up by this call."""
        for block in blocks:
            holders = self._num_holders[block]
            assert holders == 1, f"block {block} has {holders} holders; one can be quarantined"
            self._num_holders[block] = _QUARANTINED
        self._num_quarantined += len(blocks)

    def release_quarantined(self, blocks: Sequence[int]) -> None:
        """Frees quarantined blocks: nothing can write into them any more."""
        for block in blocks:
            assert self._num_holders[block] == _QUARANTINED, f"block {block} is not in quarantine"
            self._num_holders[block] = 0
            self._free.append(block)
        self._num_quarantined -= len(blocks)

    def _assert_held(self, block: int) -> None:
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        assert self._num_holders[block] > 0, f"block {block} is not held"
