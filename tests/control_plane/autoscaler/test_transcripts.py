"""Load over time, sizes and reasons, as transcripts; and what each of them must not lose."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.control_plane.autoscaler.fluid_world import FluidWorld
from tests.control_plane.autoscaler.transcript import FOLDER, replay

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@cache
def replayed(name: str) -> tuple[str, FluidWorld]:
    return replay((FOLDER / f"{name}.txt").read_text())


def changes(text: str, role: str) -> list[tuple[int, int]]:
    found = re.findall(rf"{role} (\d+) → (\d+):", text)
    return [(int(before), int(after)) for before, after in found]


@pytest.mark.parametrize("name", NAMES)
def test_the_autoscaler_answers_as_written_down(name: str) -> None:
    text, world = replayed(name)
    assert text == (FOLDER / f"{name}.txt").read_text()
    assert "nan" not in text
    assert "inf " not in text
    assert world.prefill.killed_while_starting == world.decode.killed_while_starting == 0


def test_g1_without_traffic_both_pools_end_at_the_floor() -> None:
    world = replayed("g1_zero_traffic")[1]
    assert (world.prefill.size, world.decode.size) == (1, 1)


def test_g2_without_metrics_nothing_changes_but_a_size_below_the_minimum() -> None:
    text = replayed("g2_missing_metrics")[0]
    silent = text[text.index("has_metrics=0") : text.index("has_metrics=1")]
    assert changes(silent, "prefill") == []
    assert changes(silent, "decode") == []
    assert "stays at 2" in silent


def test_g4_a_swing_about_the_threshold_changes_each_pool_at_most_once() -> None:
    text = replayed("g4_slow_start")[0]
    narrow = text[text.index("> swing") : text.rindex("> swing")]
    assert len(changes(narrow, "prefill")) <= 1
    assert len(changes(narrow, "decode")) <= 1
    wide = text[text.rindex("> swing") :]
    assert len(changes(wide, "prefill")) <= 3
    assert len(changes(wide, "decode")) <= 3


def test_g6_both_pools_start_in_the_same_decision() -> None:
    text = replayed("g6_from_zero")[0]
    assert changes(text, "prefill") == changes(text, "decode") == [(0, 1), (1, 0)]


def test_unreachable_targets_do_not_run_to_the_maximum() -> None:
    for name in ("unreachable", "unreachable_measured"):
        text, world = replayed(name)
        assert "out of reach" in text or "without effect" in text
        assert max(world.prefill.size, world.decode.size) <= 4 < world.limits.decode.max_workers
