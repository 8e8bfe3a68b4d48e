"""Request parameters on their way to the workers, and what comes back of them."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from hocket.errors import InvalidRequest
from hocket.request_params import Grammar, GrammarKind, TypicalAcceptance
from hocket.rpc import generation_pb2 as generation
from hocket.types import Role

TEXT = " the quick brown fox jumps over the lazy dog"


async def test_every_parameter_reaches_both_workers(serving: Any) -> None:
    async with serving() as s:
        await s.generate(
            text="x",
            sampling={
                "repetition_penalty": 1.5,
                "frequency_penalty": 0.25,
                "presence_penalty": -0.5,
                "logit_bias": {9: -100, 3: 2.5},
            },
            grammar={"regex": "a+"},
            typical_acceptance={"epsilon": 0.5, "delta": 0.25},
        )
        await s.generate(text="x", stopping={"min_tokens": 3, "max_tokens": 20})
        for engine in (s.prefill.engine, s.decode.engine):
            first, second = engine.submitted
            sampling = first.sampling
            assert sampling.repetition_penalty == 1.5
            assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.25, -0.5)
            assert sampling.logit_bias == ((3, 2.5), (9, -100.0))
            assert sampling.grammar == Grammar(GrammarKind.REGEX, "a+")
            assert sampling.acceptance == TypicalAcceptance(0.5, 0.25)
            assert (second.stopping.min_tokens, second.stopping.max_tokens) == (3, 20)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_grammar_that_does_not_compile_is_the_clients_error_and_no_workers_fault(
    serving: Any, until: Any, role: Role
) -> None:
    async with serving() as s:
        other = await s.add(role)
        workers = [s.prefill if role is Role.PREFILL else s.decode, other]
        for worker in workers:
            worker.engine.fails_with = InvalidRequest("grammar.regex", "(", "a regular expression")
        with pytest.raises(InvalidRequest) as caught:
            await s.generate(text="x", grammar={"regex": "("})
        error = caught.value
        assert (error.field, error.is_retryable) == ("grammar.regex", False)
        assert error.metadata["limit"] == "a regular expression"
        assert "grammar.regex is '('; it must be a regular expression." in str(error)
        assert sum(len(worker.engine.submitted) for worker in workers) == 1, "it was tried again"
        page = generate_latest(s.gateway.metrics.registry).decode()
        assert 'hocket_requests_total{outcome="INVALID_REQUEST"} 1.0' in page
        assert not [line for line in page.split("\n") if line.startswith("hocket_replacements_t")]
        for worker in workers:
            worker.engine.fails_with = None
        assert (await s.generate(text="x")).text == TEXT
        assert s.gateway.unready() == {}
        await until(lambda: s.is_idle)


EXACT, TYPICAL, SYNTHETIC = (
    generation.ACCEPTANCE_EXACT,
    generation.ACCEPTANCE_TYPICAL,
    generation.ACCEPTANCE_SYNTHETIC,
)


@pytest.mark.parametrize("is_synthetic", [False, True])
async def test_the_end_says_whether_drafts_could_change_the_output(
    serving: Any, is_synthetic: bool
) -> None:
    changes = {"synthetic_acceptance": 0.7} if is_synthetic else {}
    async with serving(decode=changes) as s:
        plain = await s.generate(text="x")
        typical = await s.generate(text="x", typical_acceptance={})
        assert plain.finish.acceptance == (SYNTHETIC if is_synthetic else EXACT)
        assert typical.finish.acceptance == (SYNTHETIC if is_synthetic else TYPICAL)


async def test_an_output_that_a_synthetic_worker_began_stays_synthetic(serving: Any) -> None:
    async with serving(decode={"synthetic_acceptance": 0.7}) as s:
        s.decode.engine.stall_at = 3
        call = s.client.generate(generation.GenerateRequest(text="x"))
        seen = [await anext(call)]
        while sum(len(r.token_ids) for r in seen) < 3:
            seen.append(await anext(call))
        honest = await s.add(Role.DECODE)
        await s.decode.stop()
        seen += [response async for response in call]
        assert seen[-1].finish.acceptance == SYNTHETIC
        assert seen[-1].finish.hand_off.decode_worker == honest.description.worker_id


async def test_drafts_are_refused_where_no_worker_has_heads(serving: Any) -> None:
    async with serving(decode={"has_mtp": False}) as s:
        with pytest.raises(InvalidRequest, match="no multi-token prediction heads"):
            await s.generate(text="x", max_draft_tokens=2)
        assert (await s.generate(text="x", max_draft_tokens=0)).text == TEXT


@pytest.mark.parametrize("step_tokens", [1, 4])
@pytest.mark.parametrize("include_stop", [False, True])
async def test_stops_count_after_the_least_tokens_only(
    serving: Any, tokenizer: Any, step_tokens: int, include_stop: bool
) -> None:
    text = " fox and fox and fox"
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    first = next(n for n in range(99) if "fox" in tokenizer.decode(whole[:n]))
    async with serving(text) as s:
        s.decode.engine.step_tokens = step_tokens

        async def ask(min_tokens: int) -> Any:
            stopping = {"stop": ["fox"], "min_tokens": min_tokens, "include_stop": include_stop}
            return await s.generate(text="x", stopping={"max_tokens": 99, **stopping})

        end = "fox" if include_stop else ""
        assert [(await ask(n)).text for n in (0, first - 1)] == [f" {end}"] * 2
        answer = await ask(first)
        assert answer.text == f" fox and {end}"
        assert answer.finish.matched_stop == "fox"


async def test_an_included_stop_token_is_spelled_out_unless_it_is_special(
    serving: Any, tokenizer: Any
) -> None:
    (fox,) = tokenizer.encode(" fox", add_special_tokens=False).ids
    async with serving(TEXT) as s:
        stopping = {"stop_token_ids": [fox], "include_stop": True}
        assert (await s.generate(text="x", stopping=stopping)).text == " the quick brown fox"
        stopping = {"include_stop": True}
        assert (await s.generate(text="x", stopping=stopping)).text == TEXT
