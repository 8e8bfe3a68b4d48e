"""Claims about one rank's decisions: caps, one fixed number, targets, probes and their price."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling import draft_controller
from hocket.scheduling.draft_controller import (
    DraftController,
    DraftPolicy,
    DraftRequest,
    SpeedTarget,
    fixed_drafts,
)
from hocket.scheduling.draft_plans import DraftPlans
from hocket.scheduling.step_costs import StepCosts, StepTimes
from hocket.scheduling.survival import AcceptancePrior
from hocket.types import RequestKey
from tests.scheduling.draft_world import (
    UNIT_S,
    SimulatedRequest,
    SimulatedWorker,
    batch_of,
    compute_bound,
    memory_bound,
    one_layer,
)

Asked = tuple[RequestKey, DraftRequest]
NEVER = (0.0,) * 8
ALWAYS = (1.0,) * 8


def costs() -> StepCosts:
    return StepCosts.from_points(
        draft=[(1, 0.002), (64, 0.003)], verify=[(1, 0.020), (16, 0.020), (64, 0.060)]
    )


def requests(number: int, cap: int = 8) -> list[Asked]:
    return [(RequestKey(str(i)), DraftRequest(cap)) for i in range(number)]


policies = st.builds(
    DraftPolicy,
    st.integers(0, 4),
    st.sampled_from([True, True, False]),
    st.sampled_from([(), (SpeedTarget(2, 60.0), SpeedTarget(4, 30.0))]),
    st.sampled_from([1, 1, 2]),
)
# By key, as the most that a request may have does not change.
caps = st.dictionaries(st.sampled_from([RequestKey(name) for name in "abcdef"]), st.integers(0, 6))
described = st.builds(DraftRequest, st.just(0), st.integers(0, 16), st.booleans())


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[list[Asked], int, float]]:
    """Batch, luck and seconds of each step."""
    cap_of = draw(caps)
    some = st.sampled_from(sorted(cap_of, key=str)) if cap_of else st.nothing()
    keys = st.lists(some, unique=True)
    return [
        (
            [(key, draw(described)._replace(cap=cap_of[key])) for key in draw(keys)],
            draw(st.integers(0, 4)),
            draw(st.floats(1e-4, 1.0)),
        )
        for _ in range(draw(st.integers(0, 25)))
    ]


def play(policy: DraftPolicy, told: Sequence[tuple[list[Asked], int, float]]) -> list[list[int]]:
    """What a controller decides over these steps; each forgets whom the next one does not have."""
    controller = DraftController(policy, costs())
    decisions: list[list[int]] = []
    for running, luck, step_s in told:
        drafts = controller.allot(batch_of(running))
        decisions.append(drafts)
        rows = [len(running)] if any(drafts) else []
        times = StepTimes(rows, step_s, len(running) + sum(drafts), step_s, len(running))
        controller.observe_step(times)
        for (key, _), num_drafts in zip(running, drafts, strict=True):
            controller.observe(key, num_drafts, min(luck, num_drafts))
            if luck == 0:
                controller.forget(key)
    return decisions


def test_a_request_that_ended_may_come_back_within_the_time_of_a_plan() -> None:
    """One that was in the batch when it was made, and one that joined later."""
    controller = DraftController(DraftPolicy(3), StepCosts.from_points([(1, 1e-6)], [(1, 1e-3)]))
    for number in (8, 9, 9, 8, 9):
        running = requests(number)
        for (key, _), drafts in zip(running, controller.allot(batch_of(running)), strict=True):
            controller.observe(key, drafts, drafts)
        for key, _ in (running[0], running[-1]):
            controller.forget(key)


@given(policies, stories())
@settings(max_examples=60, deadline=None)
def test_drafts_keep_the_caps_and_the_same_story_gives_the_same_decisions(
    policy: DraftPolicy, told: list[tuple[list[Asked], int, float]]
) -> None:
    decisions = play(policy, told)
    for (running, _, _), drafts in zip(told, decisions, strict=True):
        most = [min(request.cap, policy.max_drafts) for _, request in running]
        assert len(drafts) == len(most)
        assert all(0 <= given <= cap for given, cap in zip(drafts, most, strict=True))
        if not policy.adaptive:
            assert drafts == most
    assert play(policy, told) == decisions


def test_a_fixed_number_is_kept_whatever_is_observed() -> None:
    controller = fixed_drafts(3)
    running = [*requests(2), (RequestKey("short"), DraftRequest(1))]
    for _ in range(50):
        assert controller.allot(batch_of(running)) == [3, 3, 1]
        controller.observe_step(StepTimes([3], 1.0, 10, 1.0, 3))
        for (key, _), drafts in zip(running, (3, 3, 1), strict=True):
            controller.observe(key, drafts, 0)
    assert controller.snapshot().acceptance_sampled[0] < 0.3


def test_without_drafts_allowed_nothing_is_allotted() -> None:
    assert DraftController(DraftPolicy(0), costs()).allot(batch_of(requests(3))) == [0, 0, 0]


def test_a_batch_of_nobody_gets_nothing() -> None:
    assert DraftController(DraftPolicy(3), costs()).allot(batch_of([])) == []


def one_of_two_kept(targets: tuple[SpeedTarget, ...] = ()) -> list[int]:
    """Drafts that a request gets which keeps all of them, and one that keeps none: mostly, in the
    end."""
    step_costs = StepCosts.from_points(draft=[(1, 0.002)], verify=[(1, 0.020), (11, 0.040)])
    controller = DraftController(DraftPolicy(4, targets=targets), step_costs)
    running = requests(2)
    decisions: list[tuple[int, ...]] = []
    for _ in range(120):
        drafts = controller.allot(batch_of(running))
        controller.observe(running[0][0], drafts[0], drafts[0])
        controller.observe(running[1][0], drafts[1], 0)
        decisions.append(tuple(drafts))
    return list(Counter(decisions[-20:]).most_common(1)[0][0])


def test_a_likely_request_gets_the_drafts_of_an_unlikely_one() -> None:
    assert one_of_two_kept() == [4, 0]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ((SpeedTarget(8, 20.0),), [4, 0]),
        ((SpeedTarget(8, 35.0),), [1, 0]),
        ((SpeedTarget(8, 44.0),), [0, 0]),
        ((SpeedTarget(8, 1000.0),), [0, 0]),
        ((SpeedTarget(8, 20.0), SpeedTarget(2, 44.0)), [0, 0]),
        ((SpeedTarget(1, 44.0),), [4, 0]),
    ],
)
def test_a_target_limits_what_the_slowest_request_pays_for_others(
    targets: tuple[SpeedTarget, ...], expected: list[int]
) -> None:
    assert one_of_two_kept(targets) == expected


def worker_with(chances: tuple[float, ...], number: int, *, linear: bool) -> SimulatedWorker:
    worker = SimulatedWorker(DraftPolicy(5), compute_bound if linear else memory_bound)
    worker.running = [SimulatedRequest(i, lambda _: chances, 10**6) for i in range(number)]
    return worker


@pytest.mark.parametrize("number", [1, 4, 32])
@pytest.mark.parametrize("linear", [False, True])
def test_probes_in_vain_cost_about_a_hundredth_of_step_time(number: int, linear: bool) -> None:
    worker = worker_with(NEVER, number, linear=linear)
    for _ in range(100):
        worker.step()
    probes, seconds = worker.controller.snapshot().probes, worker.seconds
    for _ in range(3000):
        for request in worker.running:
            request.pending_rows = 1  # it has nothing to catch up on
        worker.step()
    plain_s = 3000 * UNIT_S * (compute_bound(number) if linear else memory_bound(number))
    assert worker.controller.snapshot().probes > probes + 3
    assert 1.002 < (worker.seconds - seconds) / plain_s < 1.012


def test_a_text_that_becomes_easy_is_noticed() -> None:
    worker = worker_with(NEVER, 4, linear=False)
    for _ in range(500):
        worker.step()
        for request in worker.running:
            request.pending_rows = 1
    drafts = worker.controller.snapshot().allotted_drafts
    for request in worker.running:
        request.chances = lambda _: ALWAYS
    for _ in range(150):
        worker.step()
    for _ in range(10):
        drafts = worker.controller.snapshot().allotted_drafts
        worker.step()
        assert worker.controller.snapshot().allotted_drafts - drafts >= 12


def test_a_probe_of_those_who_wait_counts_what_they_have_to_catch_up_on() -> None:
    """The first draft pass of a request writes all its pending rows, and may cost as much."""

    def steps_between_probes(pending_rows: int) -> int:
        draft = [(rows, UNIT_S * one_layer(rows)) for rows in (1, 1000)]
        verify = [(rows, UNIT_S * memory_bound(rows)) for rows in (1, 16, 64)]
        controller = DraftController(
            DraftPolicy(3), StepCosts.from_points(draft, verify), AcceptancePrior((0.01,), 1000.0)
        )
        running = batch_of([(key, DraftRequest(8, pending_rows)) for key, _ in requests(16)])
        return next(step for step in range(10_000) if any(controller.allot(running)))

    assert steps_between_probes(60) > 2 * steps_between_probes(1)


def test_the_snapshot_tells_what_is_known_and_done() -> None:
    controller = DraftController(DraftPolicy(3), costs(), AcceptancePrior((0.7, 0.5)))
    allotted = sum(sum(controller.allot(batch_of(requests(2)))) for _ in range(5))
    snapshot = controller.snapshot()
    assert snapshot.steps == 5
    assert snapshot.allotted_drafts == allotted > 0
    assert snapshot.acceptance_greedy == snapshot.acceptance_sampled == (0.7, 0.5, 0.5)
    assert dict(snapshot.draft_costs)[1] == pytest.approx(0.002)
    assert dict(snapshot.verify_costs)[64] == pytest.approx(0.060)


def test_luck_with_drafts_is_not_asked_for() -> None:
    """No chance: the state of Python's generator does not matter."""
    told = [(requests(3), 1, 0.02)] * 40
    random.seed(1)
    first = play(DraftPolicy(4), told)
    random.seed(2)
    assert play(DraftPolicy(4), told) == first


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of the batch of each plan that is made."""
    sizes: list[int] = []

    class Counted(DraftPlans):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            sizes.append(self.batch.size)

    monkeypatch.setattr(draft_controller, "DraftPlans", Counted)
    return sizes


def test_short_steps_keep_a_plan_until_a_request_comes_or_goes(made: list[int]) -> None:
    """A decision takes as long as a part of a step that takes a few milliseconds."""

    def run(controller: DraftController, running: list[Asked], steps: int) -> int:
        made.clear()
        for _ in range(steps):
            drafts = controller.allot(batch_of(running))
            for (key, _), num_drafts in zip(running, drafts, strict=True):
                controller.observe(key, num_drafts, num_drafts)
        return len(made)

    def short(step_s: float) -> DraftController:
        return DraftController(DraftPolicy(3), StepCosts.from_points([(1, 1e-6)], [(1, step_s)]))

    assert run(short(0.22), requests(2), 50) == 50
    controller = short(0.02)
    assert 5 <= run(controller, requests(2), 50) <= 6
    assert run(controller, requests(3), 1) == 1
    assert run(controller, requests(3, cap=1), 1) == 0
    controller.forget(RequestKey("2"))
    assert run(controller, requests(2), 1) == 1
    # Outcomes of the steps between are all counted.
    assert controller.snapshot().acceptance_sampled[0] > 0.9


def test_requests_come_and_go_within_the_time_of_a_plan(made: list[int]) -> None:
    """In a large batch some request ends with nearly every step."""
    controller = DraftController(DraftPolicy(3), StepCosts.from_points([(1, 1e-6)], [(1, 0.002)]))
    probes_before = 0
    for serial in range(300):
        running = [(RequestKey(str(serial + i)), DraftRequest(8 if i else 1)) for i in range(16)]
        drafts = controller.allot(batch_of(running))
        for (key, _), num_drafts in zip(running, drafts, strict=True):
            controller.observe(key, num_drafts, num_drafts)
        controller.forget(running[0][0])
        probes = controller.snapshot().probes
        # The last one is new, and drafts cost nothing.
        assert drafts[-2:] == [3, 3] or probes > probes_before, serial
        probes_before = probes
    assert len(made) <= 4
    # As many more, or fewer, are another batch.
    assert len(controller.allot(batch_of(requests(18)))) == 18
    assert len(controller.allot(batch_of(requests(15)))) == 15
    assert made[-2:] == [18, 15]
