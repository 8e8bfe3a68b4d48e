"""What the hand-off benchmark makes of its measurements."""

from __future__ import annotations

import pytest
from handoff import verdict
from handoff_report import ReadPoint, Wait, format_read, format_wait, wait_points

FAST = {"memcpy": 1.0, "raw": 2.0, "bare": 2.0, "fenced": 2.5, "hocket": 2.5, "checked": 4.0}
READ = ReadPoint("cma", 4, 1000, "in order", 9, FAST | {"sums": 1.0}, FAST | {"sums": 1.0})


def wait(tokens: int, added_s: float, mode: str = "streaming") -> Wait:
    return Wait("cma", mode, tokens, prefill_s=2.0, second_s=0.01 + added_s, step_s=0.01)


def test_the_added_wait_is_what_a_plain_step_does_not_explain() -> None:
    one = wait(4096, added_s=0.02)
    assert one.added_s == pytest.approx(0.02)
    assert one.share == pytest.approx(0.01)


def test_points_are_medians_by_case() -> None:
    waits = [wait(256, s) for s in (0.5, 0.1, 0.2)] + [wait(256, 0.9, mode="whole")]
    streaming, whole = wait_points(waits)
    assert (streaming.rounds, whole.rounds) == (3, 1)
    assert streaming.added_s == pytest.approx(0.2)
    assert streaming.share == pytest.approx(0.1)
    assert "10.00%" in format_wait(streaming)


def test_goals_are_judged_by_long_streaming_prompts_and_by_raw_nixl() -> None:
    points = wait_points([wait(256, 0.9), wait(4096, 0.02), wait(8192, 0.9, mode="whole")])
    good = verdict(points, [READ])
    assert good["is_added_share_met"]
    assert good["worst_added_share"] == pytest.approx(0.01)
    assert good["worst_ratio_to_raw"] == pytest.approx(0.8)
    assert good["ratios_to_raw_met"] == 1
    assert not verdict(wait_points([wait(4096, 0.06)]), [READ])["is_added_share_met"]


def test_costs_of_fence_and_checksum_are_differences_of_ways() -> None:
    assert READ.cost("fenced", "bare") == pytest.approx(0.5)
    assert READ.cost("checked", "hocket") == pytest.approx(1.5)
    assert READ.ratio("raw") == pytest.approx(0.8)
    assert READ.ratio("raw_cut") == 0.0
    assert "20.0%" in format_read(READ)
