"""What holds for every window: limits, steps, no NaN, more load never fewer workers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.autoscaler.decide import Decision, decide
from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
    StepCurve,
    metric,
)
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from control_plane.autoscaler.state import State
from hocket.types import Role

GONE = Missing("gone")


def figures(most: float) -> st.SearchStrategy[float]:
    return st.floats(0, most, allow_subnormal=False)


metrics = st.one_of(
    st.just(GONE),
    st.one_of(st.none(), st.floats()).map(lambda value: metric(value, "it")),
    figures(1e5),
)
curves = st.one_of(
    st.just(GONE),
    st.lists(st.tuples(st.integers(1, 128), st.floats(1e-4, 1.0)), max_size=5).map(
        StepCurve.measured
    ),
)


@st.composite
def pool_limits(draw: st.DrawFn) -> PoolLimits:
    low = draw(st.integers(0, 6))
    return PoolLimits(
        min_workers=low,
        max_workers=draw(st.integers(max(low, 1), 20)),
        max_step_up=draw(st.integers(1, 6)),
        max_step_down=draw(st.integers(1, 6)),
        max_starting=draw(st.integers(1, 6)),
    )


@st.composite
def pool_workers(draw: st.DrawFn) -> PoolWorkers:
    size = draw(st.integers(0, 24))
    starting_s = draw(st.lists(figures(2000), max_size=min(size, 3)))
    return PoolWorkers(
        size=size,
        written_size=draw(st.sampled_from([size, size, size, size + 1])),
        ready=size - len(starting_s),
        starting_s=tuple(starting_s),
        draining=draw(st.integers(0, 3)),
        start_up_s=draw(figures(900)),
    )


@st.composite
def observations(draw: st.DrawFn, now_s: float) -> Observations:
    num_blocks = draw(st.integers(0, 10_000))
    arrivals = Arrivals(
        window_s=draw(st.floats(1, 60)),
        requests=draw(st.integers(0, 2000)),
        prompt_tokens=draw(figures(1e7)),
        waiting_requests=draw(st.integers(0, 200)),
        output_tokens_per_request=draw(metrics),
    )
    prefill = PrefillLoad(
        waiting_requests=draw(st.integers(0, 500)),
        queued_prompt_tokens=draw(figures(1e7)),
        unread_share=draw(st.floats(0, 1)),
        tokens_per_s=draw(metrics),
        ttft_s=draw(metrics),
    )
    decode = DecodeLoad(
        running_requests=draw(st.integers(0, 1000)),
        waiting_requests=draw(st.integers(0, 1000)),
        free_blocks=draw(st.integers(0, num_blocks)),
        num_blocks=num_blocks,
        blocks_per_request=draw(metrics),
        tokens_per_step=draw(metrics),
        step_curve=draw(curves),
        inter_token_s=draw(metrics),
    )
    return Observations(
        now_s=now_s,
        prefill_workers=draw(pool_workers()),
        decode_workers=draw(pool_workers()),
        arrivals=draw(st.sampled_from([arrivals, arrivals, arrivals, GONE])),
        prefill=draw(st.sampled_from([prefill, prefill, prefill, GONE])),
        decode=draw(st.sampled_from([decode, decode, decode, GONE])),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Observations]:
    now_s, windows = 0.0, list[Observations]()
    for _ in range(draw(st.integers(1, 4))):
        now_s += draw(st.sampled_from([1.0, 15.0, 100.0, 1000.0]))
        windows.append(draw(observations(now_s)))
    return windows


limits = st.builds(
    Limits,
    prefill=pool_limits(),
    decode=pool_limits(),
    up_window_s=st.sampled_from([0.0, 30.0]),
    down_window_s=st.sampled_from([0.0, 300.0]),
    trial_after_s=st.sampled_from([0.0, 120.0]),
)
targets = st.builds(
    Targets,
    ttft_s=st.floats(0.01, 10),
    inter_token_s=st.floats(0.001, 1),
    prompt_spread=st.floats(0, 4),
    max_batch=st.integers(1, 256),
)


def run(windows: list[Observations], wanted: Targets, bounds: Limits) -> tuple[State, Decision]:
    state = State()
    for window in windows[:-1]:
        state = decide(window, wanted, bounds, state).state
    return state, decide(windows[-1], wanted, bounds, state)


@given(histories(), targets, limits)
@settings(max_examples=30, deadline=None)
def test_sizes_keep_the_limits_move_by_a_step_and_have_reasons(
    windows: list[Observations], wanted: Targets, bounds: Limits
) -> None:
    _, decision = run(windows, wanted, bounds)
    last = windows[-1]
    for role, size, workers, own, load in (
        (Role.PREFILL, decision.sizes.prefill, last.prefill_workers, bounds.prefill, last.prefill),
        (Role.DECODE, decision.sizes.decode, last.decode_workers, bounds.decode, last.decode),
    ):
        before = min(max(workers.size, own.min_workers), own.max_workers)
        assert own.min_workers <= size <= own.max_workers
        assert -own.max_step_down <= size - before <= own.max_step_up
        if size > before:
            assert len(workers.starting_s) + size - before <= own.max_starting
            assert size + workers.draining <= own.max_workers
        if isinstance(load, Missing) or isinstance(last.arrivals, Missing):
            assert size >= before
        said = [reason.text for reason in decision.reasons if reason.role is role]
        assert said
        assert all(said)
        assert not any("nan" in text for text in said)


def louder(window: Observations, factor: float, more: dict[str, int]) -> Observations:
    """The same window with more of every kind of load, prompts being as long as before."""
    arrivals, prefill, decode = window.arrivals, window.prefill, window.decode
    if not isinstance(arrivals, Missing):
        arrivals = replace(
            arrivals,
            requests=arrivals.requests * factor,
            prompt_tokens=arrivals.prompt_tokens * factor,
            waiting_requests=arrivals.waiting_requests + more["gateway"],
        )
    if not isinstance(prefill, Missing):
        prefill = replace(
            prefill,
            waiting_requests=prefill.waiting_requests + more["queued"],
            queued_prompt_tokens=prefill.queued_prompt_tokens + 1000 * more["queued"],
        )
    if not isinstance(decode, Missing):
        decode = replace(
            decode,
            running_requests=decode.running_requests + more["running"],
            waiting_requests=decode.waiting_requests + more["waiting"],
            free_blocks=max(0, decode.free_blocks - more["blocks"]),
        )
    return replace(window, arrivals=arrivals, prefill=prefill, decode=decode)


additions = st.fixed_dictionaries(
    {
        name: st.sampled_from([0, 0, 1, 10, 500])
        for name in ("gateway", "queued", "running", "waiting", "blocks")
    }
)


@given(histories(), targets, limits, st.sampled_from([1.0, 1.1, 2.0, 30.0]), additions)
@settings(max_examples=50, deadline=None)
def test_more_load_never_gives_fewer_workers(
    windows: list[Observations], wanted: Targets, bounds: Limits, factor: float, more: Any
) -> None:
    state, decision = run(windows, wanted, bounds)
    more_load = decide(louder(windows[-1], factor, more), wanted, bounds, state)
    assert more_load.sizes.prefill >= decision.sizes.prefill
    assert more_load.sizes.decode >= decision.sizes.decode


@given(st.one_of(st.none(), st.floats()))
def test_a_metric_is_a_number_or_missing(value: float | None) -> None:
    found = metric(value, "it")
    if isinstance(found, Missing):
        assert "it" in found.why
    else:
        assert math.isfinite(found)
        assert found >= 0
