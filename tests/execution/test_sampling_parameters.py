"""Every sampling parameter, alone and mixed, says what the plain reference says; drafts or not.

Each case runs through three engines: without drafts, with the model's own drafts, and with scripted
drafts that are right seven times in ten, so that every accepted length occurs. Models are small and
random, in float32 and batch-invariant mode, and the one that ships with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hocket.config import ModelSettings
from hocket.errors import InvalidRequest
from hocket.execution.drafting.speculation import DraftSource, MTPDraftSource, ScriptedDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.execution.step_failures import RequestFault
from hocket.kv.paged_cache import PagedCache
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import Grammar, GrammarKind, SamplingParams, StoppingParams
from hocket.types import FinishReason, RequestKey, TokenLogprobs
from tests.execution.conftest import TINY
from tests.execution.random_requests import random_request, random_tokens
from tests.execution.reference_generation import Generated, assert_logprobs_equal, generate
from tests.execution.toy_grammars import END, GRAMMARS, PIECES, text_of, under

VOCAB = 50
K = 3
# A smaller seed is no smaller case.
UNSHRUNK = (Phase.explicit, Phase.generate)
GREEDY = SamplingParams(temperature=0.0, top_logprobs=0)
SAMPLED = SamplingParams(seed=17, top_logprobs=0)


class Subjects:
    """One model and the engines that have to agree about it."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        # What the drafts are made from, by request; the same object all along.
        self._truth: dict[RequestKey, Sequence[int]] = {}
        scripted = ScriptedDraftSource(self._truth, 0.7, self.vocab_size)
        self.plain = self._engine(0)
        self.engines = [self.plain, self._engine(K), self._engine(K, scripted)]
        self.mtp = self.engines[1]

    def _engine(self, k: int, source: DraftSource | None = None) -> LocalEngine:
        limits = LocalEngineLimits(num_blocks=64, num_drafts=k, chunk_tokens=48)
        return LocalEngine(self.model, limits, source)

    def outputs(self, requests: Sequence[LocalRequest]) -> list[Generated]:
        """The reference's, once all engines were found to say the same."""
        requests = [replace(r, key=RequestKey(str(i))) for i, r in enumerate(requests)]
        expected = [
            generate(
                self.model,
                request.token_ids,
                request.sampling,
                request.stopping,
                None if request.grammar is None else request.grammar.handle,
            )
            for request in requests
        ]
        self._truth.clear()
        for request, output in zip(requests, expected, strict=True):
            assert request.key is not None
            self._truth[request.key] = (*request.token_ids, *output.token_ids)
        results = [engine.generate(requests) for engine in self.engines]
        for result, output in zip(results[0], expected, strict=True):
            assert_equal(result, output)
        for others in results[1:]:
            assert [bits(result) for result in others] == [bits(result) for result in results[0]]
        return expected

    def output(self, request: LocalRequest) -> Generated:
        (output,) = self.outputs([request])
        return output


def assert_equal(result: LocalResult, expected: Generated) -> None:
    assert result.token_ids == expected.token_ids
    assert result.finish_reason is expected.finish_reason
    assert_logprobs_equal(result.logprobs, expected.logprobs)
    assert_logprobs_equal(result.prompt_logprobs, expected.prompt_logprobs)


def bits(result: LocalResult) -> tuple[object, ...]:
    """All that may not depend on drafts."""
    return (result.token_ids, result.finish_reason, result.logprobs, result.prompt_logprobs)


@pytest.fixture(scope="module")
def subjects_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Subjects]:
    """`subjects_of(seed)`: a random checkpoint with these weights."""
    made: dict[int, Subjects] = {}

    def make(seed: int) -> Subjects:
        if seed not in made:
            folder = tmp_path_factory.mktemp("small")
            random_checkpoint(replace(TINY, vocab_size=VOCAB), folder, seed, "float32")
            made[seed] = Subjects(load_model(folder, "float32", "cpu", batch_invariant=True))
        return made[seed]

    return make


@pytest.fixture(scope="module")
def subjects(subjects_of: Callable[[int], Subjects]) -> Subjects:
    return subjects_of(0)


@pytest.fixture(scope="module")
def embedded() -> Subjects:
    checkpoint = ModelSettings().checkpoint()
    return Subjects(load_model(checkpoint, "float32", "cpu", batch_invariant=True))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return random_tokens(Random(seed), VOCAB, length)


def request_of(
    sampling: SamplingParams,
    max_tokens: int = 24,
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    prompt: tuple[int, ...] | None = None,
) -> LocalRequest:
    stopping = StoppingParams(max_tokens, frozenset(stop), min_tokens)
    return LocalRequest(prompt or prompt_of(20), sampling, stopping)


@settings(max_examples=40, deadline=None, phases=UNSHRUNK)
@given(st.integers(0, 2), st.integers(0, 2**32))
def test_any_mixture_of_parameters_says_what_the_reference_says(
    subjects_of: Callable[[int], Subjects], weights: int, seed: int
) -> None:
    random = Random(seed)
    requests = [random_request(random, VOCAB, 14) for _ in range(3)]
    requests[0] = under(random.choice(GRAMMARS), requests[0], VOCAB)
    subjects_of(weights).outputs(requests)


@settings(max_examples=5, deadline=None, phases=UNSHRUNK)
@given(st.integers(0, 2**32))
def test_any_mixture_on_the_embedded_model_too(embedded: Subjects, seed: int) -> None:
    random = Random(seed)
    vocab_size = embedded.vocab_size
    embedded.outputs([random_request(random, vocab_size, 10) for _ in range(2)])


MATTERS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "temperature": (SAMPLED, {"temperature": 0.5}),
    "top_k": (SAMPLED, {"top_k": 4}),
    "top_p": (SAMPLED, {"top_p": 0.5}),
    "min_p": (SAMPLED, {"min_p": 0.2}),
    "seed": (SAMPLED, {"seed": 18}),
    "a seed of 64 bits": (SAMPLED, {"seed": 2**64 - 1}),
    "choice": (SAMPLED, {"choice": 1}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 1.5}),
    "a repetition reward": (GREEDY, {"repetition_penalty": 0.7}),
    "frequency_penalty": (GREEDY, {"frequency_penalty": 0.6}),
    "presence_penalty": (GREEDY, {"presence_penalty": 0.6}),
    "logit_bias": (GREEDY, {"logit_bias": ((3, 1.5), (4, -1.5))}),
    "penalties when sampled": (SAMPLED, {"frequency_penalty": 1.0, "repetition_penalty": 1.2}),
    "penalties before filters": (replace(SAMPLED, top_k=3), {"presence_penalty": 1.5}),
}


@pytest.mark.parametrize("name", list(MATTERS))
def test_a_parameter_changes_the_output_and_is_exact(subjects: Subjects, name: str) -> None:
    without, changes = MATTERS[name]
    requests = [request_of(without), request_of(replace(without, **changes))]
    plain, changed = subjects.outputs(requests)
    assert changed.token_ids != plain.token_ids


def test_every_accepted_length_occurs_in_these_tests(subjects: Subjects) -> None:
    """Else a draft behind a wrong one might never have met a penalty."""
    request = request_of(replace(SAMPLED, frequency_penalty=1.0), max_tokens=100)
    subjects.output(request)
    (result,) = subjects.engines[2].generate([replace(request, key=RequestKey("0"))])
    drafted = result.usage.drafts.drafted_by_position
    accepted = result.usage.drafts.accepted_by_position
    assert len(accepted) == K
    assert drafted[0] > accepted[0] > accepted[1] > accepted[2] > 0


def test_top_k_of_one_is_greedy_whatever_the_temperature(subjects: Subjects) -> None:
    hot = request_of(replace(SAMPLED, top_k=1, temperature=5.0))
    assert subjects.output(hot).token_ids == subjects.output(request_of(GREEDY)).token_ids


def test_a_repetition_penalty_keeps_clear_of_prompt_and_output(subjects: Subjects) -> None:
    """A huge one, as long as there are others with a positive logit."""
    prompt = (1, 2, 9) * 5
    for penalty, num_different in ((1.0, 11), (1e6, 3 + 12)):
        sampling = replace(GREEDY, repetition_penalty=penalty)
        output = subjects.output(request_of(sampling, 12, prompt=prompt)).token_ids
        assert len({*prompt, *output}) == num_different


def test_frequency_and_presence_count_the_output_only(subjects: Subjects) -> None:
    request = request_of(GREEDY, 1, prompt=prompt_of(60))
    for penalty in ("frequency_penalty", "presence_penalty"):
        strong = replace(request, sampling=replace(GREEDY, **{penalty: 1e6}))
        assert subjects.output(strong) == subjects.output(request)
        longer = replace(strong, stopping=StoppingParams(VOCAB))
        assert sorted(subjects.output(longer).token_ids) == list(range(VOCAB))


def test_frequency_counts_how_often_and_presence_whether(subjects: Subjects) -> None:
    """A token with a lead of 10 says itself ten times under a frequency penalty of 1, for ever
    under a presence penalty of 1."""
    bias = ((7, 100.0),)
    often = replace(GREEDY, logit_bias=bias, frequency_penalty=10.0)
    once = replace(GREEDY, logit_bias=bias, presence_penalty=10.0)
    counted = subjects.output(request_of(often)).token_ids.count(7)
    assert 8 < counted < 13
    assert subjects.output(request_of(once)).token_ids == (7,) * 24


def test_a_bias_of_minus_100_bans_a_token_and_of_100_forces_it(subjects: Subjects) -> None:
    free = subjects.output(request_of(SAMPLED)).token_ids
    banned = tuple((token, -100.0) for token in sorted(set(free)))
    output = subjects.output(request_of(replace(SAMPLED, logit_bias=banned))).token_ids
    assert not set(free) & set(output)
    forced = replace(SAMPLED, logit_bias=((31, 100.0),))
    assert subjects.output(request_of(forced, 6)).token_ids == (31,) * 6


def test_tokens_that_tie_under_a_bias_go_to_the_lowest_id(subjects: Subjects) -> None:
    """A bias of 1e9 leaves nothing of what the model says: float32 is too coarse there."""
    ties = tuple((token, 1e9) for token in (40, 12, 33))
    assert subjects.output(request_of(replace(GREEDY, logit_bias=ties), 4)).token_ids == (12,) * 4
    filtered = replace(SAMPLED, logit_bias=ties, top_k=2)
    assert set(subjects.output(request_of(filtered)).token_ids) == {12, 33}


def test_min_tokens_holds_the_end_back_and_no_longer(subjects: Subjects) -> None:
    """Any token would end the output, but one."""
    stop = set(range(VOCAB)) - {9}
    for sampling in (GREEDY, SAMPLED):
        assert len(subjects.output(request_of(sampling, 24, stop)).token_ids) == 1
        for min_tokens in (1, 2, 5, 23):
            output = subjects.output(request_of(sampling, 24, stop, min_tokens))
            assert output.token_ids[:min_tokens] == (9,) * min_tokens
            assert output.finish_reason is FinishReason.STOP
            assert len(output.token_ids) == 1 + max(
                i for i in range(24) if output.token_ids[:i] == (9,) * i
            )
        full = subjects.output(request_of(sampling, 24, stop, 24))
        assert (full.token_ids, full.finish_reason) == ((9,) * 24, FinishReason.LENGTH)


def test_min_tokens_without_a_stop_token_changes_nothing(subjects: Subjects) -> None:
    """As for a client that ignores the model's end token."""
    request = request_of(SAMPLED, 8)
    assert subjects.output(request_of(SAMPLED, 8, (), 5)) == subjects.output(request)


def test_ignored_end_tokens_are_said_and_end_nothing(subjects: Subjects) -> None:
    free = subjects.output(request_of(SAMPLED))
    end = free.token_ids[10]
    stopped = subjects.output(request_of(SAMPLED, stop=[end]))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 24)


def test_d5_stop_tokens_and_max_tokens_cut_an_accepted_run_exactly(subjects: Subjects) -> None:
    penalised = replace(SAMPLED, presence_penalty=0.5, top_logprobs=2)
    free = subjects.output(request_of(penalised))
    ends = range(0, 24, 3)
    cut = subjects.outputs([request_of(penalised, end + 1) for end in ends])
    stopped = subjects.outputs([request_of(penalised, stop=[free.token_ids[end]]) for end in ends])
    for end, by_length, by_token in zip(ends, cut, stopped, strict=True):
        assert by_length.token_ids == free.token_ids[: end + 1]
        first = free.token_ids.index(free.token_ids[end])
        assert by_token.token_ids == free.token_ids[: first + 1]
        assert len(by_token.logprobs) == first + 1


def test_d4_logprobs_under_drafts_equal_those_without(subjects: Subjects) -> None:
    """Bit for bit, by `Subjects.outputs`; and they are the model's own: nothing of what changes
    the choice shows in them."""
    changed = SamplingParams(
        temperature=0.4,
        seed=3,
        top_k=5,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        logit_bias=((2, 3.0),),
        top_logprobs=VOCAB,
    )
    output = subjects.output(request_of(changed, stop=[1], min_tokens=24))
    assert len(output.logprobs) == 24
    first = subjects.output(request_of(replace(GREEDY, top_logprobs=VOCAB), 1)).logprobs[0]
    assert first.top == output.logprobs[0].top
    assert {len(told.top) for told in output.logprobs} == {VOCAB}
    assert any(told.token_id != told.top[0][0] for told in output.logprobs)


@pytest.mark.parametrize("length", [1, 2, 48, 49, 64, 65, 200])
def test_prompt_logprobs_are_one_less_than_the_prompt_whatever_its_chunks(
    subjects: Subjects, length: int
) -> None:
    scored = replace(SAMPLED, prompt_logprobs=2, repetition_penalty=1.5)
    prompt = prompt_of(length)
    output = subjects.output(request_of(scored, 4, prompt=prompt))
    assert [told.token_id for told in output.prompt_logprobs] == list(prompt[1:])


def test_d8_the_choices_of_a_seed_differ_and_each_can_be_had_again(subjects: Subjects) -> None:
    requests = [request_of(replace(SAMPLED, choice=choice)) for choice in range(4)]
    together = [output.token_ids for output in subjects.outputs(requests)]
    assert len(set(together)) == 4
    again = [subjects.output(request).token_ids for request in reversed(requests)]
    assert again == together[::-1]


def test_d9_the_same_seed_says_the_same_with_drafts_in_company_and_in_any_order(
    subjects: Subjects,
) -> None:
    """32 copies in one batch, some with other neighbours before them."""
    random = Random(4)
    mixed = replace(SAMPLED, top_p=0.95, frequency_penalty=0.4, repetition_penalty=1.1)
    request = request_of(mixed, 16)
    alone = bits(subjects.plain.generate([request])[0])
    for engine in (subjects.plain, subjects.mtp):
        company = [random_request(random, VOCAB, 14) for _ in range(16)] + [request] * 32
        random.shuffle(company)
        results = engine.generate(company)
        same = [bits(r) for r, asked in zip(results, company, strict=True) if asked is request]
        assert same == [alone] * 32


# Grammars.


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
def test_d10_a_grammar_is_kept_to_and_each_token_advances_it_once(
    subjects: Subjects, grammar: Grammar
) -> None:
    """Greedy and sampled, filtered, penalised, biased: what ends is of the grammar in full."""
    samplings = [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, temperature=100.0, seed=1),
        replace(SAMPLED, top_k=2, seed=2),
        replace(SAMPLED, top_p=0.8, min_p=0.1, seed=3),
        replace(SAMPLED, frequency_penalty=1.0, repetition_penalty=1.3, seed=4),
        replace(SAMPLED, logit_bias=((END, 3.0), (7, -5.0)), seed=5),
    ]
    requests = [under(grammar, request_of(sampling, 40), VOCAB) for sampling in samplings]
    outputs = subjects.outputs(requests)
    assert len({output.token_ids for output in outputs}) > 2
    ended = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert len(ended) >= 3
    for output in ended:
        assert is_whole(grammar, text_of(output.token_ids)), output.token_ids
        assert output.token_ids.index(END) == len(output.token_ids) - 1


def is_whole(grammar: Grammar, text: str) -> bool:
    """By other means than xgrammar."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return re.fullmatch(grammar.source, text) is not None
        case GrammarKind.JSON_SCHEMA:
            found = json.loads(text)
            is_list = all(value in (True, None, 10) for value in found["a"])
            return list(found) == ["a", "bc"] and is_list and set(found["bc"]) <= set("abcde")
        case _:
            depth = len(text) - len(text.lstrip("a"))
            core = text[depth : len(text) - depth]
            return text.endswith("b" * depth) and bool(re.fullmatch("c[def]?0|é", core))


def test_min_tokens_gives_way_where_a_grammar_leaves_the_end_only(subjects: Subjects) -> None:
    """And holds the end back as long as the grammar can go on."""
    for grammar, length in ((Grammar(GrammarKind.REGEX, "abc?"), 3), (GRAMMARS[0], 9)):
        for sampling in (GREEDY, SAMPLED, replace(SAMPLED, top_k=5, top_p=0.9)):
            request = under(grammar, request_of(sampling, 40, min_tokens=30), VOCAB)
            output = subjects.output(request)
            assert output.finish_reason is FinishReason.STOP
            assert len(text_of(output.token_ids)) == length


def test_where_the_end_is_ignored_nothing_but_the_end_follows_it(subjects: Subjects) -> None:
    request = under(Grammar(GrammarKind.REGEX, "ab"), request_of(SAMPLED, 8), VOCAB)
    endless = replace(request, stopping=StoppingParams(8))
    output = subjects.output(endless)
    assert output.finish_reason is FinishReason.LENGTH
    assert output.token_ids[-6:] == (END,) * 6
    assert text_of(output.token_ids) == "ab"


# Behind "cb" there is nothing: no piece has a "z".
DEAD_END = Grammar(GrammarKind.EBNF, 'root ::= "c" ("a" "0" | "b" "z")')
A, B = PIECES.index("a"), PIECES.index("b")


def test_a_draft_into_a_dead_end_of_a_grammar_changes_nothing(subjects: Subjects) -> None:
    """Every scripted draft is wrong here, by one: "b" where the model says "a"."""
    sampling = replace(GREEDY, logit_bias=((A, 100.0),))
    request = under(DEAD_END, request_of(sampling, 8), VOCAB)
    (plain,) = subjects.plain.generate([request])
    assert text_of(plain.token_ids) == "ca0"
    request = replace(request, key=RequestKey("0"))
    truth = {RequestKey("0"): (*request.token_ids, *plain.token_ids)}
    engine = LocalEngine(
        subjects.model, LocalEngineLimits(num_drafts=K), ScriptedDraftSource(truth, 0.0, VOCAB)
    )
    (drafted,) = engine.generate([request])
    assert bits(drafted) == bits(plain)
    assert drafted.usage.drafts.drafted_tokens > 0


def test_an_output_in_a_dead_end_of_its_grammar_fails_as_the_request_s_own_fault(
    subjects: Subjects,
) -> None:
    sampling = replace(GREEDY, logit_bias=((B, 100.0),))
    request = replace(under(DEAD_END, request_of(sampling, 8), VOCAB), key=RequestKey("0"))
    truth = {RequestKey("0"): (*request.token_ids, PIECES.index("c"), B)}
    for k in (0, 1):
        limits = LocalEngineLimits(num_drafts=k)
        engine = LocalEngine(subjects.model, limits, ScriptedDraftSource(truth, 1.0, VOCAB))
        with pytest.raises(RequestFault) as fault:
            engine.generate([request])
        assert isinstance(fault.value.error, InvalidRequest)


@pytest.mark.parametrize("k", [0, K])
def test_d10_a_grammar_goes_on_from_any_of_its_tokens(subjects: Subjects, k: int) -> None:
    for grammar in GRAMMARS:
        sampling = replace(SAMPLED, frequency_penalty=0.3, top_p=0.98)
        request = under(grammar, request_of(sampling, 24, min_tokens=4), VOCAB)
        expected = subjects.output(request)
        for num_done in range(1, len(expected.token_ids)):
            rest = continued(subjects.model, request, expected.token_ids[:num_done], k)
            assert rest.token_ids == expected.token_ids[num_done:]


# Continuations: what an earlier attempt put out is the end of the prompt.


@dataclass(frozen=True)
class Continued:
    """What a runner says behind the first tokens of an output."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


def continued(model: Transformer, request: LocalRequest, done: Sequence[int], k: int) -> Continued:
    """As a worker goes on after a migration or a preemption, the prompt in two chunks."""
    cache = PagedCache(model.kv_layout(), 4, "cpu")
    runner = ModelRunner(model, cache, MTPDraftSource(model, cache) if k else None)
    prompt = [*request.token_ids, *done]
    sequence = RunningSequence(
        key=RequestKey("again", attempt=1),
        token_ids=prompt,
        prompt_tokens=len(prompt),
        sampling=request.sampling,
        stopping=request.stopping.after(len(done)),
        block_table=cache.pool.allocate(4),
        num_generated=len(done),
        grammar=request.grammar,
    )
    first = None
    for chunk in filter(None, (len(prompt) // 2, len(prompt) - len(prompt) // 2)):
        (first,) = runner.prefill([PrefillChunk(sequence, chunk)])
    assert first is not None
    logprobs = [] if first.logprobs is None else [first.logprobs]
    is_over = first.finish_reason is not None
    while not is_over:
        (step,) = runner.decode([sequence], [k])
        logprobs += step.logprobs
        is_over = step.finish_reason is not None
    told = tuple(sequence.token_ids[sequence.prompt_tokens :])
    return Continued(told, tuple(logprobs), tuple(sequence.prompt_logprobs))


@pytest.mark.parametrize("k", [0, K])
@pytest.mark.parametrize("seed", range(4))
def test_d12_an_output_goes_on_from_any_of_its_tokens(
    subjects: Subjects, seed: int, k: int
) -> None:
    """Penalties count what was said before as output, not as prompt; min_tokens counts it too."""
    sampling = SamplingParams(
        temperature=[0.0, 1.0, 0.7, 1.3][seed],
        seed=seed,
        top_p=0.98,
        top_logprobs=2,
        prompt_logprobs=0,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        logit_bias=((5, 1.0),),
    )
    request = request_of(sampling, 16, range(0, 50, 5), 9, prompt_of(30, seed))
    expected = subjects.output(request)
    as_prompt = request_of(sampling, 16, range(0, 50, 5), 9, (*request.token_ids, 1))
    assert len(expected.token_ids) >= 9 < len(subjects.output(as_prompt).token_ids)
    for num_done in range(1, len(expected.token_ids)):
        done = expected.token_ids[:num_done]
        rest = continued(subjects.model, request, done, k)
        assert rest.token_ids == expected.token_ids[num_done:]
        assert_logprobs_equal(rest.logprobs, expected.logprobs[num_done:])
        assert_logprobs_equal(rest.prompt_logprobs, expected.prompt_logprobs)
