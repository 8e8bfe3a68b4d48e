"""Claims about cost curves: never decreasing, steady against hiccups, quick after drift."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling.step_costs import CostCurve, Point, StepCosts, StepTimes

FLAT_THEN_LINEAR = [(1, 0.020), (16, 0.020), (32, 0.030), (64, 0.050)]

points = st.lists(st.tuples(st.integers(1, 600), st.floats(1e-5, 10.0)), min_size=1, max_size=8)
steps = st.lists(
    st.tuples(st.lists(st.integers(1, 2000), min_size=1, max_size=5), st.floats(1e-5, 10.0)),
    max_size=30,
)


def seconds(curve: CostCurve, rows: int) -> float:
    return float(curve.table(rows)[rows])


@given(points, steps)
@settings(max_examples=60, deadline=None)
def test_more_rows_never_cost_less(
    measured: list[Point], observed: list[tuple[list[int], float]]
) -> None:
    curve = CostCurve(measured)
    for rows, step_s in observed:
        curve.observe(rows, step_s)
        table = curve.table(1500).tolist()
        assert table[0] == table[1] > 0
        assert all(low <= high for low, high in itertools.pairwise(table))


def test_between_points_a_curve_is_linear_and_beyond_the_last_goes_on() -> None:
    curve = CostCurve(FLAT_THEN_LINEAR)
    for rows, expected_s in [(1, 0.020), (12, 0.020), (24, 0.025), (64, 0.050), (128, 0.090)]:
        assert seconds(curve, rows) == pytest.approx(expected_s)
    assert seconds(curve, 2000) == pytest.approx(0.050 + (2000 - 64) * 0.020 / 32)


def test_one_point_makes_a_flat_curve() -> None:
    curve = CostCurve([(4, 0.010)])
    assert seconds(curve, 1) == seconds(curve, 500) == pytest.approx(0.010)


@pytest.mark.parametrize("measured", [[], [(0, 1.0)], [(1, 0.0)], [(1, float("nan"))]])
def test_points_that_mean_nothing_are_refused(measured: list[Point]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(measured)


def test_points_that_fall_are_levelled() -> None:
    curve = CostCurve([(1, 0.030), (2, 0.010), (4, 0.040)])
    assert seconds(curve, 1) == seconds(curve, 2) == pytest.approx(0.020)


def test_a_hiccup_hardly_moves_a_curve() -> None:
    curve = CostCurve(FLAT_THEN_LINEAR)
    for _ in range(100):
        curve.observe([24], 0.025)
    curve.observe([24], 0.250)
    assert seconds(curve, 24) == pytest.approx(0.025, rel=0.01)


def test_a_wrong_start_is_corrected_by_few_steps() -> None:
    curve = CostCurve([(1, 0.001), (64, 0.001)])
    for _ in range(150):
        curve.observe([32], 0.010)
    assert seconds(curve, 32) == pytest.approx(0.010, rel=0.1)


def test_a_drift_is_followed_where_nothing_is_measured_too() -> None:
    curve = CostCurve(FLAT_THEN_LINEAR)
    for step in range(3000):
        curve.observe([24], 0.025 * (1 + step / 3000))
    assert seconds(curve, 24) == pytest.approx(0.050, rel=0.05)
    assert seconds(curve, 12) == pytest.approx(0.040, rel=0.2)
    assert seconds(curve, 64) == pytest.approx(0.100, rel=0.2)


def test_a_shift_of_all_costs_is_believed_after_some_steps() -> None:
    curve = CostCurve(FLAT_THEN_LINEAR)
    for _ in range(300):
        curve.observe([24], 0.025)
    for _ in range(10):
        curve.observe([24], 0.075)
    for rows, expected_s in [(12, 0.060), (24, 0.075), (64, 0.150)]:
        assert seconds(curve, rows) == pytest.approx(expected_s, rel=0.1)


def test_passes_of_different_rows_are_told_apart_by_steps_that_mix_them() -> None:
    curve = CostCurve([(1, 0.010), (64, 0.010)])
    for _ in range(400):
        curve.observe([48, 8, 8], 0.024 + 2 * 0.004)
        curve.observe([8, 4], 0.004 + 0.003)
        curve.observe([4], 0.003)
    for rows, expected_s in [(4, 0.003), (8, 0.004), (48, 0.024)]:
        assert seconds(curve, rows) == pytest.approx(expected_s, rel=0.1)


def test_a_step_without_drafts_says_nothing_about_them() -> None:
    costs = StepCosts.from_points(draft=[(1, 0.002)], verify=[(1, 0.020)])
    for _ in range(100):
        costs.observe([StepTimes([], 0.0, 8, 0.040, 8)])
    assert seconds(costs.draft, 8) == pytest.approx(0.002)
    assert seconds(costs.verify, 8) == pytest.approx(0.040, rel=0.02)


def measured(request_s: float, batches: Sequence[tuple[int, int]]) -> list[StepTimes]:
    """Steps of (requests, drafts of each), as a start-up takes."""
    return [
        StepTimes([], 0.0, size * (1 + k), 0.001 + 1e-4 * size * (1 + k) + request_s * size, size)
        for size, k in batches
    ]


AT_START = [(size, k) for size in (1, 2, 4, 8, 16, 32) for k in (0, 1)]


def test_what_requests_cost_beside_their_rows_is_told_from_steps_with_as_many_rows() -> None:
    costs = StepCosts.from_steps([(1, 0.002)], measured(2e-4, AT_START))
    assert costs.request_s == pytest.approx(2e-4)
    for num_requests, rows in [(16, 16), (16, 32), (2, 32), (32, 64)]:
        expected_s = 0.001 + 1e-4 * rows + 2e-4 * num_requests
        assert costs.verify_table(64, num_requests)[rows] == pytest.approx(expected_s)
    # Steps in service are taken apart in the same way: here all has become twice as slow.
    for _ in range(200):
        costs.observe(
            [step._replace(verify_s=2 * step.verify_s) for step in measured(2e-4, [(16, 1)])]
        )
    assert costs.verify_table(64, 16)[32] == pytest.approx(2 * (0.001 + 32e-4 + 32e-4), rel=0.03)


@pytest.mark.parametrize(
    "steps", [measured(2e-4, [(1, 0), (2, 2), (4, 4)]), measured(-2e-5, AT_START), []]
)
def test_where_nothing_is_told_of_requests_rows_cost_all(steps: list[StepTimes]) -> None:
    assert StepCosts.from_steps([(1, 0.002)], steps or measured(0.0, [(3, 0)])).request_s == 0.0


def test_requests_never_make_up_all_of_a_pass() -> None:
    """However wrong a measurement was, the curve of rows stays a curve."""
    steps = measured(2e-4, AT_START)
    steps[-2] = steps[-2]._replace(verify_s=1.0)
    costs = StepCosts.from_steps([(1, 0.002)], steps)
    assert costs.request_s > 2e-4
    assert all(s > 0 for _, s in costs.verify.points())
    costs.observe([StepTimes([], 0.0, 32, 1e-6, 32)])
    assert all(s > 0 for _, s in costs.verify.points())
