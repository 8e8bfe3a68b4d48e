"""Claims about survival estimates: from the prior to a request's own history."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling.survival import AcceptancePrior, SurvivalEstimates
from hocket.types import RequestKey

A, B, C = (RequestKey(name) for name in "abc")


def survival(estimates: SurvivalEstimates, key: RequestKey, is_greedy: bool = False) -> list[float]:
    return estimates.survivals([key], [is_greedy])[0].tolist()


def feed(estimates: SurvivalEstimates, key: RequestKey, chance: float, steps: int) -> None:
    """So many steps of three drafts each."""
    draw = random.Random(key.request_id)
    for _ in range(steps):
        survival(estimates, key)
        accepted = 0
        while accepted < 3 and draw.random() < chance:
            accepted += 1
        estimates.observe(key, 3, accepted)


def test_a_new_request_starts_at_the_prior() -> None:
    estimates = SurvivalEstimates(AcceptancePrior((0.8, 0.5)), 3)
    assert survival(estimates, A) == pytest.approx([0.8, 0.4, 0.2])


def test_a_request_with_a_history_follows_itself() -> None:
    estimates = SurvivalEstimates(AcceptancePrior(), 3)
    feed(estimates, A, 0.9, 200)
    feed(estimates, B, 0.2, 200)
    assert survival(estimates, A)[0] == pytest.approx(0.9, abs=0.1)
    assert survival(estimates, B)[0] == pytest.approx(0.2, abs=0.1)


def test_a_new_request_is_expected_to_be_like_the_others() -> None:
    estimates = SurvivalEstimates(AcceptancePrior((0.9,)), 3)
    for name in "abcdef":
        feed(estimates, RequestKey(name), 0.4, 60)
    assert survival(estimates, RequestKey("new"))[0] == pytest.approx(0.4, abs=0.06)


def test_what_a_request_shows_counts_less_where_all_are_alike() -> None:
    def moved(others: tuple[float, float]) -> float:
        """How far eight refused drafts move a new request's first survival."""
        estimates = SurvivalEstimates(AcceptancePrior((0.5,)), 3)
        for number in range(60):
            feed(estimates, RequestKey(str(number)), others[number % 2], 40)
        before = survival(estimates, A)[0]
        for _ in range(8):
            estimates.observe(A, 1, 0)
        return (before - survival(estimates, A)[0]) / before

    assert moved((0.1, 0.9)) > 0.7
    assert moved((0.5, 0.5)) < 0.3


def test_greedy_and_sampled_requests_have_priors_of_their_own() -> None:
    estimates = SurvivalEstimates(AcceptancePrior((0.5,)), 3)
    for number in range(30):
        key = RequestKey(str(number))
        for _ in range(10):
            estimates.survivals([key], [True])
            estimates.observe(key, 3, 3)
    assert survival(estimates, A, is_greedy=True)[0] > 0.9
    assert survival(estimates, B, is_greedy=False)[0] == pytest.approx(0.5)
    assert estimates.prior(is_greedy=True)[0] > 0.9


def test_a_position_is_observed_only_behind_accepted_drafts() -> None:
    estimates = SurvivalEstimates(AcceptancePrior((0.5,)), 3)
    survival(estimates, A)
    for _ in range(20):
        estimates.observe(A, 3, 0)
    first, second, third = survival(estimates, A)
    assert first < 0.2
    assert second / first == pytest.approx(0.5)
    assert third / second == pytest.approx(0.5)


def test_a_forgotten_request_leaves_nothing_but_the_prior() -> None:
    estimates = SurvivalEstimates(AcceptancePrior((0.5,)), 3)
    feed(estimates, A, 0.0, 30)
    estimates.forget(A)
    estimates.forget(A)
    assert len(estimates) == 0
    assert survival(estimates, A) == pytest.approx(survival(estimates, B))
    with pytest.raises(KeyError):
        estimates.observe(C, 3, 1)


def test_rows_of_forgotten_requests_are_used_again() -> None:
    estimates = SurvivalEstimates(AcceptancePrior(), 3)
    for number in range(500):
        key = RequestKey(str(number))
        feed(estimates, key, 0.5, 1)
        if number >= 5:
            estimates.forget(RequestKey(str(number - 5)))
    assert len(estimates) == 5
    assert estimates._counts_RK.shape[0] == 16


def test_after_long_without_drafts_a_few_outcomes_are_enough() -> None:
    def after(idle_steps: int) -> float:
        estimates = SurvivalEstimates(AcceptancePrior(), 3)
        feed(estimates, A, 0.1, 300)
        for _ in range(idle_steps):
            survival(estimates, A)
        for _ in range(5):
            estimates.observe(A, 1, 1)
        return survival(estimates, A)[0]

    assert after(1000) > after(0) + 0.15


outcomes = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.integers(0, 4), st.integers(0, 4)), max_size=40
)


@given(outcomes, st.lists(st.floats(0, 1), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_survivals_are_chances_that_fall_with_depth(
    told: list[tuple[RequestKey, int, int]], prior: list[float]
) -> None:
    estimates = SurvivalEstimates(AcceptancePrior(tuple(prior)), 4)
    for key, drafted, accepted in told:
        survivals_BK = estimates.survivals([A, B, C], [False, True, False])
        assert (survivals_BK >= 0).all()
        assert (survivals_BK <= 1).all()
        assert (np.diff(survivals_BK, axis=1) <= 0).all()
        estimates.observe(key, drafted, min(accepted, drafted))


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_it_does_not_matter_who_is_told_first(accepted: list[int]) -> None:
    found: list[list[float]] = []
    for order in ([0, 1, 2], [2, 0, 1]):
        estimates = SurvivalEstimates(AcceptancePrior(), 4)
        estimates.survivals([A, B, C], [False] * 3)
        for which in order:
            estimates.observe((A, B, C)[which], 4, accepted[which])
        found.append(estimates.survivals([A, B, C], [False] * 3).ravel().tolist())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
