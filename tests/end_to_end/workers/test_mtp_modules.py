"""Several MTP modules, prefill engine to decode engine: drafts go on from the hand-off's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams
from hocket.types import Finished, Leg, RequestKey, StartRequest
from tests.end_to_end.workers.conftest import TINY, Pair

VOCABULARY = 6
"""So few tokens that random modules are right now and then."""
SAMPLED = SamplingParams(temperature=0.9, top_logprobs=1)
Requests = list[StartRequest]


@pytest.fixture(scope="module", params=[2, 3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    config = replace(TINY, vocab_size=VOCABULARY, num_mtp_layers=request.param)
    folder = random_checkpoint(config, tmp_path_factory.mktemp("modules"), 3, "float32")
    return load_model(folder, batch_invariant=True)


@pytest.fixture
def requests(make_request: Callable[..., StartRequest]) -> Requests:
    """Prompts shorter than a module looks ahead, of whole blocks, and of several chunks."""
    made = [
        make_request(f"r{size}", size, 70, sampling=replace(SAMPLED, seed=size))
        for size in (1, 2, 7, 64, 65, 128, 200)
    ]
    return [
        replace(one, token_ids=tuple(token % VOCABULARY for token in one.token_ids)) for one in made
    ]


@pytest.mark.parametrize("k", [1, 3, 4])
def test_after_a_hand_off_drafts_and_acceptance_are_those_of_one_process(
    make_pair: Callable[..., Pair], reference: Any, requests: Requests, k: int
) -> None:
    plain = reference.run(requests)
    expected = reference.run(requests, num_drafts=k)
    pair = make_pair(draft_tokens=k, draft_source=MTPDraftSource)
    outcomes = pair.generate(requests)
    for outcome, local, undrafted in zip(outcomes, expected, plain, strict=True):
        assert outcome.token_ids == local.token_ids == undrafted.token_ids
        assert outcome.find(Finished)[-1].usage == local.usage
    assert sum(local.usage.drafts.accepted_tokens for local in expected) > 10
    pair.settle()
    pair.assert_nothing_is_held()


def test_prefix_hits_and_giving_way_change_nothing(
    make_pair: Callable[..., Pair], model: Transformer, reference: Any, requests: Requests
) -> None:
    """The same prompts once, then again to prefill and to decode alone, whose pool is too small
    for all outputs at once."""
    turns = [
        [
            replace(one, key=RequestKey(f"{one.key}-{leg}-{turn}"), leg=leg)
            for leg in legs
            for one in requests[3:]
        ]
        for turn, legs in enumerate([[Leg.PREFILL], [Leg.PREFILL, Leg.WHOLE]])
    ]
    pair = make_pair(
        decode_blocks=6,
        draft_tokens=3,
        draft_source=MTPDraftSource,
        reserve_output_share=0.0,
        prefix_cache=True,
    )
    cached: list[int] = []
    for again in turns:
        expected = reference.run(again)
        outcomes = pair.generate(again)
        for outcome, local in zip(outcomes, expected, strict=True):
            assert outcome.token_ids == local.token_ids
            logprobs = tuple(outcome.logprobs[i] for i in range(len(local.token_ids)))
            assert logprobs == local.logprobs
        cached = [outcome.find(Finished)[-1].usage.cached_tokens for outcome in outcomes]
    num_modules = model.config.num_mtp_layers
    assert cached[:4] == [size - num_modules for size in (64, 64, 128, 192)]
    assert pair.decode_scheduler.counters.preemptions > 0
    pair.settle()
    pair.assert_nothing_is_held()


def test_the_first_tokens_behind_a_hit_may_come_one_by_one(
    make_pair: Callable[..., Pair], model: Transformer, reference: Any, requests: Requests
) -> None:
    """They lie in blocks that are announced already."""
    pair = make_pair(chunk_tokens=1, draft_tokens=2, draft_source=MTPDraftSource, prefix_cache=True)
    for turn in range(2):
        again = replace(requests[4], key=RequestKey(f"turn-{turn}"))
        (local,) = reference.run([again])
        (outcome,) = pair.generate([again])
        assert outcome.token_ids == local.token_ids
        usage = outcome.find(Finished)[-1].usage
        assert usage.cached_tokens == turn * (64 - model.config.num_mtp_layers)
    pair.settle()
    pair.assert_nothing_is_held()
