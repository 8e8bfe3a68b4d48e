"""How a READ that may travel over TCP is cut. No NIXL needed."""

from __future__ import annotations

import sys

import pytest

from hocket.environment import TCP_SEGMENT_BYTES
from hocket.errors import ConfigError
from hocket.kv import nixl_agent
from hocket.kv.nixl_agent import cut_for_tcp, load_bindings, new_agent_name, pieces_per_block


@pytest.mark.parametrize("block_bytes", [64, 64 * 1024, 61 * 64 * 576 * 2, 9 * 64 * 160 * 4])
def test_every_part_fits_one_message_and_all_bytes_are_covered(block_bytes: int) -> None:
    remote, local = [3, 4, 5, 9, 8, 7], [0, 1, 2, 3, 4, 5]
    piece_bytes = block_bytes // pieces_per_block(block_bytes)
    assert piece_bytes * pieces_per_block(block_bytes) == block_bytes
    moved: list[tuple[int, int]] = []
    for part in cut_for_tcp(remote, local, block_bytes):
        assert part.in_pieces
        assert len(part.local) * piece_bytes < TCP_SEGMENT_BYTES
        # NIXL posts a part as one operation only if it is one run on both sides.
        for side in (part.remote, part.local):
            assert side == list(range(side[0], side[0] + len(side)))
        moved += zip(part.remote, part.local, strict=True)
    num_pieces = pieces_per_block(block_bytes)
    pairs = zip(remote, local, strict=True)
    assert moved == [
        (r * num_pieces + i, n * num_pieces + i) for r, n in pairs for i in range(num_pieces)
    ]


def test_agents_never_share_a_name() -> None:
    names = {new_agent_name("imp") for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 31


def test_a_missing_wheel_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    with pytest.raises(ConfigError, match="pip install nixl-cu12"):
        load_bindings("")


def test_two_variants_never_meet_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13", nixl_agent)
    with pytest.raises(ConfigError, match="nixl_cu13 is loaded already"):
        load_bindings("12.8")
