"""A request says the same wherever and however it is served, token for token and bit for bit.

What it says is fixed by the engine in one process, alone and without drafts. Each test is a part of
the table: whole on the decode worker or split, this many drafts a step, this chunk size, alone or
in company, its prefix known or not, made to give way, or started again in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hocket.execution.drafting.speculation import MTPDraftSource, ScriptedDraftSource
from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.model.transformer import Transformer
from hocket.request_params import Grammar, SamplingParams, StoppingParams
from hocket.types import (
    Finished,
    Leg,
    PromptLogprobs,
    RequestKey,
    StartRequest,
    TokenLogprobs,
    Tokens,
    VerifyStep,
)
from tests.execution.toy_grammars import END, GRAMMARS, compiled

MakePair = Callable[..., Any]

VOCAB = 97
LEGS = [Leg.PREFILL, Leg.WHOLE]
DRAFTS = [0, 1, 2, 3, 5]
PENALISED = SamplingParams(
    seed=5,
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    presence_penalty=0.3,
    logit_bias=((7, 2.0), (8, -100.0)),
    top_logprobs=2,
    prompt_logprobs=1,
)
UNDER_GRAMMAR = SamplingParams(
    seed=3, grammar=GRAMMARS[1], frequency_penalty=0.4, logit_bias=((END, -4.0),), top_logprobs=0
)
# Name, prompt tokens (most outputs grow into another block), sampling, min_tokens.
TABLE = [
    ("greedy", 1, SamplingParams(temperature=0.0, top_logprobs=0), 0),
    ("sampled", 64, SamplingParams(seed=11, top_k=40, min_p=0.01, choice=2), 0),
    ("penalised", 60, PENALISED, 12),
    ("penalised greedy", 125, replace(PENALISED, temperature=0.0, prompt_logprobs=None), 20),
    ("grammar", 55, UNDER_GRAMMAR, 0),
    ("long", 185, SamplingParams(seed=2**63, top_logprobs=3, prompt_logprobs=0), 0),
]


def request_of(
    name: str, prompt_tokens: int, sampling: SamplingParams, min_tokens: int
) -> StartRequest:
    random = Random(name)
    stop = range(0, VOCAB, 3) if min_tokens else [END] if sampling.grammar else []
    return StartRequest(
        key=RequestKey(name),
        token_ids=tuple(random.randrange(VOCAB) for _ in range(prompt_tokens)),
        sampling=sampling,
        stopping=StoppingParams(24, frozenset(stop), min_tokens),
        leg=Leg.PREFILL,
        deadline_s=60.0,
    )


REQUESTS = [request_of(*row) for row in TABLE]


class ToyCompiler:
    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        future: Future[CompiledGrammar] = Future()
        future.set_result(compiled(grammar, VOCAB))
        return future


def local_request(request: StartRequest) -> LocalRequest:
    grammar = request.sampling.grammar
    return LocalRequest(
        request.token_ids,
        request.sampling,
        request.stopping,
        key=request.key,
        grammar=None if grammar is None else compiled(grammar, VOCAB),
    )


def said_alone(model: Transformer, requests: Sequence[StartRequest]) -> list[LocalResult]:
    engine = LocalEngine(model, LocalEngineLimits(num_blocks=8))
    return [engine.generate([local_request(request)])[0] for request in requests]


@pytest.fixture(scope="module")
def expected(model: Transformer) -> list[LocalResult]:
    """What `REQUESTS` say, each alone."""
    results = said_alone(model, REQUESTS)
    assert {len(result.token_ids) for result in results} & set(range(13, 24)), "no stop token"
    return results


@pytest.fixture
def make_drafting_pair(make_pair: MakePair, expected: list[LocalResult]) -> Callable[..., Any]:
    """`make_drafting_pair(num_drafts, **options)`: the drafts are the model's own, and with
    `scripted` right seven times in ten."""

    def make(num_drafts: int, scripted: bool = False, **options: Any) -> Any:
        truth = {
            RequestKey(request.key.request_id, attempt): (*request.token_ids, *result.token_ids)
            for request, result in zip(REQUESTS, expected, strict=True)
            for attempt in range(2)
        }

        def source(model: Transformer, cache: Any) -> Any:
            own = MTPDraftSource(model, cache)
            return ScriptedDraftSource(truth, 0.7, VOCAB, own) if scripted else own

        return make_pair(
            draft_tokens=num_drafts,
            draft_source=source if num_drafts else None,
            compiler=ToyCompiler(),
            **options,
        )

    return make


def assert_said(outcome: Any, expected: LocalResult, request: StartRequest) -> None:
    """Tokens and logprobs, each once, and the end; usage counts what the client sent and got."""
    assert outcome.token_ids == expected.token_ids
    told = tuple(outcome.logprobs[index] for index in sorted(outcome.logprobs))
    assert told == expected.logprobs
    assert prompt_logprobs(outcome) == expected.prompt_logprobs
    finished = outcome.find(Finished)[-1]
    assert finished.reason is expected.finish_reason
    assert finished.usage.prompt_tokens == len(request.token_ids)


def prompt_logprobs(outcome: Any) -> tuple[TokenLogprobs, ...]:
    """By position; a prompt that was computed again may be told again."""
    told: dict[int, TokenLogprobs] = {}
    for event in outcome.find(PromptLogprobs):
        for position, logprobs in enumerate(event.logprobs, start=event.first_position):
            assert told.setdefault(position, logprobs) == logprobs
    assert list(told) == list(range(1, len(told) + 1))
    return tuple(told.values())


def run_all(
    pair: Any, requests: Sequence[StartRequest], expected: Sequence[LocalResult]
) -> list[Any]:
    outcomes = pair.generate(requests)
    for outcome, result, request in zip(outcomes, expected, requests, strict=True):
        assert_said(outcome, result, request)
    pair.settle()
    pair.assert_nothing_is_held()
    return outcomes


@pytest.mark.parametrize("chunk_tokens", [16, 40, 512])
@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("leg", LEGS)
def test_d9_whole_or_split_with_any_drafts_and_chunks(
    make_drafting_pair: MakePair,
    expected: list[LocalResult],
    leg: Leg,
    num_drafts: int,
    chunk_tokens: int,
) -> None:
    pair = make_drafting_pair(num_drafts, chunk_tokens=chunk_tokens)
    run_all(pair, [replace(request, leg=leg) for request in REQUESTS], expected)


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("leg", LEGS)
def test_d9_with_drafts_that_are_mostly_right(
    make_drafting_pair: MakePair, expected: list[LocalResult], leg: Leg, num_drafts: int
) -> None:
    pair = make_drafting_pair(num_drafts, scripted=True)
    outcomes = run_all(pair, [replace(request, leg=leg) for request in REQUESTS], expected)
    drafts = [outcome.find(Finished)[-1].usage.drafts for outcome in outcomes]
    assert sum(d.accepted_tokens for d in drafts) > 0.3 * sum(d.drafted_tokens for d in drafts)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("leg", LEGS)
def test_d9_alone_or_with_other_drafts_beside(
    make_drafting_pair: MakePair, expected: list[LocalResult], leg: Leg, num_drafts: int
) -> None:
    pair = make_drafting_pair(num_drafts)
    for request, result in zip(REQUESTS, expected, strict=True):
        run_all(pair, [replace(request, leg=leg)], [result])
    for shift in range(min(2, num_drafts)):
        mixed = [
            replace(one, leg=LEGS[i % 2], max_draft_tokens=(i + shift) % (num_drafts + 1))
            for i, one in enumerate(REQUESTS)
        ]
        run_all(pair, mixed, expected)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("leg", LEGS)
def test_d9_a_known_prefix_changes_nothing(
    make_drafting_pair: MakePair, expected: list[LocalResult], leg: Leg, num_drafts: int
) -> None:
    """Each again, now that all are known, and once more, whole where it was split before."""
    pair = make_drafting_pair(num_drafts, prefix_cache=True)
    other = LEGS[1 - LEGS.index(leg)]
    num_cached: list[int] = []
    for turn in (leg, leg, other):
        outcomes = run_all(pair, [replace(request, leg=turn) for request in REQUESTS], expected)
        usages = [outcome.find(Finished)[-1].usage for outcome in outcomes]
        num_cached.append(sum(usage.cached_tokens > 0 for usage in usages))
    # Of the three with a whole block, one wants logprobs of its prompt: it uses nobody's.
    assert num_cached[0] == 0
    assert num_cached[1] == 2


@pytest.mark.parametrize(("num_drafts", "prefix_cache"), [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("leg", LEGS)
def test_d9_a_request_that_gives_way_goes_on_as_if_it_had_not(
    make_drafting_pair: MakePair,
    model: Transformer,
    expected: list[LocalResult],
    leg: Leg,
    num_drafts: int,
    prefix_cache: bool,
) -> None:
    """Each beside one that came before it and needs a second block at its 17th token."""
    older = replace(request_of("older", 48, SamplingParams(seed=1), 0), leg=leg)
    (said_by_older,) = said_alone(model, [older])
    for request, result in zip(REQUESTS, expected, strict=True):
        num_tokens = len(request.token_ids) + len(result.token_ids)
        pair = make_drafting_pair(
            num_drafts,
            decode_blocks=1 + -(-num_tokens // 64),
            reserve_output_share=0.0,
            prefix_cache=prefix_cache,
        )
        run_all(pair, [older, replace(request, leg=leg)], [said_by_older, result])
        assert pair.decode_scheduler.counters.preemptions == 1, request.key


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("leg", LEGS)
def test_d12_a_request_that_is_started_again_in_the_middle_goes_on_there(
    make_drafting_pair: MakePair, expected: list[LocalResult], leg: Leg, num_drafts: int
) -> None:
    """As the gateway does it: what was put out ends the prompt and comes off the limits."""
    pair = make_drafting_pair(num_drafts, scripted=num_drafts > 0)
    random = Random(num_drafts)
    for _ in range(3):
        outcomes: list[Any] = []
        for request, result in zip(REQUESTS, expected, strict=True):
            num_done = random.randrange(1, len(result.token_ids))
            done = result.token_ids[:num_done]
            outcome = pair.start(
                replace(
                    request,
                    key=RequestKey(request.key.request_id, attempt=1),
                    token_ids=(*request.token_ids, *done),
                    generated_tokens=num_done,
                    stopping=request.stopping.after(num_done),
                    leg=leg,
                )
            )
            outcome.tokens.update(enumerate(done))
            outcome.logprobs.update(enumerate(result.logprobs[:num_done]))
            outcomes.append(outcome)
        pair.run_until(lambda started=outcomes: all(outcome.is_over for outcome in started))
        for outcome, result, request in zip(outcomes, expected, REQUESTS, strict=True):
            assert_said(outcome, result, request)
        pair.settle()
        pair.assert_nothing_is_held()


def test_d10_each_token_advances_a_grammar_once_the_first_included(
    make_drafting_pair: MakePair, model: Transformer
) -> None:
    """The first is chosen by prefill, counted by decode; all grammars, whole and split."""
    requests = [
        replace(
            request_of(f"{kind} {temperature}", 40, SamplingParams(temperature, seed=9), 0),
            sampling=SamplingParams(temperature, seed=9, grammar=grammar),
            stopping=StoppingParams(30, frozenset({END})),
        )
        for kind, grammar in enumerate(GRAMMARS)
        for temperature in (0.0, 1.0)
    ]
    expected = said_alone(model, requests)
    for num_drafts in (0, 3):
        for leg in LEGS:
            started = [replace(request, leg=leg) for request in requests]
            run_all(make_drafting_pair(num_drafts), started, expected)


def verify_steps(outcome: Any, num_tokens: int) -> list[VerifyStep]:
    """Those that put out the first `num_tokens` tokens."""
    return [
        event.step
        for event in outcome.find(Tokens)
        if event.step is not None and event.output_index < num_tokens
    ]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_d11_acceptance_after_the_hand_off_equals_acceptance_without_one(
    make_embedded_pair: MakePair, num_drafts: int
) -> None:
    """Step by step over the first 16 tokens: the drafting state crossed whole."""
    embedded = [
        replace(request, stopping=StoppingParams(24), key=RequestKey(str(i)))
        for i, request in enumerate(REQUESTS)
        if request.sampling.grammar is None
    ]
    steps: dict[Leg, list[list[VerifyStep]]] = {}
    for leg in LEGS:
        pair = make_embedded_pair(draft_tokens=num_drafts, draft_source=MTPDraftSource)
        outcomes = pair.generate([replace(request, leg=leg) for request in embedded])
        steps[leg] = [verify_steps(outcome, 16) for outcome in outcomes]
    assert steps[Leg.PREFILL] == steps[Leg.WHOLE]
    accepted = {step.accepted_tokens for one in steps[Leg.WHOLE] for step in one}
    assert {0, 1} <= accepted
    drafted = {step.drafted_tokens for one in steps[Leg.WHOLE] for step in one}
    assert drafted == {num_drafts}
