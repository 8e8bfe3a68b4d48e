"""The cache's memory: views and raw bytes agree."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hocket.kv.layout import KVLayout
from hocket.kv.paged_cache import PagedCache


@pytest.fixture(params=["float32", "bfloat16"])
def cache(request: pytest.FixtureRequest) -> PagedCache:
    layout = KVLayout(block_tokens=4, num_layers=3, entry_width=5, dtype=request.param)
    return PagedCache(layout, 6, "cpu")


def test_an_entry_lies_where_the_layout_says(cache: PagedCache) -> None:
    layout = cache.layout
    entry = torch.arange(1.0, 6.0, dtype=cache.dtype)
    cache.layer_view(2)[4, 3] = entry
    address = (
        cache.base_address
        + 4 * layout.block_bytes
        + layout.layer_offset(2)
        + 3 * layout.entry_bytes
    )
    raw = bytearray(ctypes.string_at(address, layout.entry_bytes))
    assert torch.equal(torch.frombuffer(raw, dtype=cache.dtype), entry)
    assert cache.storage.count_nonzero() == cache.storage[4].count_nonzero() > 0


def test_rows_and_views_are_the_same_memory(cache: PagedCache) -> None:
    for layer in range(3):
        row = 5 * cache.block_stride_rows + 2
        cache.layer_rows(layer)[row] = float(layer + 1)
    for layer in range(3):
        assert torch.all(cache.layer_view(layer)[5, 2] == layer + 1)
        assert cache.layer_view(layer).count_nonzero() == 5


def test_copying_a_blocks_bytes_copies_its_entries(cache: PagedCache) -> None:
    for layer in range(3):
        cache.layer_view(layer)[1].normal_()
    cache.storage[3] = cache.storage[1]
    for layer in range(3):
        assert torch.equal(cache.layer_view(layer)[3], cache.layer_view(layer)[1])


def test_the_pool_covers_the_cache_and_memory_is_page_aligned(cache: PagedCache) -> None:
    assert cache.pool.num_free == cache.num_blocks == 6
    assert cache.base_address % 4096 == 0
    assert cache.storage.is_contiguous()
    assert cache.storage.shape == (6, cache.layout.block_bytes)


def test_the_scratch_row_lies_behind_every_block_in_every_layer(cache: PagedCache) -> None:
    """So what is written there reaches neither a block nor what a transfer registers."""
    layout = cache.layout
    for layer in range(layout.num_layers):
        row = cache.layer_rows(layer)[cache.scratch_row]
        row.fill_(1.0)
        end = cache.base_address + cache.num_blocks * layout.block_bytes
        assert row.data_ptr() == end + layout.layer_offset(layer)
        assert cache.layer_view(layer).shape[0] == cache.num_blocks
    assert cache.storage.count_nonzero() == 0
    assert cache.storage.nbytes == cache.num_blocks * layout.block_bytes


def test_a_cleared_block_is_zero_and_its_neighbours_stay(cache: PagedCache) -> None:
    cache.storage.fill_(0xFF)
    cache.clear_block(2)
    assert cache.storage.any(1).tolist() == [True, True, False, True, True, True]
