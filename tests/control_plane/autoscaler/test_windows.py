"""From counters to observations, with windows made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.autoscaler.observations import Missing, Observations, PoolWorkers
from control_plane.autoscaler.windows import GatewayCounts, PoolReading, Reading, Windows
from hocket.types import Load, Role, WorkerDescription
from tests.cluster.worker_descriptions import describe

GATEWAY = GatewayCounts(
    "gateway-1",
    requests=100,
    prompt_tokens=9000,
    first_tokens=90,
    first_token_s=18.0,
    later_tokens=5000,
    later_token_s=50.0,
    ended_requests=80,
    output_tokens=4000,
    cached_tokens=1000,
)
LATER = GatewayCounts(
    "gateway-1",
    requests=130,
    prompt_tokens=15000,
    first_tokens=110,
    first_token_s=38.0,
    later_tokens=7000,
    later_token_s=110.0,
    ended_requests=100,
    output_tokens=6000,
    cached_tokens=1500,
)


def worker(worker_id: str, load: Load, **changes: object) -> WorkerDescription:
    return describe(worker_id, load=load, **changes)


def reading(
    now_s: float,
    registered: Sequence[WorkerDescription] | Missing = (),
    gateway: GatewayCounts | Missing = GATEWAY,
    ready: Sequence[str] = (),
) -> Reading:
    def pool(role: Role) -> PoolReading:
        names = frozenset(name for name in ready if name.startswith(role.value))
        return PoolReading(PoolWorkers(len(names), len(names), len(names)), names)

    return Reading(now_s, gateway, registered, pool(Role.PREFILL), pool(Role.DECODE))


def two(first: Reading, second: Reading) -> Observations:
    """The window between two readings."""
    windows = Windows()
    windows.observe(first)
    return windows.observe(second)


def test_the_first_reading_knows_nothing_of_the_past() -> None:
    observations = Windows().observe(reading(5.0))
    assert isinstance(observations.arrivals, Missing)
    assert not isinstance(observations.prefill, Missing)
    assert isinstance(observations.prefill.ttft_s, Missing)


def test_what_a_gateway_counted_becomes_means_of_the_window() -> None:
    observations = two(reading(5.0), reading(15.0, gateway=LATER))
    arrivals, prefill, decode = observations.arrivals, observations.prefill, observations.decode
    assert not isinstance(arrivals, Missing)
    assert not isinstance(prefill, Missing)
    assert not isinstance(decode, Missing)
    assert (arrivals.window_s, arrivals.requests, arrivals.prompt_tokens) == (10.0, 30, 5500)
    assert arrivals.output_tokens_per_request == pytest.approx(100.0)
    assert prefill.ttft_s == pytest.approx(1.0)
    assert decode.inter_token_s == pytest.approx(0.03)


def test_an_idle_window_is_zero_arrivals_and_missing_latencies() -> None:
    observations = two(reading(5.0), reading(15.0))
    assert not isinstance(observations.arrivals, Missing)
    assert observations.arrivals.requests == 0
    assert isinstance(observations.arrivals.output_tokens_per_request, Missing)
    assert not isinstance(observations.prefill, Missing)
    assert isinstance(observations.prefill.ttft_s, Missing)
    assert not isinstance(observations.decode, Missing)
    assert isinstance(observations.decode.inter_token_s, Missing)


def test_a_gateway_that_was_started_again_is_missing_for_one_window() -> None:
    fresh = GatewayCounts("gateway-2", requests=7, prompt_tokens=70)
    windows = Windows()
    windows.observe(reading(5.0))
    arrivals = windows.observe(reading(15.0, gateway=fresh)).arrivals
    assert arrivals == Missing("the gateway was started again")
    more = replace(fresh, requests=9, prompt_tokens=110)
    arrivals = windows.observe(reading(25.0, gateway=more)).arrivals
    assert not isinstance(arrivals, Missing)
    assert (arrivals.requests, arrivals.prompt_tokens) == (2, 40)


def test_a_gateway_that_did_not_answer_makes_the_next_window_longer() -> None:
    windows = Windows()
    windows.observe(reading(5.0))
    silent = windows.observe(reading(15.0, gateway=Missing("it hangs")))
    assert silent.arrivals == Missing("it hangs")
    assert not isinstance(silent.decode, Missing)
    assert silent.decode.inter_token_s == Missing("it hangs")
    arrivals = windows.observe(reading(25.0, gateway=LATER)).arrivals
    assert not isinstance(arrivals, Missing)
    assert (arrivals.window_s, arrivals.requests) == (20.0, 30)


def test_a_prefill_pool_is_summed_and_its_speed_is_per_second_of_work() -> None:
    names = ("prefill-0", "prefill-1")
    before = [worker(name, Load(busy_s=10.0, computed_prompt_tokens=5000)) for name in names]
    now = [
        worker(names[0], Load(1, 2, 300, 50, 100, 20, 0, busy_s=14.0, computed_prompt_tokens=9000)),
        worker(names[1], Load(0, 1, 100, 90, 100, 10, 0, busy_s=11.0, computed_prompt_tokens=6000)),
    ]
    observed = two(reading(0.0, before, ready=names), reading(10.0, now, ready=names)).prefill
    assert not isinstance(observed, Missing)
    assert (observed.waiting_requests, observed.queued_prompt_tokens) == (3, 400)
    assert observed.unread_share == pytest.approx(0.15)
    assert observed.tokens_per_s == pytest.approx(1000.0)


def decode_load(scale: int, **more: int) -> Load:
    """`scale` hundred steps of 20 ms with batches of 4 that emit 10 tokens each."""
    return Load(
        decode_steps=100 * scale,
        decode_step_s=2.0 * scale,
        decode_batch_sum=400 * scale,
        emitted_tokens=1000 * scale,
        busy_s=2.0 * scale,
        num_blocks=100,
        **more,
    )


def test_a_decode_pool_is_summed_and_its_steps_become_the_curve() -> None:
    before = [worker("decode-0", decode_load(1))]
    now = [worker("decode-0", decode_load(3, running_requests=4, waiting_requests=2))]
    now[0] = replace(now[0], load=replace(now[0].load, free_blocks=60))
    ready = ("decode-0",)
    observed = two(reading(0.0, before, ready=ready), reading(10.0, now, ready=ready)).decode
    assert not isinstance(observed, Missing)
    assert (observed.running_requests, observed.waiting_requests) == (4, 2)
    assert (observed.free_blocks, observed.num_blocks) == (60, 100)
    assert observed.blocks_per_request == pytest.approx(10.0)
    assert observed.tokens_per_step == pytest.approx(2.5)
    assert not isinstance(observed.step_curve, Missing)
    assert observed.step_curve.points == ((4, pytest.approx(0.02)),)


def test_the_curve_grows_with_windows_of_other_batches_and_forgets_old_ones() -> None:
    windows, ready = Windows(), ("decode-0",)
    load = Load(num_blocks=100)
    windows.observe(reading(0.0, [worker("decode-0", load)], ready=ready))
    for at_s, batch, step_s in ((10.0, 1, 0.01), (20.0, 8, 0.02), (30.0, 8, 0.04)):
        load = replace(
            load,
            decode_steps=load.decode_steps + 10,
            decode_step_s=load.decode_step_s + 10 * step_s,
            decode_batch_sum=load.decode_batch_sum + 10 * batch,
        )
        observed = windows.observe(reading(at_s, [worker("decode-0", load)], ready=ready)).decode
        assert not isinstance(observed, Missing)
    assert not isinstance(observed.step_curve, Missing)
    assert observed.step_curve.points == ((1, pytest.approx(0.01)), (8, pytest.approx(0.03)))
    observed = windows.observe(reading(615.0, [worker("decode-0", load)], ready=ready)).decode
    assert not isinstance(observed, Missing)
    assert not isinstance(observed.step_curve, Missing)
    assert observed.step_curve.points == ((8, pytest.approx(0.03)),)
    observed = windows.observe(reading(700.0, [worker("decode-0", load)], ready=ready)).decode
    assert not isinstance(observed, Missing)
    assert isinstance(observed.step_curve, Missing)


def test_ranks_of_a_group_are_one_worker_with_the_sum_of_their_batches() -> None:
    def ranks(scale: int) -> list[WorkerDescription]:
        return [
            worker(f"decode-0.{i}", decode_load(scale), group="decode-0", rank=i, group_size=2)
            for i in range(2)
        ]

    ready = ("decode-0",)
    observed = two(reading(0.0, ranks(1), ready=ready), reading(10.0, ranks(2), ready=ready)).decode
    assert not isinstance(observed, Missing)
    assert observed.tokens_per_step == pytest.approx(2.5)
    assert not isinstance(observed.step_curve, Missing)
    assert observed.step_curve.points == ((8, pytest.approx(0.02)),)


def test_a_later_life_of_a_worker_counts_from_the_next_window_on() -> None:
    ready = ("decode-0",)
    before = [worker("decode-0", decode_load(5), epoch=1)]
    now = [worker("decode-0", decode_load(1, running_requests=1), epoch=2)]
    observed = two(reading(0.0, before, ready=ready), reading(10.0, now, ready=ready)).decode
    assert not isinstance(observed, Missing)
    assert observed.running_requests == 1
    assert isinstance(observed.tokens_per_step, Missing)
    assert isinstance(observed.step_curve, Missing)


@pytest.mark.parametrize(
    ("registered", "why"),
    [
        (Missing("the registry is away"), "away"),
        ([], "decode-0, decode-1: not in the registry"),
        ([worker("decode-0", Load())], "decode-1: not in the registry"),
        (
            [
                worker("decode-0", Load()),
                worker("decode-1.0", Load(), group="decode-1", group_size=2),
            ],
            "decode-1: not in the registry",
        ),
        (
            [worker("decode-0", Load()), worker("decode-1", Load(), is_draining=True)],
            "decode-1: not in the registry",
        ),
    ],
)
def test_a_pool_of_which_a_worker_is_not_heard_is_missing_not_smaller(
    registered: list[WorkerDescription] | Missing, why: str
) -> None:
    ready = ("decode-0", "decode-1")
    observed = two(reading(0.0), reading(10.0, registered, ready=ready)).decode
    assert isinstance(observed, Missing)
    assert why in observed.why


def test_a_draining_or_starting_worker_is_no_part_of_the_load() -> None:
    leaving = worker("decode-1", Load(running_requests=9), is_draining=True)
    registered = [worker("decode-0", Load(running_requests=2)), leaving]
    observed = two(reading(0.0), reading(10.0, registered, ready=("decode-0",))).decode
    assert not isinstance(observed, Missing)
    assert observed.running_requests == 2


def test_an_empty_pool_is_idle_not_missing() -> None:
    observations = two(reading(0.0), reading(10.0))
    assert not isinstance(observations.decode, Missing)
    assert observations.decode.running_requests == 0
