"""A worker loses a request whose output has begun: others go on with it (D12, C1).

The client sees no token twice and none missing, usage is counted once, and the limit of tokens is
what is left of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from control_plane.attempts import MAX_ATTEMPTS
from control_plane.router.snapshot import Books
from hocket.errors import GroupLost, HocketError, InternalError, WorkerUnavailable
from hocket.rpc import generation_pb2 as generation
from hocket.types import Leg, Role
from tests.control_plane.conftest import FINGERPRINT, ScriptedWorker

FAST = {"fingerprint": replace(FINGERPRINT, numerics="2-fast")}
TEXT = " the quick brown fox jumps over the lazy dog"


def loses_at(
    worker: ScriptedWorker, index: int, error: HocketError | None = None, *, always: bool = False
) -> None:
    """Has decode give up a request before it tells the token of this index: if that is the first
    who has it, or `always`."""
    engine = worker.engine

    async def stall(request: Any, at: int) -> None:
        is_lost = request.leg is not Leg.PREFILL and at >= index
        if is_lost and (always or request.key.attempt == 0):
            engine.sessions._fail(request.key, error or WorkerUnavailable("killed"))
            raise asyncio.CancelledError

    engine.stall = stall  # type: ignore[method-assign]


def migrations(s: Any) -> float:
    return s.gateway.metrics.registry.get_sample_value("hocket_migrations_total")


async def test_d12_a_killed_decode_worker_is_invisible_to_its_client(
    serving: Any, until: Any, tokenizer: Any
) -> None:
    script = [*tokenizer.encode(TEXT, add_special_tokens=False).ids, 1]
    async with serving() as s:
        s.decode.engine.stall_at = 3
        request = generation.GenerateRequest(
            text="x", top_logprobs=1, sampling={"seed": 5}, stopping={"max_tokens": 30}
        )
        responses = s.client.generate(request)
        seen = [await anext(responses)]
        while sum(len(r.token_ids) for r in seen) < 3:
            seen.append(await anext(responses))
        other = await s.add(Role.DECODE)
        await s.decode.stop()
        seen += [response async for response in responses]
        assert [t for r in seen for t in r.token_ids] == script
        assert "".join(r.text for r in seen) == TEXT
        assert [p.logprob for r in seen for p in r.logprobs] == [
            -float(i) for i in range(len(script))
        ]
        (prompt,) = [r.token_ids for r in s.prefill.engine.submitted if r.key.attempt == 0]
        (again,) = other.engine.submitted
        assert again.token_ids == prompt + tuple(script[:3])
        assert (again.generated_tokens, again.stopping.max_tokens) == (3, 27)
        assert (again.key.attempt, again.sampling.seed) == (1, 5)
        finish = seen[-1].finish
        assert finish.reason == generation.FINISH_REASON_STOP
        assert finish.usage.prompt_tokens == len(prompt)
        assert finish.usage.output_tokens == len(script)
        assert finish.hand_off.decode_worker == other.description.worker_id
        assert migrations(s) == 1
        # The dead worker cannot be asked.
        await until(lambda: all(w.books == Books() for w in s.gateway.snapshots()))


@pytest.mark.parametrize("step_tokens", [1, 3])
async def test_wherever_an_output_is_cut_it_goes_on_there(
    serving: Any, until: Any, step_tokens: int
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            worker.engine.step_tokens = step_tokens
        whole = await s.generate(text="x")
        last_step = range(1, len(whole.token_ids), step_tokens)[-1]
        for index in range(1, last_step + 1):
            before = migrations(s)
            for worker in (s.decode, other):
                loses_at(worker, index)
            answer = await s.generate(text="x")
            assert answer.token_ids == whole.token_ids, index
            assert answer.text == TEXT
            usage = answer.finish.usage
            assert usage.prompt_tokens == whole.finish.usage.prompt_tokens
            assert usage.output_tokens == len(whole.token_ids)
            assert migrations(s) == before + 1
        await until(lambda: s.is_idle)


async def test_a_long_output_outlives_more_workers_than_a_request_may_try_in_a_row(
    serving: Any, until: Any
) -> None:
    """Both workers lose it again and again, but never without a new token."""
    async with serving() as s:
        other = await s.add(Role.DECODE)
        lost = 0

        def flaky(worker: ScriptedWorker) -> None:
            async def stall(request: Any, at: int) -> None:
                nonlocal lost
                if at >= request.generated_tokens + 2 and at < 20:
                    lost += 1
                    worker.engine.sessions._fail(request.key, GroupLost("a rank died"))
                    raise asyncio.CancelledError

            worker.engine.stall = stall  # type: ignore[method-assign]

        flaky(s.decode)
        flaky(other)
        answer = await s.generate(text="x", stopping={"max_tokens": 30, "ignore_eos": True})
        assert len(answer.token_ids) == 30
        script = s.decode.engine.script
        assert answer.token_ids == [script[i % len(script)] for i in range(30)]
        assert lost == migrations(s) > MAX_ATTEMPTS
        await until(lambda: s.is_idle)


async def test_one_that_gets_nowhere_ends_after_a_few_attempts(serving: Any, until: Any) -> None:
    async with serving() as s:
        workers = [s.decode, *[await s.add(Role.DECODE) for _ in range(MAX_ATTEMPTS + 1)]]
        for worker in workers:
            # Each attempt gets its first token from prefill, and no other.
            loses_at(worker, 1, always=True)
        with pytest.raises(WorkerUnavailable, match="killed"):
            await s.generate(text="x")
        assert sum(len(w.engine.submitted) for w in workers) == MAX_ATTEMPTS
        await until(lambda: s.is_idle)


async def test_what_is_left_may_be_a_single_token_which_needs_no_decode(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            loses_at(worker, 3)
        answer = await s.generate(text="x", stopping={"max_tokens": 4})
        assert answer.token_ids == s.decode.engine.script[:4]
        assert answer.finish.reason == generation.FINISH_REASON_LENGTH
        last = s.prefill.engine.submitted[-1]
        assert (last.generated_tokens, last.stopping.max_tokens) == (3, 1)
        assert len(s.decode.engine.submitted) + len(other.engine.submitted) == 1
        await until(lambda: s.is_idle)


async def test_a_stop_string_over_the_seam_is_found(serving: Any, until: Any) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        whole = await s.generate(text="x")
        for index in range(1, len(whole.token_ids)):
            for worker in (s.decode, other):
                loses_at(worker, index)
            answer = await s.generate(text="x", stopping={"stop": ["fox jumps"]})
            assert answer.text == " the quick brown "
            assert answer.finish.matched_stop == "fox jumps"
            assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        await until(lambda: s.is_idle)


def chooses_otherwise(workers: list[ScriptedWorker], script: list[int]) -> None:
    """Has these workers follow another script from a request's second attempt on."""
    for worker in workers:
        engine = worker.engine
        engine.script_of = lambda r, own=engine.script: script if r.key.attempt else own  # type: ignore[method-assign]


async def test_without_the_promise_of_equal_bits_it_goes_on_from_what_was_told(
    serving: Any, until: Any, tokenizer: Any
) -> None:
    other_script = [*tokenizer.encode(" hello" * 9, add_special_tokens=False).ids, 1]
    async with serving(prefill=FAST, decode=FAST) as s:
        other = await s.add(Role.DECODE, **FAST)
        chooses_otherwise([s.prefill, s.decode, other], other_script)
        for worker in (s.decode, other):
            loses_at(worker, 3)
        answer = await s.generate(text="x")
        assert answer.token_ids == s.decode.engine.script[:3] + other_script[3:]
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert migrations(s) == 1
        await until(lambda: s.is_idle)


@pytest.mark.parametrize("numerics", ["2-fast", "1-invariant"])
async def test_decode_that_begins_anew_in_another_way_is_at_fault_only_if_bits_must_be_equal(
    serving: Any, until: Any, numerics: str
) -> None:
    """The hand-off broke after the client had prefill's token, and decode computed the prompt."""
    changes = {"fingerprint": replace(FINGERPRINT, numerics=numerics)}
    async with serving(prefill=changes, decode=changes) as s:
        other = await s.add(Role.DECODE, **changes)
        script = s.prefill.engine.script
        for worker in (s.decode, other):
            worker.engine.joins_with = {"recomputed": True, "recompute_reason": "cut"}
            engine = worker.engine
            engine.script_of = lambda r: script if r.key.attempt else [99, *script]  # type: ignore[method-assign]
        if numerics == "1-invariant":
            with pytest.raises(InternalError, match="differ about output token 0"):
                await s.generate(text="x")
        else:
            assert (await s.generate(text="x")).token_ids == script
        await until(lambda: s.is_idle)


async def test_what_is_left_of_the_least_tokens_goes_with_the_output(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            loses_at(worker, 3)
        await s.generate(text="x", stopping={"min_tokens": 5, "max_tokens": 9})
        starts = {r.key.attempt: r.stopping for r in s.prefill.engine.submitted}
        assert [(t.min_tokens, t.max_tokens) for _, t in sorted(starts.items())] == [(5, 9), (2, 6)]


async def test_it_goes_on_only_with_workers_of_the_same_fingerprint(
    serving: Any, until: Any
) -> None:
    newer = {"fingerprint": replace(FINGERPRINT, weights="newer")}
    async with serving() as s:
        loses_at(s.decode, 3)
        call = asyncio.create_task(s.generate(text="x"))
        await asyncio.gather(call, return_exceptions=True)
        assert isinstance(call.exception(), WorkerUnavailable), "nobody else is there"
        await s.add(Role.PREFILL, **newer)
        others = [await s.add(Role.DECODE, **newer)]
        loses_at(s.decode, 3, always=True)
        loses_at(others[0], 3, always=True)
        for _ in range(4):
            with pytest.raises(WorkerUnavailable, match="killed"):
                await s.generate(text="x")
        assert migrations(s) == 0
        await until(lambda: s.is_idle)


async def test_an_error_that_would_come_again_is_the_clients(serving: Any, until: Any) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            loses_at(worker, 3, InternalError("NaN"))
        with pytest.raises(InternalError, match="NaN"):
            await s.generate(text="x")
        assert migrations(s) == 0


async def test_in_aggregated_serving_it_goes_on_too(serving: Any, until: Any) -> None:
    async with serving(is_aggregated=True) as s:
        other = await s.add(Role.DECODE)
        for worker in (s.decode, other):
            worker.engine.joins_with = {"imported_bytes": 0, "cached_tokens": 1}
            loses_at(worker, 3)
        answer = await s.generate(text="hello there")
        assert answer.text == TEXT
        assert migrations(s) == 1
        # The second reads the prompt again, and its cache is not the answer's business.
        assert answer.finish.usage.cached_tokens == 1
        await until(lambda: s.is_idle)


async def test_what_was_cached_is_told_by_who_computed_the_rest(serving: Any) -> None:
    async with serving() as s:
        s.prefill.engine.cached_tokens = 3
        s.decode.engine.joins_with = {"cached_tokens": 5}
        split = await s.generate(text="hello there")
        assert split.finish.usage.cached_tokens == 3
        s.decode.engine.joins_with = {"cached_tokens": 1, "recomputed": True}
        again = await s.generate(text="hello there")
        assert again.finish.usage.cached_tokens == 1


async def test_after_a_migration_usage_is_of_the_attempt_that_read_the_prompt(
    serving: Any,
) -> None:
    async with serving() as s:
        s.prefill.engine.cached_tokens = 3
        other = await s.add(Role.DECODE)

        async def stall(worker: ScriptedWorker, request: Any, at: int) -> None:
            if at == 3 and request.key.attempt == 0:
                s.prefill.engine.cached_tokens = 9
                worker.engine.sessions._fail(request.key, WorkerUnavailable("killed"))
                raise asyncio.CancelledError

        for worker in (s.decode, other):
            worker.engine.stall = lambda r, at, w=worker: stall(w, r, at)
        answer = await s.generate(text="hello there")
        assert migrations(s) == 1
        assert answer.finish.usage.cached_tokens == 3
