"""The HTTP door as OpenAI's own Python client sees it: real HTTP on loopback, scripted engines."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from hocket.errors import Overloaded, WorkerUnavailable
from hocket.types import Leg

TEXT = " the quick brown fox jumps over the lazy dog"
HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_completion_comes_whole(open_door: Any, tokenizer: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.completions.create(model="fox", prompt="hello", max_tokens=99)
        num_prompt = len(tokenizer.encode("hello").ids)
        num_output = len(tokenizer.encode(TEXT, add_special_tokens=False).ids) + 1
        (choice,) = reply.choices
        assert (reply.object, reply.model, reply.id[:5]) == ("text_completion", "fox", "cmpl-")
        assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
        assert reply.usage.prompt_tokens == num_prompt
        assert reply.usage.completion_tokens == num_output
        assert reply.usage.total_tokens == num_prompt + num_output
        assert reply.usage.prompt_tokens_details.cached_tokens == 2
        (prefill,), (decode,) = (w.engine.submitted for w in (d.behind.prefill, d.behind.decode))
        assert (prefill.leg, decode.leg) == (Leg.PREFILL, Leg.DECODE)


async def test_a_chat_comes_whole(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.chat.completions.create(
            model="fox", messages=HELLO, max_completion_tokens=3
        )
        (choice,) = reply.choices
        assert (reply.object, reply.id[:9]) == ("chat.completion", "chatcmpl-")
        assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
        assert TEXT.startswith(choice.message.content)
        assert reply.usage.completion_tokens == 3


async def test_a_completion_streams_the_same_text(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        stream = await d.client.completions.create(model="fox", prompt="hello", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == TEXT
        assert len(chunks) > 1
        assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all(c.usage is None for c in chunks)
        assert len({(c.id, c.created, c.system_fingerprint) for c in chunks}) == 1
        assert chunks[0].system_fingerprint.startswith("fp_")


async def test_a_chat_streams_role_text_reason_and_usage_when_asked(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        stream = await d.client.chat.completions.create(
            model="fox", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        first, *middle, last, usage = [chunk async for chunk in stream]
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(c.choices[0].delta.content for c in middle) == TEXT
        assert {c.choices[0].finish_reason for c in (first, *middle)} == {None}
        assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
        assert {c.usage for c in (first, *middle, last)} == {None}
        assert usage.choices == []
        assert usage.usage.total_tokens == (
            usage.usage.prompt_tokens + usage.usage.completion_tokens
        )


async def test_tokens_stream_as_they_are_made(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        d.behind.decode.engine.stall_at = 3
        stream = await d.client.completions.create(model="fox", prompt="x", stream=True)
        async with asyncio.timeout(5):
            early = [await anext(stream) for _ in range(2)]
        d.behind.decode.engine.resume.set()
        rest = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in (*early, *rest)) == TEXT


@pytest.mark.parametrize("stop", [" fox", ["nothing", " fox"]])
async def test_stop_strings_end_the_text(open_door: Any, stop: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.completions.create(model="fox", prompt="x", stop=stop)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == (
            " the quick brown",
            "stop",
        )
        stream = await d.client.chat.completions.create(
            model="fox", messages=HELLO, stop=stop, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream])
        assert text == " the quick brown"


async def test_sampling_reaches_the_workers(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.chat.completions.create(
            model="fox",
            messages=HELLO,
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            max_tokens=7,
            extra_body={"top_k": 5, "min_p": 0.125, "ignore_eos": True, "max_draft_tokens": 2},
        )
        request = d.behind.prefill.engine.submitted[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
        assert (sampling.min_p, sampling.seed) == (0.125, 2**64 - 1)
        assert (request.stopping.max_tokens, request.stopping.stop_token_ids) == (7, frozenset())
        assert request.max_draft_tokens == 2
        assert reply.hocket["seed"] == 2**64 - 1


async def test_a_seed_that_was_not_sent_comes_back_and_gives_the_same_again(
    open_door: Any,
) -> None:
    async with open_door(TEXT) as d:
        first = await d.client.completions.create(model="fox", prompt="x")
        again = await d.client.completions.create(
            model="fox", prompt="x", extra_body={"seed": first.hocket["seed"]}
        )
        assert first.hocket["seed"] == again.hocket["seed"]
        seeds = {r.sampling.seed for r in d.behind.prefill.engine.submitted}
        assert seeds == {first.hocket["seed"]}


@pytest.mark.parametrize("shape", ["text", "ids", "one text", "one ids"])
async def test_a_prompt_may_be_text_or_token_ids_or_a_list_of_one(
    open_door: Any, tokenizer: Any, shape: str
) -> None:
    ids = tokenizer.encode("hello there").ids
    prompt: Any = {
        "text": "hello there", "ids": ids, "one text": ["hello there"], "one ids": [ids]
    }[shape]  # fmt: skip
    async with open_door(TEXT) as d:
        await d.client.completions.create(model="fox", prompt=prompt)
        assert list(d.behind.prefill.engine.submitted[0].token_ids) == ids


async def test_text_parts_and_developer_messages_reach_the_template(
    open_door: Any, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    async with open_door(TEXT) as d:
        await d.client.chat.completions.create(
            model="fox",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": parts},
            ],
        )
        seen = tokenizer.decode(
            list(d.behind.prefill.engine.submitted[0].token_ids), skip_special_tokens=False
        )
        assert seen == "<s><system>be brief<user>hello<assistant>"


async def test_completion_logprobs_are_the_same_streamed_and_whole(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.completions.create(model="fox", prompt="x", logprobs=1)
        whole = reply.choices[0].logprobs
        assert "".join(whole.tokens) == TEXT + "</s>"
        assert whole.token_logprobs == [-float(i) for i in range(len(whole.tokens))]
        assert [TEXT[o:] for o in whole.text_offset[:2]] == [TEXT, TEXT[len(whole.tokens[0]) :]]
        assert whole.top_logprobs[0] == {whole.tokens[0]: 0.0}
        stream = await d.client.completions.create(model="fox", prompt="x", logprobs=1, stream=True)
        pieces = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for p in pieces for x in getattr(p, name)] == getattr(whole, name)


async def test_chat_logprobs_are_the_same_streamed_and_whole(open_door: Any) -> None:
    async with open_door("größer 世界") as d:
        reply = await d.client.chat.completions.create(
            model="fox", messages=HELLO, logprobs=True, top_logprobs=1
        )
        whole = reply.choices[0].logprobs.content
        assert bytes(b for e in whole for b in e.bytes).decode() == "größer 世界</s>"
        assert all(e.token.startswith("bytes:\\x") or e.token.encode() == bytes(e.bytes)
                   for e in whole)  # fmt: skip
        assert all(e.top_logprobs[0].token == e.token for e in whole)
        assert len(whole) == reply.usage.completion_tokens
        stream = await d.client.chat.completions.create(
            model="fox", messages=HELLO, logprobs=True, top_logprobs=1, stream=True
        )
        chunks = [c async for c in stream]
        pieces = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
        assert [entry for piece in pieces for entry in piece] == whole
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "größer 世界"


async def test_the_model_is_listed_and_found(open_door: Any) -> None:
    async with open_door() as d:
        (model,) = (await d.client.models.list()).data
        assert (model.id, model.object, model.owned_by) == ("fox", "model", "hocket")
        assert model.max_model_len == 256
        assert (await d.client.models.retrieve("fox")).id == "fox"
        with pytest.raises(openai.NotFoundError, match="'fox' is"):
            await d.client.models.retrieve("wolf")


async def test_another_model_is_404(open_door: Any) -> None:
    async with open_door() as d:
        with pytest.raises(openai.NotFoundError) as caught:
            await d.client.completions.create(model="wolf", prompt="x")
        assert caught.value.code == "model_not_found"


async def test_a_full_queue_is_429_with_a_hint_and_unavailable_is_503(open_door: Any) -> None:
    async with open_door() as d:
        d.behind.prefill.engine.fails_with = Overloaded("prefill is full")
        with pytest.raises(openai.RateLimitError, match="prefill is full") as caught:
            await d.client.completions.create(model="fox", prompt="x", stream=True)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        d.behind.prefill.engine.fails_with = WorkerUnavailable("prefill is draining")
        with pytest.raises(openai.InternalServerError, match="draining") as gone:
            await d.client.completions.create(model="fox", prompt="x")
        assert (gone.value.status_code, gone.value.code) == (503, "worker_unavailable")
        assert gone.value.response.headers["x-should-retry"] == "true"


async def test_the_client_retries_what_may_work_later(open_door: Any) -> None:
    async with open_door() as d:
        d.behind.prefill.engine.fails_with = Overloaded("prefill is full")
        patient = d.client.with_options(max_retries=1)
        call = asyncio.create_task(patient.completions.create(model="fox", prompt="x"))
        while not d.behind.prefill.engine.submitted:
            await asyncio.sleep(0.005)
        d.behind.prefill.engine.fails_with = None
        assert (await call).choices[0].text == TEXT


async def test_a_deadline_is_504_and_is_not_retried(open_door: Any, until: Any) -> None:
    async with open_door(deadline_s=0.2) as d:
        d.behind.decode.engine.stall_at = d.behind.prefill.engine.stall_at = 0
        patient = d.client.with_options(max_retries=2)
        with pytest.raises(openai.APIStatusError) as caught:
            await patient.completions.create(model="fox", prompt="x", stream=True)
        assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
        await until(lambda: d.behind.is_idle)
        assert len(d.behind.prefill.engine.submitted) == 1


async def test_an_error_after_the_first_token_ends_the_stream_with_an_error_event(
    open_door: Any, until: Any
) -> None:
    async with open_door(deadline_s=0.4) as d:
        d.behind.decode.engine.stall_at = 3
        stream = await d.client.chat.completions.create(model="fox", messages=HELLO, stream=True)
        seen: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match=r"not finished 0\.4 s after arrival"):
            await read()
        assert "".join(seen)
        assert TEXT.startswith("".join(seen))
        await until(lambda: d.behind.is_idle)


async def test_a_client_that_closes_its_stream_cancels_both_legs(
    open_door: Any, until: Any
) -> None:
    async with open_door() as d:
        d.behind.decode.engine.stall_at = 3
        stream = await d.client.completions.create(model="fox", prompt="x", stream=True)
        await anext(stream)
        await until(lambda: bool(d.behind.decode.engine.running))
        await stream.close()
        await until(lambda: d.behind.is_idle)
        assert len(d.behind.decode.engine.cancelled) == 1


async def test_many_streams_at_once_do_not_mix(open_door: Any) -> None:
    async def ask(d: Any, number: int) -> str:
        stream = await d.client.completions.create(
            model="fox", prompt=f"n{number}", stream=True, max_tokens=number + 1
        )
        return "".join([c.choices[0].text async for c in stream])

    async with open_door() as d:
        texts = await asyncio.gather(*(ask(d, i) for i in range(40)))
        assert texts == sorted(texts, key=len)
        assert texts[-1] == TEXT
        assert d.behind.is_idle
