"""Logprobs of a prompt: each position once, in order, before the first token."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.prompt_logprobs import MAX_ENTRIES, PromptLogprobsInOrder
from hocket.errors import InternalError, WorkerUnavailable
from hocket.types import Leg, PromptLogprobs, RequestKey, Role, TokenLogprobs
from tests.control_plane.test_migration import loses_at

TEXT = " the quick brown fox jumps over the lazy dog"
PROMPT = [0, *range(30, 40)]
KEY = RequestKey("r")


def told(first: int, end: int) -> PromptLogprobs:
    """Of positions first to end - 1: the entry of a position is about the token of that number."""
    return PromptLogprobs(KEY, first, tuple(TokenLogprobs(p, 0.0) for p in range(first, end)))


@given(data=st.data())
def test_any_pieces_in_any_order_and_number_come_out_once_and_in_order(data: st.DataObject) -> None:
    last = data.draw(st.integers(0, 12))
    bounds = data.draw(st.sets(st.integers(2, 15)))
    pieces = [told(a, b) for a, b in pairwise([1, *sorted(bounds), 16])]
    pieces += data.draw(st.lists(st.sampled_from(pieces)))
    prompt = PromptLogprobsInOrder(last)
    taken: list[int] = []
    for piece in data.draw(st.permutations(pieces)):
        prompt.add(piece)
        taken += [entry.token_id for entries in prompt.take() for entry in entries]
        assert taken == list(range(1, len(taken) + 1))
        assert prompt.is_complete or len(taken) < last
    assert taken == list(range(1, last + 1))
    assert prompt.is_complete


def test_what_is_held_completes_it_before_it_is_taken() -> None:
    prompt = PromptLogprobsInOrder(3)
    prompt.add(told(2, 4))
    assert (prompt.is_complete, prompt.take()) == (False, [])
    prompt.add(told(1, 2))
    assert prompt.is_complete
    assert [len(entries) for entries in prompt.take()] == [3]


def test_messages_stay_small() -> None:
    prompt = PromptLogprobsInOrder(600)
    prompt.add(told(1, 700))
    assert [len(entries) for entries in prompt.take()] == [MAX_ENTRIES, MAX_ENTRIES, 88]


def check(answer: Any, prompt: list[int] = PROMPT) -> None:
    """All positions once, in order, and no token of choice 0 before the last of them."""
    entries = [e for r in answer.responses for e in r.prompt_logprobs]
    assert [e.token_id for e in entries] == prompt[1:]
    assert [e.logprob for e in entries] == [-float(i) for i in range(1, len(prompt))]
    assert all([t.token_id for t in e.top] == [e.token_id] for e in entries)
    first = [r for r in answer.responses if r.choice == 0]
    kinds = [bool(r.prompt_logprobs) for r in first]
    assert kinds == sorted(kinds, reverse=True)
    assert all(not (r.token_ids or r.text) for r in first if r.prompt_logprobs)
    assert not any(r.prompt_logprobs for r in answer.responses if r.choice)


@pytest.mark.parametrize("max_tokens", [1, 30])
@pytest.mark.parametrize("is_aggregated", [False, True])
async def test_they_come_before_the_first_token(
    serving: Any, until: Any, is_aggregated: bool, max_tokens: int
) -> None:
    async with serving(is_aggregated=is_aggregated) as s:
        answer = await s.generate(
            token_ids={"ids": PROMPT}, prompt_logprobs=1, stopping={"max_tokens": max_tokens}
        )
        check(answer)
        assert TEXT.startswith(answer.text)
        assert len(answer.token_ids) == min(max_tokens, len(s.decode.engine.script))
        assert answer.responses[0].prompt_logprobs
        await until(lambda: s.is_idle)


async def test_nobody_gets_them_unasked(serving: Any) -> None:
    async with serving() as s:
        answer = await s.generate(token_ids={"ids": PROMPT})
        assert not any(r.prompt_logprobs for r in answer.responses)
        assert s.prefill.engine.submitted[0].sampling.prompt_logprobs is None


async def test_a_prompt_of_one_token_has_none(serving: Any) -> None:
    async with serving() as s:
        answer = await s.generate(token_ids={"ids": [5]}, prompt_logprobs=2)
        assert answer.text == TEXT
        assert not any(r.prompt_logprobs for r in answer.responses)


async def test_only_choice_0_asks_for_them(serving: Any) -> None:
    async with serving() as s:
        check(await s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=0, n=3))
        asked = {r.sampling.choice: r.sampling.prompt_logprobs for r in s.prefill.engine.submitted}
        assert asked == {0: 0, 1: None, 2: None}


async def test_tokens_wait_for_those_that_are_late(serving: Any, until: Any) -> None:
    """Even when the whole output is there before them."""
    async with serving() as s:
        s.prefill.engine.stall_at = 0
        call = asyncio.create_task(s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=1))
        await until(lambda: bool(s.decode.engine.submitted) and not s.decode.engine.running)
        value = s.gateway.metrics.registry.get_sample_value
        num_output = len(s.decode.engine.script)
        await until(lambda: value("hocket_output_tokens_total") == num_output)
        s.prefill.engine.resume.set()
        answer = await call
        check(answer)
        assert answer.text == TEXT


async def test_a_decode_worker_that_computes_the_prompt_again_tells_them_again(
    serving: Any,
) -> None:
    async with serving() as s:
        s.prefill.engine.publish_prompt = lambda request: None
        s.decode.engine.joins_with = {"recomputed": True}
        check(await s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=1))


@pytest.mark.parametrize("lost_at", [1, 3])
async def test_once_complete_they_are_not_asked_for_again(
    serving: Any, until: Any, lost_at: int
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            loses_at(worker, lost_at)
        answer = await s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=1)
        check(answer)
        assert answer.text == TEXT
        asked = {r.key.attempt: r.sampling.prompt_logprobs for r in s.prefill.engine.submitted}
        assert asked == {0: 1, 1: None}
        await until(lambda: s.is_idle)


def tells_half(engine: Any, error: Exception) -> None:
    """Has a worker tell logprobs of half of the prompt, and all of its tokens, then fail; in a
    first attempt only."""
    publish = engine.publish_prompt

    def half(request: Any) -> None:
        if request.key.attempt:
            publish(request)
            return
        ids = request.token_ids
        entries = tuple(TokenLogprobs(t, -float(i), ((t, -float(i)),)) for i, t in enumerate(ids))
        engine.publish(PromptLogprobs(request.key, 1, entries[1 : len(ids) // 2]))
        script = engine.script_of(request)
        if request.stopping.max_tokens == 1:
            engine.publish(engine.tokens(request, 0, 1))
        elif request.leg is Leg.WHOLE:
            engine.publish(engine.tokens(request, 0, len(script) // 2))
        engine.sessions._fail(request.key, error)
        raise asyncio.CancelledError

    engine.publish_prompt = half


@pytest.mark.parametrize("max_tokens", [1, 30])
@pytest.mark.parametrize("is_aggregated", [False, True])
async def test_a_worker_that_is_lost_before_they_are_complete_is_replaced(
    serving: Any, until: Any, is_aggregated: bool, max_tokens: int
) -> None:
    """Even where the output itself is over already."""
    async with serving(is_aggregated=is_aggregated) as s:
        other = await s.add(Role.DECODE if is_aggregated else Role.PREFILL)
        for worker in (s.decode if is_aggregated else s.prefill, other):
            tells_half(worker.engine, WorkerUnavailable("killed"))
        answer = await s.generate(
            token_ids={"ids": PROMPT}, prompt_logprobs=1, stopping={"max_tokens": max_tokens}
        )
        check(answer)
        script = s.decode.engine.script
        assert answer.token_ids == script[: min(max_tokens, len(script))]
        # A worker takes no request for nothing.
        assert all(r.stopping.max_tokens > 0 for w in s.workers for r in w.engine.submitted)
        reading = [r for w in s.workers for r in w.engine.submitted if r.leg is not Leg.DECODE]
        assert sorted((r.key.attempt, r.sampling.prompt_logprobs) for r in reading) == [
            (0, 1), (1, 1),
        ]  # fmt: skip
        await until(lambda: s.is_idle)


async def test_prefill_that_dies_with_them_after_the_hand_off_is_replaced(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.PREFILL)
        s.decode.engine.stall_at = 5

        async def prefill(engine: Any, request: Any) -> None:
            if request.key.attempt:
                return await type(engine).prefill(engine, request)
            engine.publish_prompt = lambda request: None
            engine.stall_at = 0
            await type(engine).prefill(engine, request)

        for worker in (s.prefill, other):
            worker.engine.prefill = lambda r, engine=worker.engine: prefill(engine, r)
        call = asyncio.create_task(s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=1))
        value = s.gateway.metrics.registry.get_sample_value
        await until(lambda: value("hocket_output_tokens_total") == 5)
        (dying,) = (w for w in (s.prefill, other) if w.engine.running)
        ((key, task),) = dying.engine.running.items()
        dying.engine.sessions._fail(key, WorkerUnavailable("died"))
        task.cancel()
        s.decode.engine.resume.set()
        answer = await call
        check(answer)
        assert answer.text == TEXT
        await until(lambda: s.is_idle)


async def test_workers_that_never_tell_them_are_at_fault(serving: Any, until: Any) -> None:
    async with serving() as s:
        s.prefill.engine.publish_prompt = lambda request: None
        with pytest.raises(InternalError, match="not all logprobs of the prompt"):
            await s.generate(token_ids={"ids": PROMPT}, prompt_logprobs=1)
        await until(lambda: s.is_idle)


async def test_reading_all_of_a_prompt_breaks_no_promise(serving: Any) -> None:
    """Workers use no prefix hits for it, and the router must not wonder at that."""
    ids = list(range(30, 160))
    async with serving(prefill={"has_prefix_cache": True}) as s:
        s.prefill.engine.cached_tokens = 0
        await s.generate(token_ids={"ids": ids})
        check(await s.generate(token_ids={"ids": ids}, prompt_logprobs=0), ids)
        value = s.gateway.metrics.registry.get_sample_value
        assert value("hocket_prefix_promises_broken_total") == 0
        await s.generate(token_ids={"ids": ids})
        assert value("hocket_prefix_promises_broken_total") == 1
