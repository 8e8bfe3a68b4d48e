"""The prefix index: equal hashes only for equal prefixes of equal owners."""

from __future__ import annotations

from hashlib import sha256
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.kv.block_pool import BlockPool, OutOfBlocks
from hocket.kv.prefix_cache import Hits, PrefixCache
from hocket.kv.prefix_index import PrefixIndex, block_hashes, prefix_root

ROOT = prefix_root("model", "", b"")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def test_a_hash_is_sha256_of_the_parent_and_little_endian_tokens() -> None:
    first, second = block_hashes(ROOT, [1, 2, 3, 2**32 - 1, 7], 2)
    assert first == sha256(ROOT + b"\x01\0\0\0\x02\0\0\0").digest()
    assert second == sha256(first + b"\x03\0\0\0\xff\xff\xff\xff").digest()


def test_the_root_of_fixed_parts_never_changes() -> None:
    """Workers of another release, and the router, hash the same."""
    parts = (5).to_bytes(8, "little") + b"model", (1).to_bytes(8, "little") + b"a", bytes(8)
    assert (
        prefix_root("model", "a", b"") == sha256(b"hocket prefix root" + b"".join(parts)).digest()
    )


@given(TOKENS, st.integers(1, 5))
def test_only_full_blocks_have_a_hash(tokens: list[int], block_tokens: int) -> None:
    hashes = block_hashes(ROOT, tokens, block_tokens)
    assert len(hashes) == len(tokens) // block_tokens
    assert len(set(hashes)) == len(hashes)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_sequences_share_hashes_exactly_as_far_as_their_blocks_agree(
    a: list[int], b: list[int], block_tokens: int
) -> None:
    pairs = zip(
        block_hashes(ROOT, a, block_tokens), block_hashes(ROOT, b, block_tokens), strict=False
    )
    for i, (ours, theirs) in enumerate(pairs, start=1):
        end = i * block_tokens
        assert (ours == theirs) == (a[:end] == b[:end])


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_a_chain_goes_on_from_its_last_hash(a: list[int], b: list[int], block_tokens: int) -> None:
    a = a[: len(a) // block_tokens * block_tokens]
    head = block_hashes(ROOT, a, block_tokens)
    tail = block_hashes(head[-1] if head else ROOT, b, block_tokens)
    assert block_hashes(ROOT, a + b, block_tokens) == head + tail


def test_c13_the_same_tokens_of_another_tenant_adapter_or_model_share_nothing() -> None:
    pool = BlockPool(64)
    index = PrefixIndex(pool)
    roots = [
        prefix_root(model, adapter, salt)
        for model, adapter, salt in product(("m", "ma"), ("", "a", "b"), (b"", b"a", b"b"))
    ]
    assert len(set(roots)) == len(roots)
    for i, root in enumerate(roots):
        hashes = block_hashes(root, range(8), 4)
        assert index.match(hashes) == []
        blocks = pool.allocate(2)
        for block_hash, block in zip(hashes, blocks, strict=True):
            assert index.insert(block_hash, block)
        assert index.match(hashes) == blocks == [2 * i, 2 * i + 1]


def test_no_part_of_a_root_can_be_read_as_another() -> None:
    assert prefix_root("ab", "c", b"") != prefix_root("a", "bc", b"")
    assert prefix_root("a", "b", b"c") != prefix_root("a", "bc", b"")
    assert prefix_root("a", "", b"b") != prefix_root("a", "b", b"")
    length = (1).to_bytes(8, "little").decode()
    assert prefix_root("a", "", b"") != prefix_root("a" + length, "", b"")


def test_the_longest_indexed_prefix_is_found_and_a_hole_ends_it() -> None:
    pool = BlockPool(4)
    index = PrefixIndex(pool)
    hashes = block_hashes(ROOT, range(8), 2)
    blocks = pool.allocate(4)
    for i in (0, 1, 3):
        index.insert(hashes[i], blocks[i])
    assert index.match(hashes) == blocks[:2]
    assert index.match(hashes[1:]) == blocks[1:2]
    assert index.match(block_hashes(ROOT, [0, 1, 9, 9], 2)) == blocks[:1]
    assert index.match([]) == []
    assert [pool.num_holders(block) for block in blocks] == [1, 1, 1, 1]


def test_of_two_that_computed_the_same_block_the_first_stays() -> None:
    pool = BlockPool(2)
    index = PrefixIndex(pool)
    (block_hash,) = block_hashes(ROOT, range(2), 2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert index.insert(block_hash, first[0])
    assert not index.insert(block_hash, first[0])
    assert not index.insert(block_hash, second[0])
    assert index.match([block_hash]) == first
    pool.free(second)
    assert (pool.num_free, pool.num_cached) == (1, 0)  # a plain block, not a cached one


def test_one_block_cannot_stand_for_two_prefixes() -> None:
    pool = BlockPool(1)
    index = PrefixIndex(pool)
    block = pool.allocate(1)[0]
    index.insert(b"one", block)
    with pytest.raises(AssertionError, match="indexed already"):
        index.insert(b"two", block)


def test_an_evicted_block_is_not_found_and_a_claimed_one_not_evicted() -> None:
    pool = BlockPool(3)
    index = PrefixIndex(pool)
    hashes = block_hashes(ROOT, range(6), 2)
    blocks = pool.allocate(3)
    for block_hash, block in zip(hashes, blocks, strict=True):
        index.insert(block_hash, block)
    pool.free(blocks)
    assert index.claim(hashes[:1]) == blocks[:1]
    assert pool.allocate(1) == blocks[2:]
    assert index.match(hashes) == blocks[:2]
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.allocate(1) == blocks[1:2]
    assert index.match(hashes) == blocks[:1]
    assert (index.counters.indexed_blocks, index.counters.evicted_blocks) == (1, 2)


def test_counters_tell_found_and_missed_blocks_once_per_request() -> None:
    pool = BlockPool(4)
    index = PrefixIndex(pool)
    hashes = block_hashes(ROOT, range(8), 2)
    assert index.claim(hashes) == []
    for block_hash, block in zip(hashes[:3], pool.allocate(3), strict=True):
        index.insert(block_hash, block)
    for _ in range(5):
        index.match(hashes)  # a request that waits for room looks again and again
    index.claim(hashes)
    assert (index.counters.hit_blocks, index.counters.missed_blocks) == (3, 5)


def test_a_request_indexes_each_block_once_and_only_what_is_complete() -> None:
    pool = BlockPool(6)
    cache = PrefixCache(pool, "model", 2)
    prompt = [1, 2, 3, 4, 5]
    first = cache.prefix(prompt, b"")
    assert cache.claim(first) == []
    blocks = pool.allocate(4)
    tokens = [*prompt, 6, 7]
    for num_complete, expected in ((1, 0), (2, 1), (3, 1), (5, 2), (6, 3), (5, 3), (7, 3)):
        cache.index(first, tokens, blocks, num_complete)
        assert cache.entries.counters.indexed_blocks == expected, num_complete
    assert cache.entries.match(block_hashes(ROOT, tokens, 2)) == blocks[:3]

    # A follow-up turn: prompt and output are found; only what is new is indexed.
    turn = [*tokens[:6], 9, 9]
    second = cache.prefix(turn, b"")
    assert cache.look_up(second) == Hits(num_blocks=3, num_free=0)
    shared = cache.claim(second)
    assert shared == blocks[:3]
    (new,) = pool.allocate(1)
    cache.index(second, turn, [*shared, new], 8)
    assert cache.entries.match(block_hashes(ROOT, turn, 2)) == [*shared, new]
    pool.free(blocks)
    pool.free([*shared, new])
    assert cache.look_up(second).num_free == 4
    assert cache.claim(cache.prefix(turn, b"another tenant")) == []


def test_what_was_found_damaged_is_not_indexed_again_by_those_who_share_it() -> None:
    pool = BlockPool(3)
    cache = PrefixCache(pool, "model", 2)
    first, second = cache.prefix(range(4), b""), cache.prefix(range(6), b"")
    blocks = pool.allocate(2)
    cache.index(first, range(4), blocks, 4)
    table = [*cache.claim(second), *pool.allocate(1)]
    pool.condemn(blocks, lambda _: None)
    cache.index(second, range(6), table, 6)
    assert cache.look_up(second).num_blocks == 0
