"""The formulae, by numbers that can be checked with a pencil."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Missing,
    PrefillLoad,
    StepCurve,
)
from control_plane.autoscaler.policy import Targets
from control_plane.autoscaler.sizing import DecodeSpeed, Need, decode_need, prefill_need

# A step takes 20 ms and 1 ms more for every request.
CURVE = StepCurve(((1, 0.021), (64, 0.084)))
TARGETS = Targets(ttft_s=1.0, inter_token_s=0.02, prompt_spread=1.0, max_kv_use=0.5)
QUIET = Arrivals(10.0, 0, 0)


def prefill(requests: int, prompt: int, queued: int = 0, drain_s: float = 30.0) -> Need:
    arrivals = Arrivals(10.0, requests, requests * prompt)
    load = PrefillLoad(queued_prompt_tokens=queued)
    need = prefill_need(arrivals, load, 10_000.0, TARGETS, drain_s)
    assert isinstance(need, Need)
    return need


def decode(load: DecodeLoad, arrivals: Arrivals = QUIET, **speed: float) -> Need:
    found = DecodeSpeed(step_curve=CURVE, tokens_per_step=speed.pop("gain", 2.0), **speed)
    need = decode_need(arrivals, load, found, TARGETS, 30.0)
    assert isinstance(need, Need)
    return need


def test_prefill_keeps_room_for_the_wait_that_the_ttft_allows() -> None:
    # 0.5 s alone leaves 0.5 s to wait: u = 0.5 / (0.5 + 0.5); 20,000 tokens/s arrive.
    assert prefill(40, 5000).workers == pytest.approx(2 / 0.5)
    # 0.1 s alone leaves 0.9: u would be 0.9, but max_utilisation is 0.85.
    assert prefill(200, 1000).workers == pytest.approx(2 / 0.85)


def test_a_queue_counts_only_above_what_the_ttft_allows() -> None:
    assert prefill(200, 1000, queued=18_000).workers == prefill(200, 1000).workers
    more = prefill(200, 1000, queued=18_000 + 300_000).workers - prefill(200, 1000).workers
    assert more == pytest.approx(1.0)
    later = prefill(200, 1000, queued=318_000, drain_s=300.0).workers
    assert later - prefill(200, 1000).workers == pytest.approx(0.1)
    assert prefill(200, 1000, 10**9, math.inf).workers == prefill(200, 1000).workers


def test_a_prompt_longer_than_the_ttft_is_out_of_reach_and_sized_for_throughput() -> None:
    need = prefill(10, 20_000)
    assert need.workers == pytest.approx(2 / TARGETS.min_utilisation)
    assert "out of reach" in need.unreachable
    assert not prefill(10, 5000).unreachable


def test_decode_runs_the_largest_batch_within_the_inter_token_target() -> None:
    # 2 tokens a step at 20 ms each allow 40 ms: 20 requests.
    assert decode(DecodeLoad(running_requests=50)).workers == pytest.approx(50 / 20)
    # Every draft refused: 20 ms do not even allow one.
    assert "out of reach" in decode(DecodeLoad(running_requests=50), gain=1.0).unreachable


def test_better_acceptance_needs_fewer_decode_workers() -> None:
    load = DecodeLoad(running_requests=100)
    needs = [decode(load, gain=gain).workers for gain in (1.5, 2.0, 2.5, 3.0)]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > needs[-1]


def test_requests_that_arrive_count_for_as_long_as_they_stay() -> None:
    # 10 a second for 100 tokens of 20 ms: 20 at once, one full worker.
    arrivals = Arrivals(10.0, 100, 1000)
    assert decode(DecodeLoad(), arrivals, output_tokens=100.0).workers == pytest.approx(1.0)


def test_a_request_stays_as_long_as_its_tokens_take_not_as_long_as_they_may() -> None:
    # A full batch of 64 gives a token in 42 ms where a second is allowed: 10/s stay 4.2 s each.
    arrivals, load = Arrivals(10.0, 100, 1000), DecodeLoad()
    speed = DecodeSpeed(step_curve=CURVE, tokens_per_step=2.0, output_tokens=100.0)
    need = decode_need(arrivals, load, speed, replace(TARGETS, inter_token_s=1.0), 30.0)
    assert isinstance(need, Need)
    assert need.workers == pytest.approx(10 * 4.2 / 64)


def test_waiting_requests_need_room_only_while_the_backlog_clears() -> None:
    # Each stays 2 s, and has 30 s to be gone: 2/30 of a place.
    load = DecodeLoad(waiting_requests=300)
    assert decode(load, output_tokens=100.0).workers == pytest.approx(300 * 2 / 30 / 20)


def test_decode_is_also_sized_by_its_blocks() -> None:
    load = DecodeLoad(running_requests=20, free_blocks=0, num_blocks=1000)
    need = decode(load, blocks_per_worker=500.0, blocks_per_request=100.0)
    assert need.workers == pytest.approx(20 * 100 / (500 * 0.5))
    assert "KV blocks" in need.why


def test_load_without_a_known_speed_is_missing_and_no_load_is_zero() -> None:
    arrivals = Arrivals(10.0, 1, 1000)
    unknown = Missing("never ran")
    assert isinstance(prefill_need(arrivals, PrefillLoad(), unknown, TARGETS, 30.0), Missing)
    assert isinstance(decode_need(arrivals, DecodeLoad(), DecodeSpeed(), TARGETS, 30.0), Missing)
    nothing = prefill_need(QUIET, PrefillLoad(), unknown, TARGETS, 30.0)
    assert nothing == decode_need(QUIET, DecodeLoad(), DecodeSpeed(), TARGETS, 30.0)
    assert isinstance(nothing, Need)
    assert nothing.workers == 0


def test_a_step_curve_is_read_between_and_beyond_its_points() -> None:
    assert CURVE.step_s(1) == 0.021
    assert CURVE.step_s(32) == pytest.approx(0.052)
    assert CURVE.step_s(100) == pytest.approx(0.120)
    assert CURVE.largest_batch(10.0, 1000) == 128
    assert CURVE.largest_batch(10.0, 40) == 40
    assert CURVE.largest_batch(0.020, 40) == 0
    assert StepCurve(((4, 0.02),)).step_s(8) == pytest.approx(0.04)
    assert StepCurve(((4, 0.02),)).step_s(1) == 0.02


def test_noise_in_a_step_curve_never_makes_a_larger_batch_look_faster() -> None:
    curve = StepCurve.measured([(8, 0.03), (1, 0.02), (4, 0.05), (0, 1.0), (2, math.nan)])
    assert curve == StepCurve(((1, 0.02), (4, 0.05), (8, 0.05)))
    assert isinstance(StepCurve.measured([]), Missing)
