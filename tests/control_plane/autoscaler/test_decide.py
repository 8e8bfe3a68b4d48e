"""Single decisions that no transcript shows."""

from __future__ import annotations

from dataclasses import replace

from control_plane.autoscaler.decide import Decision, decide
from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
    StepCurve,
)
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from control_plane.autoscaler.state import State
from hocket.types import Role

LIMITS = Limits(up_window_s=0.0)
ONE = PoolWorkers(size=1, written_size=1, ready=1)
BUSY = Observations(
    now_s=15.0,
    prefill_workers=ONE,
    decode_workers=ONE,
    arrivals=Arrivals(15.0, 150, 600_000, output_tokens_per_request=200.0),
    prefill=PrefillLoad(10, 400_000, tokens_per_s=10_000.0, ttft_s=5.0),
    decode=DecodeLoad(
        running_requests=60,
        waiting_requests=20,
        tokens_per_step=2.0,
        step_curve=StepCurve(((1, 0.02), (64, 0.2))),
        inter_token_s=0.1,
    ),
)


def told(observations: Observations, limits: Limits = LIMITS) -> tuple[Decision, str]:
    decision = decide(observations, Targets(), limits, State())
    return decision, "\n".join(str(reason) for reason in decision.reasons)


def test_both_pools_grow_in_one_decision() -> None:
    decision, text = told(BUSY)
    assert (decision.sizes.prefill, decision.sizes.decode) == (5, 4), text


def test_the_same_window_and_state_give_the_same_decision() -> None:
    assert told(BUSY) == told(BUSY)


def test_a_queue_that_waits_for_decode_asks_for_no_prefill_workers() -> None:
    quiet = replace(BUSY, arrivals=Arrivals(15.0, 15, 60_000))
    grown, _ = told(quiet)
    assert isinstance(quiet.prefill, PrefillLoad)
    blocked, text = told(replace(quiet, prefill=replace(quiet.prefill, unread_share=0.5)))
    assert grown.sizes.prefill > blocked.sizes.prefill == 1
    assert "decode has yet to read 50%" in text


def test_nothing_more_is_asked_for_while_a_start_is_stuck() -> None:
    stuck = PoolWorkers(size=2, written_size=2, ready=1, starting_s=(1200.0,))
    decision, text = told(replace(BUSY, prefill_workers=stuck))
    assert decision.sizes.prefill == 2
    assert "no growth: 1 starting for more than 900 s" in text


def test_draining_workers_count_towards_the_maximum() -> None:
    limits = replace(LIMITS, prefill=PoolLimits(max_workers=4))
    draining = replace(ONE, draining=2)
    decision, text = told(replace(BUSY, prefill_workers=draining), limits)
    assert decision.sizes.prefill == 2
    assert "limit of 4, 2 draining" in text


def test_a_missing_pool_does_not_hold_the_other() -> None:
    decision, text = told(replace(BUSY, prefill=Missing("no prefill worker answers")))
    assert decision.sizes.prefill == 1
    assert decision.sizes.decode == 4
    assert "prefill: held: no prefill worker answers" in text


def test_work_at_decode_keeps_prefill_from_zero() -> None:
    limits = Limits(
        prefill=PoolLimits(min_workers=0),
        decode=PoolLimits(min_workers=0),
        down_window_s=0.0,
    )
    done = replace(BUSY, arrivals=Arrivals(15.0, 0, 0), prefill=PrefillLoad())
    decision, _ = told(done, limits)
    assert decision.sizes.prefill == 1
    idle, _ = told(replace(done, decode=DecodeLoad()), limits)
    assert (idle.sizes.prefill, idle.sizes.decode) == (0, 0)


def test_a_gap_longer_than_the_windows_never_shrinks_a_pool_at_once() -> None:
    many = PoolWorkers(size=5, written_size=5, ready=5)
    idle = replace(BUSY, decode_workers=many, arrivals=Arrivals(15.0, 0, 0), decode=DecodeLoad())
    state = told(idle)[0].state
    late = decide(replace(idle, now_s=10_000.0), Targets(), LIMITS, state)
    assert late.sizes.decode == 5


def test_an_operators_size_is_held_against_load_in_both_directions() -> None:
    edited = PoolWorkers(size=2, written_size=1, ready=2)
    decision, text = told(replace(BUSY, decode_workers=edited))
    assert decision.sizes.decode == 2
    assert "decode: an operator set 2: kept for another 3600 s" in text


def test_an_expired_hold_is_not_taken_for_a_new_edit() -> None:
    edited = replace(BUSY, decode_workers=PoolWorkers(size=2, written_size=1, ready=2))
    limits = replace(LIMITS, decode=PoolLimits(max_workers=2))
    state = State()
    for now_s in (0.0, 3600.0, 3615.0):
        decision = decide(replace(edited, now_s=now_s), Targets(), limits, state)
        state = decision.state
    assert not any("operator" in reason.text for reason in decision.reasons)


def test_reasons_name_their_pool() -> None:
    decision, _ = told(BUSY)
    assert {reason.role for reason in decision.reasons} == {Role.PREFILL, Role.DECODE}
    assert str(decision.reasons[0]).startswith("prefill: needs ")


def test_what_was_measured_about_workers_outlives_windows_without_work() -> None:
    state = told(BUSY)[0].state
    idle = replace(
        BUSY,
        arrivals=Arrivals(15.0, 0, 0),
        prefill=PrefillLoad(),
        decode=DecodeLoad(),
        now_s=30.0,
    )
    state = decide(idle, Targets(), LIMITS, state).state
    unmeasured = replace(
        BUSY,
        now_s=45.0,
        prefill=PrefillLoad(10, 400_000),
        decode=DecodeLoad(running_requests=60, waiting_requests=20),
    )
    sizes = decide(unmeasured, Targets(), LIMITS, state).sizes
    assert (sizes.prefill, sizes.decode) == (5, 4)
