"""The block pool: nothing is lost, nothing is given twice, misuse is a bug."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hocket.kv.block_pool import BlockPool, OutOfBlocks
from hocket.kv.prefix_index import PrefixIndex, block_hashes


def test_allocated_blocks_are_distinct_and_come_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert (pool.num_free, pool.num_held) == (1, 3)
    pool.free(blocks)
    assert (pool.num_free, pool.num_held) == (4, 0)


def test_the_block_freed_longest_ago_is_reused_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.free([second])
    pool.free([first, third])
    assert pool.allocate(3) == [second, first, third]


def test_running_out_allocates_nothing_and_says_the_numbers() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_pinned_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.pin(blocks)
    pool.pin(blocks)
    for holders_left in (2, 1):
        pool.free(blocks)
        assert pool.num_holders(blocks[0]) == holders_left
        assert pool.num_free == 0
    pool.free(blocks)
    assert pool.num_free == 1


def test_quarantined_blocks_are_given_to_nobody() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.quarantine(blocks)
    assert (pool.num_free, pool.num_held, pool.num_quarantined) == (1, 0, 1)
    assert pool.allocate(1) != blocks
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release_quarantined(blocks)
    assert pool.allocate(1) == blocks


def test_misuse_trips_an_assertion() -> None:
    pool = BlockPool(2)
    free, held = 1, pool.allocate(1)
    with pytest.raises(AssertionError, match="not held"):
        pool.free([free])
    with pytest.raises(AssertionError, match="not held"):
        pool.pin([free])
    with pytest.raises(AssertionError, match="not in quarantine"):
        pool.release_quarantined(held)
    with pytest.raises(AssertionError, match="block 2 of 2"):
        pool.free([2])
    pool.pin(held)
    with pytest.raises(AssertionError, match="2 holders"):
        pool.quarantine(held)


@given(st.lists(st.integers(0, 4), max_size=60))
def test_every_block_is_in_exactly_one_place(choices: list[int]) -> None:
    pool = BlockPool(5)
    held: list[int] = []
    quarantined: list[int] = []
    for choice in choices:
        if choice <= 1 and pool.num_free:
            held += pool.allocate(1)
        elif choice == 2 and held:
            pool.free([held.pop()])
        elif choice == 3 and held:
            block = held.pop(0)
            pool.quarantine([block])
            quarantined.append(block)
        elif choice == 4 and quarantined:
            pool.release_quarantined([quarantined.pop()])
        assert not set(held) & set(quarantined)
        assert (pool.num_held, pool.num_quarantined) == (len(held), len(quarantined))
        assert pool.num_free == 5 - len(held) - len(quarantined)


def cached(pool: BlockPool, count: int) -> list[int]:
    """Blocks that are free and indexed."""
    blocks = pool.allocate(count)
    for block in blocks:
        pool.mark_indexed(block, lambda _: None)
    pool.free(blocks)
    return blocks


def test_indexed_blocks_count_as_free_but_are_given_out_last() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, 2)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (4, 2, 0)
    assert not set(pool.allocate(2)) & set(blocks)
    assert (pool.num_free, pool.num_cached) == (2, 2)


def test_a_prefix_is_evicted_from_its_end_and_the_longest_unused_one_first() -> None:
    pool = BlockPool(4)
    old, new = cached(pool, 2), cached(pool, 2)
    assert pool.allocate(1) == [old[1]]
    pool.share(new)
    pool.free(new)
    pool.share(old[:1])
    pool.free(old[:1])  # used last now
    assert pool.allocate(3) == [new[1], new[0], old[0]]


def test_an_evicted_block_leaves_the_index_before_its_new_owner_has_it() -> None:
    pool = BlockPool(1)
    forgotten: list[int] = []
    (block,) = pool.allocate(1)
    pool.mark_indexed(block, forgotten.append)
    pool.free([block])
    assert forgotten == []
    assert pool.allocate(1) == [block]
    assert forgotten == [block]
    assert not pool.is_indexed(block)


def test_sharing_takes_a_cached_block_out_of_the_free_ones() -> None:
    pool = BlockPool(2)
    blocks = cached(pool, 1)
    assert pool.count_free(blocks) == 1
    pool.share(blocks)
    pool.share(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_holders(blocks[0])) == (1, 0, 2)
    assert pool.count_free(blocks) == 0
    assert pool.allocate(1) != blocks
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_what_is_not_indexed_is_not_shared_and_what_is_indexed_not_quarantined() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(AssertionError, match="not indexed"):
        pool.share(held)
    pool.mark_indexed(held[0], lambda _: None)
    with pytest.raises(AssertionError, match="indexed already"):
        pool.mark_indexed(held[0], lambda _: None)
    with pytest.raises(AssertionError, match="a READ writes into it"):
        pool.quarantine(held)
    with pytest.raises(AssertionError, match="not held"):
        pool.mark_indexed(1, lambda _: None)


def test_a_damaged_block_is_forgotten_at_once_and_cleared_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    forgotten: list[int] = []
    cleared: list[int] = []
    blocks = pool.allocate(2)
    pool.mark_indexed(blocks[0], forgotten.append)
    pool.share(blocks[:1])
    pool.condemn(blocks, cleared.append)
    assert forgotten == blocks[:1]
    with pytest.raises(AssertionError, match="damaged"):
        pool.mark_indexed(blocks[1], forgotten.append)
    pool.free(blocks[:1])
    assert cleared == []
    pool.free(blocks[:1])
    assert cleared == blocks[:1]
    pool.quarantine(blocks[1:])
    pool.release_quarantined(blocks[1:])
    assert cleared == blocks
    pool.free(pool.allocate(2))
    assert cleared == blocks


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests that share prefixes over a tight pool. The model: who holds what, and which tokens'
    entries lie in which block. A request claims, computes the rest, offers, ends; imports are
    abandoned; blocks are found damaged."""

    NUM_BLOCKS = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.index = PrefixIndex(self.pool)
        self.requests: list[tuple[list[bytes], list[int], int]] = []
        self.quarantined: list[int] = []
        self.content: dict[int, bytes] = {}
        """Whose entries a block holds; each block is written by one owner, before it is shared."""

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, prompt: list[int]) -> None:
        hashes = block_hashes(b"", prompt, 1)
        found = self.index.match(hashes)
        num_new = len(hashes) - len(found)
        if num_new + self.pool.count_free(found) > self.pool.num_free:
            return
        before = self.pool.num_free
        found_free = self.pool.count_free(found)
        shared = self.index.claim(hashes)
        assert shared == found
        assert [self.content[block] for block in shared] == hashes[: len(shared)]
        fresh = self.pool.allocate(num_new)
        assert self.pool.num_free == before - num_new - found_free
        assert not set(fresh) & {b for _, blocks, _ in self.requests for b in blocks}
        assert not set(fresh) & set(shared)
        assert not any(self.pool.is_indexed(block) for block in fresh)
        for block, block_hash in zip(fresh, hashes[len(shared) :], strict=True):
            self.content[block] = block_hash
        self.requests.append((hashes, shared + fresh, len(shared)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        hashes, blocks, num_offered = self.requests.pop(0)
        end = data.draw(st.integers(num_offered, len(blocks)))
        for i in range(num_offered, end):
            was_known = bool(self.index.match(hashes[: i + 1])[i:])
            if self.index.insert(hashes[i], blocks[i]):
                assert not was_known
        self.requests.append((hashes, blocks, end))

    @precondition(lambda self: self.requests)
    @rule()
    def end(self) -> None:
        _, blocks, _ = self.requests.pop(0)
        self.pool.free(blocks)

    @precondition(lambda self: self.requests)
    @rule()
    def abandon_reads(self) -> None:
        """The blocks that were neither shared nor offered are targets of READs."""
        _, blocks, num_offered = self.requests.pop(0)
        self.pool.free(blocks[:num_offered])
        self.pool.quarantine(blocks[num_offered:])
        self.quarantined += blocks[num_offered:]

    @rule()
    def fence(self) -> None:
        self.pool.release_quarantined(self.quarantined)
        self.quarantined = []

    @precondition(lambda self: self.requests)
    @rule()
    def find_damage(self) -> None:
        _, blocks, _ = self.requests.pop(0)
        self.pool.condemn(blocks, self.content.__delitem__)
        assert not any(self.pool.is_indexed(block) for block in blocks)
        self.pool.free(blocks)

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        held = {block for _, blocks, _ in self.requests for block in blocks}
        assert self.pool.num_held == len(held)
        assert self.pool.num_quarantined == len(self.quarantined)
        assert self.pool.num_free == self.NUM_BLOCKS - len(held) - len(self.quarantined)
        for block in range(self.NUM_BLOCKS):
            holders = sum(blocks.count(block) for _, blocks, _ in self.requests)
            assert self.pool.num_holders(block) == holders

    def teardown(self) -> None:
        for _, blocks, _ in self.requests:
            self.pool.free(blocks)
        self.pool.release_quarantined(self.quarantined)
        assert self.pool.num_free == self.NUM_BLOCKS
        assert self.pool.num_cached == self.index.counters.indexed_blocks
        self.pool.allocate(self.NUM_BLOCKS)
        assert self.index.counters.indexed_blocks == 0


TestPrefixCacheMachine = PrefixCacheMachine.TestCase
TestPrefixCacheMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
