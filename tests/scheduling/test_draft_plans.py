"""Claims about sharing drafts out: as good as trying everything, never worse than a constant."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling.draft_plans import Batch, DraftPlans, Price, Tables
from hocket.scheduling.draft_probes import Probes

MOST_ROWS = 64


@st.composite
def batches(draw: st.DrawFn, num_modules: tuple[int, ...] = (1,)) -> Batch:
    num_requests = draw(st.integers(0, 4))
    num_positions = draw(st.integers(1, 3))
    chances = st.sampled_from([0.0, 0.1, 0.5, 0.8, 0.95, 1.0]) | st.floats(0, 1)
    conditional = [[draw(chances) for _ in range(num_positions)] for _ in range(num_requests)]
    return Batch(
        np.array(conditional).reshape(num_requests, num_positions).cumprod(axis=1),
        np.array([draw(st.integers(0, 4)) for _ in range(num_requests)], dtype=np.int64),
        draw(st.sampled_from(num_modules)),
    )


@st.composite
def curves(draw: st.DrawFn) -> np.ndarray:
    """Any that never falls; a pass without rows costs what one row costs."""
    steps = draw(
        st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 3.0]), min_size=8, max_size=MOST_ROWS)
    )
    rises = np.array(steps + [0.2] * (MOST_ROWS - len(steps)))
    rises[0] = 0.0
    return draw(st.sampled_from([0.05, 1.0])) + rises.cumsum()


@st.composite
def lines(draw: st.DrawFn) -> np.ndarray:
    first, slope = draw(st.floats(0.01, 1)), draw(st.sampled_from([0.0, 0.01, 0.3]))
    return first + slope * np.maximum(np.arange(MOST_ROWS), 1)


def everything(plans: DraftPlans) -> list[tuple[tuple[int, ...], Price]]:
    """Every way to give drafts within the caps, with its price."""
    batch = plans.batch
    caps = np.minimum(batch.caps_B, plans.max_depth).tolist()
    ways = itertools.product(*(range(cap + 1) for cap in caps))
    return [(way, plans.price(np.array(way, dtype=np.int64), max(way, default=0))) for way in ways]


def speed(price: Price) -> float:
    return price.tokens / price.seconds


def pace(price: Price) -> float:
    return price.slowest / price.seconds


@given(batches(), lines(), curves())
@settings(max_examples=120, deadline=None)
def test_the_best_plan_is_the_best_of_all(
    batch: Batch, draft: np.ndarray, verify: np.ndarray
) -> None:
    plans = DraftPlans(batch, Tables(draft, verify))
    best = max(plans.prices, key=speed)
    others = everything(plans)
    assert speed(best) == pytest.approx(max(speed(price) for _, price in others))
    # Of equals the one with the fewest drafts.
    depth = plans.prices.index(best)
    fewest = min(sum(way) for way, price in others if speed(price) >= speed(best) * (1 - 1e-12))
    assert plans.drafts(depth).sum() <= fewest


@given(batches((1, 2)), curves(), curves(), st.sampled_from([0.0, 0.5, 2.0]))
@settings(max_examples=120, deadline=None)
def test_prices_are_those_of_the_plans_and_caps_hold(
    batch: Batch, draft: np.ndarray, verify: np.ndarray, target: float
) -> None:
    plans = DraftPlans(batch, Tables(draft, verify), target)
    for depth, price in enumerate(plans.prices):
        drafts_B = plans.drafts(depth)
        assert (drafts_B >= 0).all()
        assert (drafts_B <= np.minimum(batch.caps_B, depth)).all()
        expected = plans.price(drafts_B, depth)
        assert price.tokens == pytest.approx(expected.tokens)
        assert price.seconds == pytest.approx(expected.seconds)
        if target:
            assert price.slowest == pytest.approx(expected.slowest)


@given(batches((1, 2)), curves(), curves())
@settings(max_examples=120, deadline=None)
def test_no_constant_number_is_better_whatever_passes_cost(
    batch: Batch, draft: np.ndarray, verify: np.ndarray
) -> None:
    plans = DraftPlans(batch, Tables(draft, verify))
    best = max(speed(price) for price in plans.prices)
    for number in range(plans.max_depth + 1):
        constant = plans.price(np.minimum(batch.caps_B, number), number)
        assert best >= speed(constant) * (1 - 1e-9)


@given(batches(), lines(), curves(), st.floats(0.01, 5))
@settings(max_examples=120, deadline=None)
def test_the_slowest_request_meets_its_target_whenever_it_can(
    batch: Batch, draft: np.ndarray, verify: np.ndarray, target: float
) -> None:
    plans = DraftPlans(batch, Tables(draft, verify), target)
    others = [price for _, price in everything(plans)]
    fastest = max(pace(price) for price in others)
    meeting = [price for price in plans.prices if pace(price) >= target]
    if fastest >= target * (1 + 1e-9):
        assert meeting
    elif fastest < target and math.isfinite(fastest):
        assert max(map(pace, plans.prices)) == pytest.approx(fastest)
    if plans.prices[0] in meeting:
        assert max(map(speed, meeting)) >= speed(plans.prices[0])


def test_the_first_pass_counts_once_for_each_module() -> None:
    survivals_BK = np.array([[0.9, 0.8, 0.7]])
    tables = Tables(np.full(8, 0.1), np.full(8, 1.0))
    for num_modules, expected in [(1, [0, 0.1, 0.2, 0.3]), (2, [0, 0.2, 0.2, 0.3])]:
        plans = DraftPlans(Batch(survivals_BK, np.array([3]), num_modules), tables)
        assert [price.seconds - 1 for price in plans.prices] == pytest.approx(expected)


def test_a_target_for_the_slowest_gives_drafts_to_the_unlikely_too() -> None:
    survivals_BK = np.array([[0.9, 0.81], [0.3, 0.1]])
    batch = Batch(survivals_BK, np.array([2, 2]))
    tables = Tables(np.full(9, 0.01), np.array([1.0, 1.0, 1.0, 1.1, 1.3, 1.7, 1.9, 2.1, 2.3]))

    def best(target: float) -> list[int]:
        plans = DraftPlans(batch, tables, target)
        meeting = [price for price in plans.prices if pace(price) >= target]
        return plans.drafts(plans.prices.index(max(meeting, key=speed))).tolist()

    assert best(0.0) == best(0.7) == [2, 0]  # 2.8 tokens/s; 0.76 for the unlikely one
    assert best(0.8) == [1, 0]  # 2.6; 0.90
    assert best(0.95) == [1, 1]  # 2.4; 0.99
    assert best(1.0) == [0, 0]  # 2.0; 1.00


def test_the_first_pass_has_the_rows_that_accepted_drafts_leave_for_it() -> None:
    batch = Batch(np.array([[0.5, 0.25], [0.0, 0.0]]), np.array([2, 0]))
    plans = DraftPlans(batch, Tables(np.arange(9.0), np.full(9, 10.0)))
    # 1 + 0.5 rows; 1 + 0.75 rows, and a row in the second pass.
    assert plans.price(np.array([1, 0]), 1).seconds == pytest.approx(11.5)
    assert plans.price(np.array([2, 0]), 2).seconds == pytest.approx(12.75)


@given(batches((1, 2)), curves(), curves())
@settings(max_examples=120, deadline=None)
def test_a_newcomer_gets_what_a_request_like_it_has(
    batch: Batch, draft: np.ndarray, verify: np.ndarray
) -> None:
    plans = DraftPlans(batch, Tables(draft, verify))
    for depth in range(plans.max_depth + 1):
        drafts_B, least = plans.drafts(depth), plans.least_given(depth)
        most_B = np.minimum(batch.caps_B, depth)
        given = [s for row, k in zip(batch.survivals_BK, drafts_B, strict=True) for s in row[:k]]
        others = [
            s
            for row, k, most in zip(batch.survivals_BK, drafts_B, most_B, strict=True)
            for s in row[k:most]
        ]
        if not given:
            assert least == math.inf
        elif max(others, default=-1.0) < min(given):
            likely_BK = batch.survivals_BK >= least
            assert (np.minimum(likely_BK.sum(axis=1), most_B) == drafts_B).all()


def test_where_nobody_drafts_the_best_plan_with_drafts_is_tried() -> None:
    """Two modules: a first draft costs two passes and does not pay, the second comes for little."""
    batch = Batch(np.array([[0.5, 0.45], [0.2, 0.1]]), np.array([2, 2]), min_passes=2)
    plans = DraftPlans(batch, Tables(np.full(32, 0.35), np.full(32, 1.0)))
    assert plans.prices[0].tokens / plans.prices[0].seconds > speed(plans.prices[2])
    probes = Probes()
    probes.base_depth = 0
    pair = probes.plan(plans, np.ones(2, dtype=np.int64), 0.0)
    assert pair.more.drafts_B.tolist() == [2, 2]
    assert pair.more_depth == 2
