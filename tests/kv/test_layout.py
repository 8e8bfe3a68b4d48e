"""KV layout arithmetic."""

from __future__ import annotations

import pytest

from hocket.kv.layout import KVLayout

LAYOUT = KVLayout(block_tokens=64, num_layers=9, entry_width=160, dtype="bfloat16")


def test_a_block_holds_all_layers_one_after_the_other() -> None:
    assert LAYOUT.entry_bytes == 320
    assert LAYOUT.layer_bytes == 64 * 320
    assert LAYOUT.block_bytes == 9 * LAYOUT.layer_bytes
    assert [LAYOUT.layer_offset(i) for i in (0, 1, 8)] == [0, 20480, 8 * 20480]


def test_offsets_beyond_32_bits_are_exact() -> None:
    deep = KVLayout(block_tokens=64, num_layers=62, entry_width=576, dtype="float32")
    assert 10**6 * deep.block_bytes + deep.layer_offset(61) == 9142272000000 + 61 * 147456


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert LAYOUT.blocks_for(tokens) == blocks


def test_descriptions_differ_when_any_size_differs() -> None:
    others = [
        KVLayout(block_tokens=32, num_layers=9, entry_width=160, dtype="bfloat16"),
        KVLayout(block_tokens=64, num_layers=8, entry_width=160, dtype="bfloat16"),
        KVLayout(block_tokens=64, num_layers=9, entry_width=161, dtype="bfloat16"),
        KVLayout(block_tokens=64, num_layers=9, entry_width=160, dtype="float32"),
    ]
    assert len({layout.describe() for layout in [LAYOUT, *others]}) == 5


def test_impossible_layouts_cannot_be_built() -> None:
    with pytest.raises(AssertionError):
        KVLayout(block_tokens=64, num_layers=0, entry_width=160, dtype="bfloat16")
    with pytest.raises(AssertionError):
        KVLayout(block_tokens=64, num_layers=9, entry_width=160, dtype="int8")
    with pytest.raises(AssertionError):
        LAYOUT.layer_offset(9)
