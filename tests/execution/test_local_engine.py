"""Exact output: drafts, company, chunking and block order change nothing but speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from hocket.errors import ConfigError, InvalidRequest
from hocket.execution.drafting.speculation import ScriptedDraftSource
from hocket.execution.local_engine import (
    LocalEngine,
    LocalEngineLimits,
    LocalRequest,
    LocalResult,
)
from hocket.execution.model_runner import DecodeOutput
from hocket.execution.sequence import Sequence as Running
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import FinishReason, RequestKey

SAMPLINGS = (
    SamplingParams(temperature=0.0, top_logprobs=2),
    SamplingParams(temperature=1.0, seed=11, top_logprobs=0),
    SamplingParams(temperature=0.7, top_k=20, seed=2**63 + 5, choice=1),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.01, seed=3, top_logprobs=3),
)


def requests_of(
    count: int, max_tokens: int = 24, stop: frozenset[int] = frozenset()
) -> list[LocalRequest]:
    random = Random(0)
    lengths = [random.choice([1, 5, 63, 64, 90]) for _ in range(count)]
    return [
        LocalRequest(
            token_ids=tuple(random.randrange(120) for _ in range(lengths[i])),
            sampling=SAMPLINGS[i % len(SAMPLINGS)],
            stopping=StoppingParams(max_tokens, stop),
            key=RequestKey(str(i)),
        )
        for i in range(count)
    ]


def truth_of(
    requests: Sequence[LocalRequest], results: Sequence[LocalResult]
) -> dict[RequestKey, list[int]]:
    return {
        request.key: [*request.token_ids, *result.token_ids]
        for request, result in zip(requests, results, strict=True)
        if request.key is not None
    }


def engine_of(model: Transformer, k: int = 0, **limits: int) -> LocalEngine:
    return LocalEngine(model, LocalEngineLimits(num_blocks=64, num_drafts=k, **limits))


def outputs(results: Sequence[LocalResult]) -> list[tuple[object, ...]]:
    """Everything but the draft counts."""
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in results]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_drafts_gives_the_output_of_none(
    load_tiny: Callable[..., Transformer], dtype: str
) -> None:
    model = load_tiny(dtype)
    requests = requests_of(8)
    plain = engine_of(model).generate(requests)
    assert all(len(result.token_ids) == 24 for result in plain)
    for k in (1, 2, 3, 4):
        assert outputs(engine_of(model, k).generate(requests)) == outputs(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_accepted_length_occurs_and_changes_nothing(
    load_tiny: Callable[..., Transformer], dtype: str
) -> None:
    model = load_tiny(dtype)
    requests = requests_of(8, max_tokens=40)
    plain = engine_of(model).generate(requests)
    k = 4
    engine = LocalEngine(
        model,
        LocalEngineLimits(num_blocks=64, num_drafts=k),
        ScriptedDraftSource(truth_of(requests, plain), 0.7, 120),
    )
    accepted_lengths: set[int] = set()
    verify = engine.runner.verify

    def watched(sequences: Sequence[Running], drafts: Sequence[list[int]]) -> list[DecodeOutput]:
        step = verify(sequences, drafts)
        accepted_lengths.update(o.num_accepted for o in step if o.num_drafted == k)
        return step

    engine.runner.verify = watched  # type: ignore[method-assign]
    assert outputs(engine.generate(requests)) == outputs(plain)
    assert accepted_lengths == set(range(k + 1))


def test_a_request_answers_alike_alone_in_company_and_with_ragged_drafts(
    model: Transformer,
) -> None:
    requests = requests_of(9)
    alone = [engine_of(model).generate([request])[0] for request in requests]
    random = Random(1)
    for _ in range(3):
        order = random.sample(range(len(requests)), len(requests))
        mixed = [
            LocalRequest(
                requests[i].token_ids,
                requests[i].sampling,
                requests[i].stopping,
                num_drafts=random.randrange(5),
                key=requests[i].key,
            )
            for i in order
        ]
        engine = engine_of(model, 3, chunk_tokens=random.choice([7, 64, 200]), max_batch=5)
        assert outputs(engine.generate(mixed)) == outputs([alone[i] for i in order])


@pytest.mark.parametrize("k", [1, 3, 4])
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
def test_an_accepted_run_is_cut_exactly_at_stop_token_and_max_tokens(
    model: Transformer, k: int, accuracy: float
) -> None:
    free = requests_of(8, max_tokens=30)
    truth = truth_of(free, engine_of(model).generate(free))
    source = ScriptedDraftSource(truth, accuracy, 120)
    for max_tokens in (1, 2, 3, 5, 8, 29):
        stop = frozenset({7, 33, 90})
        requests = requests_of(8, max_tokens, stop)
        engine = LocalEngine(model, LocalEngineLimits(num_blocks=64, num_drafts=k), source)
        results = engine.generate(requests)
        assert outputs(results) == outputs(engine_of(model).generate(requests))
        for result, tokens in zip(results, truth.values(), strict=True):
            output = result.token_ids
            full = tuple(tokens[-30:])
            ends = [i + 1 for i, token in enumerate(full[:max_tokens]) if token in stop]
            assert output == full[: min([*ends, max_tokens])]
            is_stop = output[-1] in stop
            assert result.finish_reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert result.usage.output_tokens == len(output)
            # The first token comes from the prompt's step, not from a verify step.
            assert result.usage.drafts.emitted_tokens == len(output) - 1


def test_counts_tell_drafted_accepted_and_survival_by_position(model: Transformer) -> None:
    requests = requests_of(4, max_tokens=21)
    plain = engine_of(model).generate(requests)
    truth = truth_of(requests, plain)
    limits = LocalEngineLimits(num_blocks=64, num_drafts=3)
    all_right = LocalEngine(model, limits, ScriptedDraftSource(truth, 1.0, 120))
    for result in all_right.generate(requests):
        counts = result.usage.drafts
        assert counts.verify_steps == 5
        assert counts.drafted_by_position == (5, 5, 5)
        assert counts.accepted_by_position == (5, 5, 5)
        assert counts.acceptance_length == 4.0
        assert counts.acceptance_rate == 1.0
    all_wrong = LocalEngine(model, limits, ScriptedDraftSource(truth, 0.0, 120))
    for result in all_wrong.generate(requests):
        counts = result.usage.drafts
        assert counts.verify_steps == 20
        # Near the end k is capped: no step may emit more than max_tokens allows.
        assert counts.drafted_by_position == (19, 18, 17)
        assert counts.accepted_tokens == 0
        assert counts.acceptance_length == 1.0


def test_blocks_come_back_and_a_small_cache_only_makes_requests_wait(model: Transformer) -> None:
    requests = requests_of(8)
    wide = engine_of(model).generate(requests)
    narrow = LocalEngine(model, LocalEngineLimits(num_blocks=3, num_drafts=2))
    assert outputs(narrow.generate(requests)) == outputs(wide)
    assert narrow.cache.pool.num_free == 3


def test_what_can_never_run_is_refused_clearly(
    model: Transformer, load_tiny: Callable[..., Transformer]
) -> None:
    engine = LocalEngine(model, LocalEngineLimits(num_blocks=1))
    request = requests_of(1, max_tokens=200)[0]
    with pytest.raises(InvalidRequest, match="at most 64 tokens"):
        engine.generate([request])
    empty = LocalRequest((), SamplingParams(), StoppingParams(1))
    with pytest.raises(InvalidRequest, match="at least one token"):
        engine.generate([empty])
    with pytest.raises(ConfigError, match="no MTP module"):
        LocalEngine(load_tiny(mtp=False), LocalEngineLimits(num_drafts=2))


def test_a_model_without_mtp_decodes_plainly(load_tiny: Callable[..., Transformer]) -> None:
    results = engine_of(load_tiny(mtp=False)).generate(requests_of(4))
    assert [len(result.token_ids) for result in results] == [24] * 4


def test_fast_mode_runs_the_same_loop(load_tiny: Callable[..., Transformer]) -> None:
    """No equality of bits is promised here; fp32 logits of a tiny model are far enough apart."""
    fast = load_tiny(batch_invariant=False)
    requests = requests_of(4)
    assert [r.token_ids for r in engine_of(fast, 3).generate(requests)] == [
        r.token_ids for r in engine_of(fast).generate(requests)
    ]
