"""Several completions of one prompt: independent, told apart, and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from control_plane.choices import OneStream
from control_plane.request_log import RequestRecord
from hocket.errors import DeadlineExceeded, InternalError, Overloaded
from hocket.rpc import generation_pb2 as generation
from hocket.types import Role
from tests.control_plane.test_migration import loses_at

TEXTS = [" the quick brown fox", " hello there", " dog", " world, hello world"]
ENDED = {"max_tokens": 40}


def by_choice(answer: Any) -> dict[int, list[generation.GenerateResponse]]:
    found: dict[int, list[generation.GenerateResponse]] = {}
    for response in answer.responses:
        found.setdefault(response.choice, []).append(response)
    return found


def tokens_of(responses: list[generation.GenerateResponse]) -> list[int]:
    return [t for r in responses for t in r.token_ids]


def scripts(tokenizer: Any) -> Mapping[int, list[int]]:
    return {i: [*tokenizer.encode(t, add_special_tokens=False).ids, 1] for i, t in enumerate(TEXTS)}


def follow_scripts(s: Any, tokenizer: Any) -> None:
    """Has the workers choose by the choice, as their noise does."""
    for worker in s.workers:
        worker.engine.scripts = dict(scripts(tokenizer))


@pytest.mark.parametrize("step_tokens", [1, 3])
async def test_each_choice_is_whole_and_has_its_own_end(
    serving: Any, until: Any, tokenizer: Any, step_tokens: int
) -> None:
    async with serving() as s:
        follow_scripts(s, tokenizer)
        s.decode.engine.step_tokens = step_tokens
        answer = await s.generate(
            text="hello", n=4, sampling={"seed": 5}, stopping=ENDED, top_logprobs=0
        )
        found = by_choice(answer)
        assert sorted(found) == [0, 1, 2, 3]
        for choice, responses in found.items():
            assert "".join(r.text for r in responses) == TEXTS[choice]
            assert tokens_of(responses) == scripts(tokenizer)[choice]
            assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [
                True
            ]
            index = 0
            for response in responses:
                assert response.output_index == index
                assert len(response.logprobs) == len(response.token_ids)
                index += len(response.token_ids)
            usage = responses[-1].finish.usage
            assert usage.output_tokens == len(scripts(tokenizer)[choice])
            assert usage.prompt_tokens == len(tokenizer.encode("hello").ids)
            assert responses[-1].finish.seed == 5
        started = s.prefill.engine.submitted
        assert [r.sampling.choice for r in started] == [0, 1, 2, 3]
        assert {r.sampling.seed for r in started} == {5}
        assert len({r.key.request_id for r in started}) == 4
        await until(lambda: s.is_idle)


async def test_a_choice_is_the_same_whatever_the_number_of_choices(
    serving: Any, tokenizer: Any
) -> None:
    async with serving() as s:
        follow_scripts(s, tokenizer)
        for num in (0, 1, 2, 3, 4):
            answer = await s.generate(text="x", n=num, sampling={"seed": 9}, stopping=ENDED)
            found = by_choice(answer)
            assert {c: tokens_of(r) for c, r in found.items()} == {
                c: scripts(tokenizer)[c] for c in range(max(1, num))
            }


async def test_a_seed_that_the_server_picks_is_one_for_all(serving: Any) -> None:
    async with serving() as s:
        answer = await s.generate(text="x", n=3)
        seeds = {r.finish.seed for r in answer.responses if r.HasField("finish")}
        assert len(seeds) == 1


async def test_choices_are_interleaved(serving: Any, until: Any) -> None:
    async with serving() as s:
        s.decode.engine.stall_at = 3
        call = asyncio.create_task(s.generate(text="x", n=3))
        value = s.gateway.metrics.registry.get_sample_value
        await until(lambda: value("hocket_output_tokens_total") == 9)
        s.decode.engine.resume.set()
        order = [r.choice for r in (await call).responses]
        assert order != sorted(order)


async def test_with_a_prefix_cache_the_others_wait_for_the_first_token_of_choice_0(
    serving: Any, until: Any
) -> None:
    async with serving(prefill={"has_prefix_cache": True}) as s:
        s.prefill.engine.stall_at = s.decode.engine.stall_at = 0
        call = asyncio.create_task(s.generate(text="x", n=3))
        await until(lambda: bool(s.decode.engine.running))
        assert [r.sampling.choice for r in s.prefill.engine.submitted] == [0]
        s.decode.engine.resume.set()
        s.prefill.engine.resume.set()
        await call
        assert [r.sampling.choice for r in s.prefill.engine.submitted] == [0, 1, 2]


async def test_without_a_prefix_cache_all_start_at_once(serving: Any, until: Any) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = 0
        call = asyncio.create_task(s.generate(text="x", n=3))
        await until(lambda: len(s.prefill.engine.running) == 3)
        s.prefill.engine.resume.set()
        await call


async def test_a_choice_that_a_worker_loses_goes_on_elsewhere_by_itself(
    serving: Any, until: Any, tokenizer: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        follow_scripts(s, tokenizer)
        for worker in (s.decode, other):
            loses_at(worker, 2)
        answer = await s.generate(text="x", n=4, stopping=ENDED)
        texts = {c: "".join(r.text for r in rs) for c, rs in by_choice(answer).items()}
        assert texts == dict(enumerate(TEXTS))
        await until(lambda: s.is_idle)


async def test_an_error_of_one_choice_ends_all(serving: Any, until: Any) -> None:
    async with serving() as s:
        s.decode.engine.stall_at = 3
        engine = s.decode.engine
        submit = engine.submit

        def refuse_one(request: Any) -> None:
            if request.sampling.choice == 2:
                raise InternalError("choice 2 is broken")
            submit(request)

        engine.submit = refuse_one
        with pytest.raises(InternalError, match="choice 2 is broken"):
            await s.generate(text="x", n=4)
        await until(lambda: s.is_idle)
        value = s.gateway.metrics.registry.get_sample_value
        assert value("hocket_requests_total", {"outcome": "INTERNAL"}) == 1
        assert value("hocket_requests_in_flight") == value("hocket_requests_queued") == 0


async def test_a_first_choice_that_is_refused_is_not_waited_for(serving: Any, until: Any) -> None:
    async with serving(prefill={"has_prefix_cache": True}) as s:
        s.prefill.engine.fails_with = Overloaded("full")
        with pytest.raises(Overloaded):
            await s.generate(text="x", n=2)
        await until(lambda: s.is_idle)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_deadline_and_a_leaving_client_end_all(serving: Any, until: Any, how: str) -> None:
    async with serving(deadline_s=0.3 if how == "deadline" else 60) as s:
        s.decode.engine.stall_at = 3
        call = asyncio.create_task(s.generate(text="x", n=4))
        await until(lambda: len(s.decode.engine.running) == 4)
        if how == "cancel":
            call.cancel()
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        kinds = {"deadline": DeadlineExceeded, "cancel": asyncio.CancelledError}
        assert isinstance(outcome, kinds[how])
        await until(lambda: s.is_idle)
        assert len(s.decode.engine.cancelled) == 4


async def test_figures_count_one_request_and_the_tokens_of_all_choices(
    serving: Any, tokenizer: Any
) -> None:
    async with serving() as s:
        follow_scripts(s, tokenizer)
        await s.generate(text="hello", n=4, stopping=ENDED)
        figures = s.gateway.metrics.figures()
        num_prompt = len(tokenizer.encode("hello").ids)
        num_output = sum(map(len, scripts(tokenizer).values()))
        assert (figures.arrived_requests, figures.requests_by_outcome) == (1, {"OK": 1})
        assert figures.first_token.count == 1
        assert figures.arrived_prompt_tokens == figures.prompt_tokens == 4 * num_prompt
        assert figures.output_tokens == figures.finished_output_tokens == num_output
        assert (figures.in_flight, figures.queued) == (0, 0)


async def test_messages_go_out_one_at_a_time_and_the_last_end_is_the_answers() -> None:
    sending, seen = 0, list[int]()
    record = RequestRecord("r")

    async def send(response: generation.GenerateResponse) -> None:
        nonlocal sending
        sending += 1
        assert sending == 1, "two messages at a time"
        await asyncio.sleep(0)
        seen.append(response.choice)
        sending -= 1

    stream = OneStream(send, 3, record)

    async def tell(choice: int) -> None:
        for _ in range(5):
            await stream.send(generation.GenerateResponse(choice=choice))
        assert not record.is_answered
        await stream.send(generation.GenerateResponse(choice=choice, finish={}))

    await stream.serve([tell(choice) for choice in range(3)])
    assert sorted(seen) == sorted([0, 1, 2] * 6)
    assert record.is_answered
