"""A wrong byte is found, named by its block, and told from an owner that took its blocks back."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import xxhash

from hocket.kv.checksum import checksums_of, find_damage
from hocket.kv.memory_transfer import MemoryBlocks, MemoryExporter, MemoryFabric, MemoryImporter
from hocket.kv.nixl_agent import RegisteredPool
from hocket.kv.pool_bytes import blocks_of
from hocket.kv.transfer import ReadState

POOL = [bytes([block]) * 64 for block in range(8)]


class Two:
    """An exporter of POOL and an importer of as many empty blocks."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric(is_automatic=False)
        self.exporter = MemoryExporter(self.fabric, list(POOL), num_slots=1)
        self.importer = MemoryImporter(self.fabric, [bytes(64)] * 8)

    def read(self, remote: list[int], local: list[int], checksums: list[int]) -> ReadState:
        peer = self.exporter.describe()
        id = self.importer.read_blocks(peer, 0, remote, local, checksums)
        self.fabric.deliver(self.fabric.reads[0])
        self.result = self.importer.poll(id)
        return self.result.state


@pytest.fixture
def two() -> Two:
    return Two()


def test_a_checksum_is_the_xxh3_of_one_blocks_bytes() -> None:
    expected = [xxhash.xxh3_64_intdigest(POOL[2]), xxhash.xxh3_64_intdigest(POOL[0])]
    assert checksums_of(MemoryBlocks(list(POOL)), [2, 0]) == expected


def test_blocks_that_arrive_as_announced_are_done(two: Two) -> None:
    assert two.read([1, 5], [4, 0], two.exporter.checksums([1, 5])) is ReadState.DONE
    assert (two.importer.pool[4], two.importer.pool[0]) == (POOL[1], POOL[5])


def test_one_wrong_byte_is_found_and_its_block_named(two: Two) -> None:
    checksums = two.exporter.checksums([1, 5, 3])
    two.exporter.pool[5] = POOL[5][:-1] + b"\xff"
    assert two.read([1, 5, 3], [4, 6, 0], checksums) is ReadState.CORRUPT
    assert "1 of 3 blocks" in two.result.error
    assert "blocks 6" in two.result.error


def test_two_blocks_that_changed_places_are_found(two: Two) -> None:
    checksums = two.exporter.checksums([1, 5])
    assert two.read([5, 1], [4, 6], checksums) is ReadState.CORRUPT
    assert "blocks 4, 6" in two.result.error


def test_without_checksums_nothing_is_looked_at(two: Two) -> None:
    two.exporter.pool[5] = bytes(64)
    assert two.read([5], [4], []) is ReadState.DONE


def test_too_few_checksums_are_no_proof(two: Two) -> None:
    assert two.read([1, 5], [4, 6], two.exporter.checksums([1])) is ReadState.CORRUPT
    assert "1 checksums were announced for 2 blocks" in two.result.error


def test_a_corrupt_read_brings_its_epoch_so_that_a_tripped_fence_is_told_apart(two: Two) -> None:
    checksums = two.exporter.checksums([1])
    epoch = two.exporter.bump_slot_epoch(0)
    two.exporter.pool[1] = POOL[7]
    assert two.read([1], [4], checksums) is ReadState.CORRUPT
    assert two.result.epoch == epoch


def test_many_wrong_blocks_make_no_long_error() -> None:
    blocks = MemoryBlocks(list(POOL) * 10)
    text = find_damage(blocks, list(range(80)), [0] * 80)
    assert "80 of 80 blocks" in text
    assert len(text) < 200


def test_a_registered_pool_is_hashed_where_it_lies() -> None:
    values = np.arange(4 * 96, dtype=np.uint64).astype(np.uint8).reshape(4, 96)
    pool = RegisteredPool(values.ctypes.data, block_bytes=96, num_blocks=4)
    blocks = blocks_of(pool)
    assert blocks.read(2).ctypes.data == values.ctypes.data + 2 * 96
    assert checksums_of(blocks, [3]) == [xxhash.xxh3_64_intdigest(values[3].tobytes())]
    blocks.write(1, np.full(96, 7, np.uint8))
    assert ctypes.string_at(values.ctypes.data + 96, 96) == b"\x07" * 96
    assert values[0, 0] == 0
    assert values[2, 0] == 192
