"""The block pool: nothing is lost, nothing is given twice, misuse is a bug."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.kv.block_pool import BlockPool, OutOfBlocks


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
