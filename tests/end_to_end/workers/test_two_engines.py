"""Prefill engine to decode engine, in one thread: equal output, and nothing left behind.

The model runs in batch-invariant mode, so equality is equality of token ids, whatever the company.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hocket.execution.drafting.speculation import MTPDraftSource, ScriptedDraftSource
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import Begun, Failed, Finished, Joined, Leg, RequestKey, StartRequest, Tokens

MakePair = Callable[..., Any]
MakeRequest = Callable[..., StartRequest]

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)


def mixed_requests(make_request: MakeRequest, sampling: SamplingParams) -> list[StartRequest]:
    """Prompts of one token, less than a block, whole blocks, and several chunks."""
    sizes = (1, 7, 64, 65, 130, 200)
    return [
        make_request(f"r{i}", size, 24, sampling=replace(sampling, seed=sampling.seed + i))
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_split_output_equals_the_engine_in_one_process(
    make_pair: MakePair,
    make_request: MakeRequest,
    reference: Any,
    sampling: SamplingParams,
    num_drafts: int,
) -> None:
    requests = mixed_requests(make_request, sampling)
    expected = reference.run(requests, num_drafts=num_drafts)
    source = MTPDraftSource if num_drafts else None
    pair = make_pair(draft_tokens=num_drafts, draft_source=source)
    outcomes = pair.generate(requests)
    for outcome, local in zip(outcomes, expected, strict=True):
        assert outcome.token_ids == local.token_ids
        finished = outcome.find(Finished)[-1]
        assert finished.reason is local.finish_reason
        assert finished.usage == local.usage
        assert outcome.find(Joined)[0].transport == "memory"
    pair.settle()
    pair.assert_nothing_is_held()


def test_right_drafts_are_accepted_and_change_nothing(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    requests = mixed_requests(make_request, SAMPLED)
    plain = reference.run(requests)
    truth = {
        r.key: [*r.token_ids, *local.token_ids] for r, local in zip(requests, plain, strict=True)
    }
    pair = make_pair(
        draft_tokens=3,
        draft_source=lambda model, _: ScriptedDraftSource(truth, 0.7, model.config.vocab_size),
    )
    outcomes = pair.generate(requests)
    assert [o.token_ids for o in outcomes] == [local.token_ids for local in plain]
    drafts = [outcome.find(Finished)[-1].usage.drafts for outcome in outcomes]
    assert sum(d.accepted_tokens for d in drafts) > 0.3 * sum(d.drafted_tokens for d in drafts)


def test_acceptance_after_the_hand_off_equals_acceptance_in_one_process(
    make_embedded_pair: MakePair, make_request: MakeRequest, embedded_reference: Any
) -> None:
    requests = [
        make_request(f"e{i}", 30 + 50 * i, 40, sampling=sampling)
        for i, sampling in enumerate((GREEDY, SAMPLED, GREEDY))
    ]
    expected = embedded_reference.run(requests, num_drafts=3)
    pair = make_embedded_pair(draft_tokens=3, draft_source=MTPDraftSource)
    outcomes = pair.generate(requests)
    assert [outcome.token_ids for outcome in outcomes] == [local.token_ids for local in expected]
    usages = [outcome.find(Finished)[-1].usage for outcome in outcomes]
    assert usages == [local.usage for local in expected]
    assert sum(usage.drafts.accepted_tokens for usage in usages) > 0


def test_a_whole_request_on_the_decode_worker_is_equal_too(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    requests = mixed_requests(make_request, SAMPLED)
    expected = reference.run(requests)
    whole = [replace(request, leg=Leg.WHOLE) for request in requests]
    pair = make_pair(draft_tokens=2, draft_source=MTPDraftSource)
    outcomes = pair.generate(whole)
    assert [o.token_ids for o in outcomes] == [local.token_ids for local in expected]
    joined = outcomes[0].find(Joined)[0]
    assert (joined.imported_bytes, joined.recomputed) == (0, False)
    pair.assert_nothing_is_held()


def test_a_migrated_request_goes_on_where_it_stopped(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 40, 20, sampling=SAMPLED)
    (local,) = reference.run([request])
    again = replace(
        request,
        key=RequestKey("a", attempt=1),
        token_ids=(*request.token_ids, *local.token_ids[:8]),
        generated_tokens=8,
        stopping=StoppingParams(max_tokens=12),
    )
    pair = make_pair()
    outcome = pair.start(again)
    outcome.tokens.update(enumerate(local.token_ids[:8]))
    pair.run_until(lambda: outcome.is_over)
    assert outcome.token_ids == local.token_ids
    assert outcome.find(Finished)[-1].usage.prompt_tokens == 40


STAGES = {
    "queued": lambda pair, outcome: True,
    "half prefilled": lambda pair, outcome: bool(outcome.find(Begun)),
    "reading": lambda pair, outcome: pair.imports.counters.reads > 0,
    "prefilled": lambda pair, outcome: bool(outcome.find(Finished)),
    "decoding": lambda pair, outcome: len(outcome.tokens) > 3,
}


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_cancel_at_any_stage_frees_everything_and_hurts_nobody(
    make_pair: MakePair, make_request: MakeRequest, reference: Any, stage: str
) -> None:
    other = make_request("other", 30, 16)
    pair = make_pair()
    pair.fabric.is_automatic = stage not in ("reading", "prefilled")
    outcome = pair.start(make_request("gone", 200, 40))
    pair.run_until(lambda: STAGES[stage](pair, outcome))
    pair.cancel(RequestKey("gone"))
    told = len(outcome.tokens)
    pair.settle()
    pair.fabric.is_automatic = True
    (survivor,) = pair.generate([other])
    assert survivor.token_ids == reference.run([other])[0].token_ids
    assert len(outcome.tokens) == told, "tokens after a cancel"
    pair.settle()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_deadline_at_any_stage_fails_the_request_and_frees_everything(
    make_pair: MakePair, make_request: MakeRequest, stage: str
) -> None:
    pair = make_pair()
    pair.fabric.is_automatic = stage not in ("reading", "prefilled")
    outcome = pair.start(replace(make_request("late", 200, 40), deadline_s=2.0))
    pair.run_until(lambda: STAGES[stage](pair, outcome))
    pair.now += 2.0
    pair.run_until(lambda: bool(outcome.find(Failed)))
    assert {failed.reason for failed in outcome.find(Failed)} == {"DEADLINE_EXCEEDED"}
    pair.cancel(RequestKey("late"))
    pair.fabric.is_automatic = True
    pair.settle()
    pair.assert_nothing_is_held()


def test_a_broken_read_is_computed_again_by_decode_and_told(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request("a", 70, 16, sampling=SAMPLED)
    pair = make_pair()
    pair.fabric.is_automatic = False
    outcome = pair.start(request)
    while not outcome.find(Joined):
        for read in list(pair.fabric.reads):
            pair.fabric.fail(read)
        pair.turn()
    assert outcome.find(Joined)[0].recomputed
    pair.run_until(lambda: outcome.is_over)
    assert outcome.token_ids == reference.run([request])[0].token_ids
    pair.settle()
    pair.assert_nothing_is_held()


def test_a_damaged_bundle_fails_its_request_only(
    make_pair: MakePair, make_request: MakeRequest
) -> None:
    pair = make_pair()
    pair.prefill_runner.hidden_state_bytes = lambda hidden_H: b"short"
    other = replace(make_request("other", 70, 16), leg=Leg.WHOLE)
    damaged, served = pair.generate([make_request("a", 70, 16), other])
    assert [failed.reason for failed in damaged.find(Failed)] == ["INTERNAL"]
    assert len(served.token_ids) == 16
    pair.settle()
    pair.assert_nothing_is_held()


def test_a_broken_read_fails_the_request_where_the_policy_says_so(
    make_pair: MakePair, make_request: MakeRequest
) -> None:
    pair = make_pair(can_recompute=False)
    pair.fabric.is_automatic = False
    outcome = pair.start(make_request("a", 70, 16))
    for _ in range(100):
        for read in list(pair.fabric.reads):
            pair.fabric.fail(read)
        pair.turn()
    (failed,) = outcome.find(Failed)
    assert (failed.reason, failed.is_retryable) == ("HAND_OFF_FAILED", True)
    pair.cancel(RequestKey("a"))
    pair.settle()
    pair.assert_nothing_is_held()


def test_many_requests_through_small_pools_all_finish_and_equal(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    requests = [make_request(f"q{i}", 5 + 31 * i, 10 + i) for i in range(12)]
    pair = make_pair(num_blocks=16, max_batch=3, max_unread_share=0.25)
    outcomes = pair.generate(requests)
    expected = reference.run(requests)
    assert [o.token_ids for o in outcomes] == [local.token_ids for local in expected]
    pair.settle()
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["computes all", "finds prefixes"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_requests_that_give_way_say_what_they_say_undisturbed(
    make_pair: MakePair,
    make_request: MakeRequest,
    reference: Any,
    sampling: SamplingParams,
    num_drafts: int,
    prefix_cache: bool,
) -> None:
    """The last one alone needs the whole pool; logprobs show every bit."""
    sampling = replace(sampling, top_logprobs=1)
    requests = [
        make_request(f"q{i}", 20 + 31 * i, 90 + i, sampling=replace(sampling, seed=i))
        for i in range(8)
    ]
    expected = reference.run(requests)
    pair = make_pair(
        decode_blocks=6,
        draft_tokens=num_drafts,
        draft_source=MTPDraftSource if num_drafts else None,
        reserve_output_share=0.0,
        prefix_cache=prefix_cache,
    )
    outcomes = pair.generate(requests)
    assert pair.decode_scheduler.counters.preemptions > 3
    for request, outcome, local in zip(requests, outcomes, expected, strict=True):
        assert outcome.token_ids == local.token_ids
        assert tuple(outcome.logprobs[i] for i in range(len(local.token_ids))) == local.logprobs
        usage = outcome.find(Finished)[-1].usage
        sizes = (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
        assert sizes == (len(request.token_ids), request.stopping.max_tokens, 0)
        assert len(outcome.find(Joined)) == 1
        told = [tokens.output_index for tokens in outcome.find(Tokens) if tokens.output_index]
        assert told == sorted(set(told)), "told twice, or out of order"
    pair.settle()
    pair.assert_nothing_is_held()


def test_prompts_that_begin_alike_are_computed_read_and_said_as_if_they_did_not(
    make_pair: MakePair, make_request: MakeRequest, reference: Any
) -> None:
    """A conversation in three turns, then its first prompt again, in whole blocks."""
    pair = make_pair(
        draft_tokens=3, draft_source=MTPDraftSource, prefix_cache=True, reserve_output_share=0.25
    )
    first = make_request("first", 128, 70, sampling=SAMPLED)
    prompt, told = first.token_ids, []
    for turn in range(4):
        token_ids = prompt if turn < 3 else first.token_ids
        request = replace(first, key=RequestKey(f"turn-{turn}"), token_ids=token_ids)
        (local,) = reference.run([request])
        (outcome,) = pair.generate([request])
        assert outcome.token_ids == local.token_ids
        usage, joined = outcome.find(Finished)[-1].usage, outcome.find(Joined)[0]
        num_read = joined.imported_bytes // pair.decode_cache.layout.block_bytes
        told.append((usage.cached_tokens, joined.cached_tokens, num_read))
        prompt = (*prompt, *outcome.token_ids, 5, 6, 7)
    # By prefill, which has not seen the answers; by decode, which has; and the blocks that crossed.
    assert told == [(0, 0, 2), (127, 192, 1), (191, 256, 1), (127, 128, 0)]
    pair.settle()
    pair.assert_nothing_is_held()
