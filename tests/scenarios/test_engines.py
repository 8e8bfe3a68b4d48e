"""Scenarios that take both engines and a model: what a client sees, and what is computed for it.

The `Pair` of the engines' own tests plays gateway and network. The model runs in batch-invariant
mode, so every output that a client gets equals that of the engine in one process, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hocket.request_params import SamplingParams
from hocket.types import (
    Begun,
    Failed,
    Finished,
    FinishReason,
    Joined,
    Leg,
    RequestKey,
    StartRequest,
)

MakePair = Callable[..., Any]
MakeRequest = Callable[..., StartRequest]

GREEDY = SamplingParams(temperature=0.0)


def fail_all_reads(pair: Any) -> None:
    for read in list(pair.fabric.reads):
        pair.fabric.fail(read)


# A3: the client leaves before the first token.


@pytest.mark.parametrize("is_begun", [False, True], ids=["queued", "half prefilled"])
def test_a3_a_cancelled_prompt_is_computed_no_further_and_holds_up_nobody(
    make_pair: MakePair, make_request: MakeRequest, reference: Any, is_begun: bool
) -> None:
    pair = make_pair(max_batch=1)
    first = pair.start(make_request("first", 40, 2))
    if is_begun:
        pair.run_until(lambda: first.is_over)
    gone = pair.start(make_request("gone", 480, 20))
    behind = make_request("behind", 40, 4)
    outcome = pair.start(behind)
    pair.run_until(lambda: not is_begun or pair.prefill_load.computed_prompt_tokens > 40)
    computed = pair.prefill_load.computed_prompt_tokens
    assert bool(gone.find(Begun)) == is_begun
    pair.cancel(RequestKey("gone"))
    pair.run_until(lambda: outcome.is_over)
    assert outcome.token_ids == reference.run([behind])[0].token_ids
    pair.run_until(lambda: first.is_over)
    pair.settle()
    unfinished = 0 if is_begun else 40
    assert pair.prefill_load.computed_prompt_tokens == computed + unfinished + 40
    assert gone.tokens == {}
    pair.assert_nothing_is_held()


# A4: prefill gives up.


def test_a4_a_prompt_that_prefill_cannot_compute_fails_on_both_sides_in_the_same_turn(
    make_pair: MakePair, make_request: MakeRequest
) -> None:
    pair = make_pair(can_recompute=False)
    outcome = pair.start(make_request("a", 300, 20))
    pair.run_until(lambda: pair.imports.counters.reads > 0)

    def out_of_memory(_chunks: Any) -> Any:
        raise RuntimeError("no memory for this chunk")

    pair.prefill_runner.prefill = out_of_memory
    pair.run_until(lambda: bool(outcome.find(Failed)), max_turns=3)
    pair.run_until(lambda: len(outcome.find(Failed)) == 2, max_turns=3)
    pair.settle()
    pair.assert_nothing_is_held()


# A6: an attempt that is here already.


def refuse_a_second_start(
    pair: Any, request: StartRequest, outcome: Any, engine: Any, where: str
) -> None:
    """The same attempt comes again; the first one goes on."""
    engine.take(request, pair.now)
    pair.run_until(lambda: bool(outcome.find(Failed)))
    (failed,) = outcome.find(Failed)
    assert f"new: this attempt is {where}" in failed.message
    pair.fabric.is_automatic = True
    pair.run_until(lambda: len(outcome.tokens) == request.stopping.max_tokens)


def test_a6_an_attempt_that_waits_for_prefill_is_not_started_twice(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 100, 8)
    pair = make_pair(max_batch=1)
    pair.start(make_request("before", 200, 2))
    outcome = pair.start(request)
    refuse_a_second_start(pair, request, outcome, pair.prefill, "already here")
    assert outcome.token_ids == reference.run([request])[0].token_ids
    pair.settle()
    pair.assert_nothing_is_held()


def test_a6_an_attempt_that_is_exported_is_not_started_twice(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 100, 8)
    pair = make_pair()
    pair.fabric.is_automatic = False
    outcome = pair.start(request)
    pair.run_until(lambda: bool(outcome.find(Finished)))
    refuse_a_second_start(pair, request, outcome, pair.prefill, "exported here")
    assert outcome.token_ids == reference.run([request])[0].token_ids
    pair.settle()
    pair.assert_nothing_is_held()


def test_a6_an_attempt_that_decode_has_is_not_started_twice(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 100, 8)
    pair = make_pair()
    outcome = pair.start(request)
    pair.run_until(lambda: len(outcome.tokens) > 2)
    whole = replace(request, leg=Leg.WHOLE)
    refuse_a_second_start(pair, whole, outcome, pair.decode, "already here")
    assert outcome.token_ids == reference.run([request])[0].token_ids
    pair.settle()
    pair.assert_nothing_is_held()


# A8, B3, B4, B6: the hand-off goes wrong, and no client can tell.


def test_a8_bytes_of_blocks_taken_back_during_a_read_reach_no_client(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 70, 16)
    pair = make_pair()
    pair.fabric.is_automatic = False
    outcome = pair.start(request)
    pair.run_until(lambda: bool(pair.fabric.reads) and bool(outcome.find(Finished)))
    pair.exporter.bump_slot_epoch(outcome.find(Begun)[0].export.slot)
    pair.prefill_cache.storage.fill_(77)
    pair.fabric.is_automatic = True
    pair.run_until(lambda: outcome.is_over)
    assert pair.imports.counters.fences_tripped > 0
    assert outcome.token_ids == reference.run([request])[0].token_ids


def test_a17_only_what_passed_its_fence_enters_decodes_prefix_index(
    make_pair: MakePair, make_request: MakeRequest
) -> None:
    pair = make_pair(can_recompute=False, prefix_cache=True)
    pair.fabric.is_automatic = False
    refused = pair.start(make_request("refused", 200, 4))
    pair.run_until(lambda: bool(pair.fabric.reads) and bool(refused.find(Finished)))
    pair.exporter.bump_slot_epoch(refused.find(Begun)[0].export.slot)
    pair.fabric.is_automatic = True
    pair.run_until(lambda: bool(refused.find(Failed)))
    pair.cancel(RequestKey("refused"))
    pair.settle()
    assert pair.imports.counters.fences_tripped > 0
    assert pair.decode_cache.pool.num_cached == 0
    pair.generate([make_request("served", 200, 4)])
    pair.settle()
    assert pair.decode_cache.pool.num_cached == 3
    pair.assert_nothing_is_held()


def test_b3_an_error_that_stays_costs_one_request_its_hand_off_and_the_engine_lives(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    broken, sound = make_request("broken", 70, 16), make_request("sound", 70, 16)
    pair = make_pair()
    pair.fabric.is_automatic = False
    outcome = pair.start(broken)
    while not outcome.find(Joined):
        fail_all_reads(pair)
        pair.turn()
    pair.fabric.is_automatic = True
    (other,) = pair.generate([sound])
    pair.run_until(lambda: outcome.is_over)
    assert outcome.find(Joined)[0].recomputed
    assert not other.find(Joined)[0].recomputed
    outputs = [outcome.token_ids, other.token_ids]
    assert outputs == [local.token_ids for local in reference.run([broken, sound])]
    pair.settle()
    pair.assert_nothing_is_held()


def test_b4_what_happens_to_prefill_after_decoding_began_changes_no_token(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 130, 20)
    pair = make_pair()
    outcome = pair.start(request)
    pair.run_until(lambda: len(outcome.tokens) > 3)
    pair.prefill_cache.storage.fill_(77)
    pair.break_a_stream(random.Random(0))
    pair.exporter.close()
    pair.run_until(lambda: outcome.is_over)
    assert outcome.find(Failed) == []
    assert outcome.token_ids == reference.run([request])[0].token_ids


@pytest.mark.parametrize("can_recompute", [True, False], ids=["recompute", "fail"])
def test_b6_a_lost_announcement_is_no_silent_prefill_on_decode(
    make_pair: MakePair,
    make_request: MakeRequest,
    reference: Any,
    caplog: pytest.LogCaptureFixture,
    can_recompute: bool,
) -> None:
    request = make_request("a", 200, 8)
    pair = make_pair(can_recompute=can_recompute)
    pair.loses = lambda event: event.HasField("chunk") and event.chunk.first_block == 1
    outcome = pair.start(request)
    pair.run_until(lambda: outcome.is_over or bool(outcome.find(Failed)))
    assert pair.imports.counters.failed == 1
    if can_recompute:
        assert outcome.find(Joined)[0].recomputed
        assert "it is computed again" in caplog.text
        assert pair.decode_load.computed_prompt_tokens == 200
        assert outcome.token_ids == reference.run([request])[0].token_ids
    else:
        assert [failed.reason for failed in outcome.find(Failed)] == ["HAND_OFF_FAILED"]
        assert pair.decode_load.computed_prompt_tokens == 0
    pair.settle()
    pair.assert_nothing_is_held()


# A14.


def test_a14_a_thousand_aborts_at_random_moments_leave_nothing(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    chance = random.Random(14)
    pair = make_pair(num_blocks=24, decode_blocks=12, max_batch=6, reserve_output_share=0.5)
    live: dict[RequestKey, int] = {}
    num_aborts = 0
    while num_aborts < 1000:
        if len(live) < 8:
            request = make_request(f"r{num_aborts}-{pair.now}", chance.randint(1, 150), 20)
            pair.start(request)
            live[request.key] = chance.randint(0, 15)
        pair.turn()
        for key in [key for key, turns in live.items() if turns == 0]:
            del live[key]
            pair.cancel(key)
            num_aborts += 1
        live = {key: turns - 1 for key, turns in live.items()}
    for key in live:
        pair.cancel(key)
    pair.settle()
    pair.assert_nothing_is_held()
    stages = [pair.exports.counters.begun, pair.imports.counters.imported]
    assert min(stages) > 50, "the aborts hardly ever came late"

    last = make_request("last", 150, 20)
    (outcome,) = pair.generate([last])
    assert outcome.token_ids == reference.run([last])[0].token_ids


# D1, D2, D3: off by one at the hand-off.


def test_d1_one_token_is_made_without_decode_and_without_a_transfer(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 100, 1)
    pair = make_pair()
    (outcome,) = pair.generate([request])
    assert outcome.token_ids == reference.run([request])[0].token_ids
    assert outcome.find(Finished)[0].reason is FinishReason.LENGTH
    assert outcome.find(Begun) == []
    pair.settle()
    assert pair.exports.counters.begun == pair.imports.counters.begun == 0
    assert pair.importer.transport() == ""
    pair.assert_nothing_is_held()


def test_d2_an_end_token_as_first_token_ends_the_request_and_decode_computes_nothing(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    (local,) = reference.run([make_request("a", 100, 1)])
    pair = make_pair()
    (outcome,) = pair.generate([make_request("a", 100, 20, stop=local.token_ids)])
    pair.run_until(lambda: len(outcome.find(Finished)) == 2)
    pair.settle()
    assert outcome.token_ids == local.token_ids
    assert {finished.reason for finished in outcome.find(Finished)} == {FinishReason.STOP}
    assert outcome.find(Finished)[-1].usage.output_tokens == 1
    load = pair.decode_load
    assert (load.decode_steps, load.emitted_tokens, load.computed_prompt_tokens) == (0, 0, 0)
    pair.assert_nothing_is_held()


def test_d3_the_first_tokens_logprobs_are_there_once_and_aligned(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 100, 6, sampling=replace(GREEDY, top_logprobs=2))
    (local,) = reference.run([request])
    (outcome,) = make_pair().generate([request])
    # `Outcome` holds every place's logprobs against the token told there.
    assert tuple(outcome.logprobs[i] for i in range(6)) == local.logprobs


# E1: what can never fit. E3: no circular wait.


@pytest.mark.parametrize(
    ("whose", "options"),
    [
        ("prefill", {"num_blocks": 4, "decode_blocks": 64}),
        ("decode", {"num_blocks": 64, "decode_blocks": 4}),
        ("the model", {"num_blocks": 64}),
    ],
)
def test_e1_a_prompt_that_can_never_fit_is_refused_at_once_and_the_queue_moves(
    make_pair: MakePair,
    make_request: MakeRequest,
    reference: Any,
    whose: str,
    options: dict[str, int],
) -> None:
    pair = make_pair(max_batch=1, **options)
    size = 600 if whose == "the model" else 300
    before, behind = make_request("before", 100, 8), make_request("behind", 100, 8)
    outcomes = [pair.start(before)]
    refused = pair.start(make_request("too long", size, 8))
    outcomes.append(pair.start(behind))
    pair.run_until(lambda: bool(refused.find(Failed)))
    failed = refused.find(Failed)[0]
    assert not failed.is_retryable
    assert str(size) in failed.message
    if whose != "decode":
        assert not any(outcome.is_over for outcome in outcomes)
    pair.cancel(RequestKey("too long"))  # As the gateway does when a leg fails.
    pair.run_until(lambda: all(outcome.is_over for outcome in outcomes))
    expected = reference.run([before, behind])
    assert [o.token_ids for o in outcomes] == [local.token_ids for local in expected]
    pair.settle()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("reserve_output_share", [1.0, 0.0])
def test_e3_full_pools_on_both_sides_always_move_on(
    make_pair: MakePair, make_request: MakeRequest, reference: Any, reserve_output_share: float
) -> None:
    """Decode's blocks all wait for prefill, prefill's all wait for decode; some requests are
    decode's alone, and want the same blocks."""
    split = [make_request(f"q{i}", 60 + 31 * (i % 5), 30 + i) for i in range(9)]
    alone = [replace(make_request(f"w{i}", 100, 30), leg=Leg.WHOLE) for i in range(3)]
    pair = make_pair(
        num_blocks=9,
        decode_blocks=6,
        max_batch=4,
        max_unread_share=0.5,
        reserve_output_share=reserve_output_share,
    )
    pair.fabric.is_automatic = False
    outcomes = [pair.start(request) for request in split]
    pair.settle(turns=60)
    outcomes += [pair.start(request) for request in alone]
    pair.settle(turns=60)
    assert pair.fabric.reads
    assert pair.prefill_load.waiting_requests > 0
    assert pair.decode_load.waiting_requests > len(alone)
    pair.fabric.is_automatic = True
    pair.run_until(lambda: all(outcome.is_over for outcome in outcomes))
    expected = reference.run([*split, *alone])
    assert [o.token_ids for o in outcomes] == [local.token_ids for local in expected]
    pair.settle()
    pair.assert_nothing_is_held()
