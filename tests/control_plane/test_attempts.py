"""A worker refuses or loses a request early: others begin again, the client sees nothing of it.

What happens to an output that has begun is in `test_migration`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from control_plane.attempts import MAX_ATTEMPTS, LegFailed, suspects
from control_plane.model_limits import ModelLimits
from control_plane.request_flow import RequestFlow
from control_plane.router.pool import WorkerPool
from control_plane.router.snapshot import Books, Placement
from control_plane.tokenizer import ModelTokenizer
from hocket.errors import (
    DeadlineExceeded,
    GroupLost,
    HandOffFailed,
    HocketError,
    InternalError,
    Overloaded,
    WorkerUnavailable,
)
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.session_client import EventSink
from hocket.rpc.status import failed_from_error
from hocket.telemetry import GatewayMetrics
from hocket.types import (
    Begun,
    ExportHandle,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Leg,
    Load,
    RequestKey,
    Role,
    StartRequest,
    Tokens,
    Usage,
    WorkerDescription,
)

TEXT = " the quick brown fox jumps over the lazy dog"
# Ties between workers are broken by turns: among so many requests each worker is chosen.
TURNS = 4
FINGERPRINT = Fingerprint("w", "kv", 64, "float32", "1-invariant")


def describe(name: str, role: Role) -> WorkerDescription:
    return WorkerDescription(
        worker_id=name,
        epoch=1,
        role=role,
        address=f"host:{name}",
        fingerprint=FINGERPRINT,
        model="m",
        num_blocks=16,
        block_tokens=64,
        block_bytes=1,
        max_context_tokens=256,
        max_prompt_tokens=200,
        max_draft_tokens=3,
        has_mtp=True,
    )


class Directory:
    """Workers that never change."""

    def __init__(self, *workers: WorkerDescription) -> None:
        self.listed = list(workers)

    def workers(self) -> list[WorkerDescription]:
        return self.listed

    def watch(self, changed: Callable[[], None]) -> None: ...


def replacements(s: Any, reason: str) -> float:
    value = s.gateway.metrics.registry.get_sample_value
    return value("hocket_replacements_total", {"reason": reason}) or 0.0


def failed_attempts(worker: Any) -> list[Any]:
    return [r.key for r in worker.engine.submitted]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("error", [Overloaded("full"), WorkerUnavailable("drains")], ids=str)
async def test_what_one_worker_refuses_another_of_its_role_serves(
    serving: Any, until: Any, role: Role, error: HocketError
) -> None:
    async with serving() as s:
        refusing = s.prefill if role is Role.PREFILL else s.decode
        other = await s.add(role)
        refusing.engine.fails_with = error
        answers = [await s.generate(text="x", sampling={"seed": 5}) for _ in range(TURNS)]
        assert [a.text for a in answers] == [TEXT] * TURNS
        refused = failed_attempts(refusing)
        assert refused
        assert replacements(s, error.reason) == len(refused)
        served = {key.request_id: key.attempt for key in failed_attempts(other)}
        assert [key.attempt for key in refused] == [0] * len(refused)
        assert [served[key.request_id] for key in refused] == [1] * len(refused)
        assert {r.sampling.seed for w in s.workers for r in w.engine.submitted} == {5}
        await until(lambda: s.is_idle)


async def test_decode_that_refuses_after_the_first_token_was_seen_repeats_nothing(
    serving: Any, until: Any, tokenizer: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        gate = asyncio.Event()

        async def refuse(request: Any) -> None:
            await gate.wait()
            s.decode.engine.sessions._fail(request.key, Overloaded("full by now"))

        s.decode.engine.decode = refuse
        for _ in range(TURNS):
            gate.clear()
            responses = s.client.generate(generation.GenerateRequest(text="x", top_logprobs=1))
            seen = [await anext(responses)]
            assert len(seen[0].token_ids) == 1 or not s.decode.engine.submitted
            gate.set()
            seen += [response async for response in responses]
            token_ids = [t for r in seen for t in r.token_ids]
            assert token_ids == [*tokenizer.encode(TEXT, add_special_tokens=False).ids, 1]
            assert [p.logprob for r in seen for p in r.logprobs] == [
                -float(i) for i in range(len(token_ids))
            ]
        assert replacements(s, "OVERLOADED") == len(s.decode.engine.submitted) > 0
        assert len(other.engine.submitted) == TURNS
        await until(lambda: s.is_idle)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_what_a_dying_worker_has_not_begun_to_answer_is_served_by_another(
    serving: Any, until: Any, role: Role
) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = s.decode.engine.stall_at = 0
        call = asyncio.create_task(s.generate(text="x"))
        await until(lambda: bool(s.decode.engine.running))
        dying = s.prefill if role is Role.PREFILL else s.decode
        await s.add(role)
        await dying.stop()
        await until(lambda: replacements(s, "WORKER_UNAVAILABLE") == 1)
        for worker in s.workers:
            worker.engine.resume.set()
        assert (await call).text == TEXT


async def test_what_would_fail_everywhere_is_tried_once(serving: Any) -> None:
    async with serving() as s:
        other = await s.add(Role.PREFILL)
        for worker in (s.prefill, other):
            worker.engine.fails_with = InternalError("NaN")
        with pytest.raises(InternalError, match="NaN"):
            await s.generate(text="x")
        assert len(failed_attempts(s.prefill) + failed_attempts(other)) == 1


async def test_when_all_refuse_the_last_ones_error_comes_after_a_few_attempts(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        workers = [s.decode, *[await s.add(Role.DECODE) for _ in range(MAX_ATTEMPTS)]]
        for number, worker in enumerate(workers):
            worker.engine.fails_with = Overloaded(f"full {number}")
        with pytest.raises(Overloaded, match="full") as caught:
            await s.generate(text="x")
        tried = [worker for worker in workers if worker.engine.submitted]
        assert len(tried) == MAX_ATTEMPTS
        attempts = {w.engine.submitted[0].key.attempt: str(w.engine.fails_with) for w in tried}
        assert sorted(attempts) == list(range(MAX_ATTEMPTS))
        assert str(caught.value) == attempts[MAX_ATTEMPTS - 1]
        assert all(len(w.engine.submitted) <= 1 for w in workers)
        await until(lambda: s.is_idle)


async def test_a_refusal_that_nobody_else_can_make_good_is_told_at_once(serving: Any) -> None:
    async with serving() as s:
        busy = await s.add(Role.DECODE, is_draining=True)
        s.decode.engine.fails_with = Overloaded("decode is full")
        with pytest.raises(Overloaded, match="decode is full"):
            await s.generate(text="x")
        assert busy.engine.submitted == []


async def test_an_export_that_ran_out_while_decode_was_full_is_decodes_to_make_good(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        await s.add(Role.PREFILL)
        for worker in s.workers:
            worker.engine.stall_at = 0
        call = asyncio.create_task(s.generate(text="x"))
        await until(lambda: bool(s.decode.engine.running))
        (key,) = (r.key for r in s.decode.engine.submitted)
        for worker in s.workers:
            if worker.description.role is Role.PREFILL and worker.engine.submitted:
                worker.engine.sessions._fail(key, HandOffFailed("Nobody opened the export"))
        await asyncio.sleep(0.05)
        for worker in s.workers:
            worker.engine.resume.set()
        assert (await call).text == TEXT
        assert replacements(s, "HAND_OFF_FAILED") == 0
        await until(lambda: s.is_idle)


@pytest.mark.parametrize("faulty", [Role.PREFILL, Role.DECODE])
async def test_a_failed_hand_off_finds_the_side_that_works(serving: Any, faulty: Role) -> None:
    """Decode tells it, whoever's fault it is; only one role has another worker."""
    async with serving() as s:
        other = await s.add(faulty)

        def submit(engine: Any, request: Any) -> None:
            at_fault = request.export.worker_id if faulty is Role.PREFILL else engine.worker
            if at_fault in (s.prefill.description.worker_id, s.decode.description):
                raise HandOffFailed("the READ failed")
            type(engine).submit(engine, request)

        for worker in s.workers:
            if worker.description.role is Role.DECODE:
                worker.engine.submit = lambda r, engine=worker.engine: submit(engine, r)
        answers = [await s.generate(text="x") for _ in range(TURNS)]
        assert [a.text for a in answers] == [TEXT] * TURNS
        assert replacements(s, "HAND_OFF_FAILED") > 0
        assert len(other.engine.submitted) >= TURNS


async def test_the_deadline_counts_from_arrival_over_all_attempts(serving: Any, until: Any) -> None:
    async with serving(deadline_s=0.3) as s:
        other = await s.add(Role.DECODE)
        other.engine.stall_at = 0
        s.prefill.engine.stall_at = 0

        async def refuse(request: Any) -> None:
            await asyncio.sleep(0.15)
            s.decode.engine.sessions._fail(request.key, Overloaded("full"))

        s.decode.engine.decode = refuse
        calls = [asyncio.create_task(s.generate(text="x")) for _ in range(TURNS)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, DeadlineExceeded)
        again = [r for r in other.engine.submitted if r.key.attempt == 1]
        assert again
        assert all(0 < r.deadline_s <= 0.16 for r in again)
        await until(lambda: s.is_idle)


async def test_a_client_that_leaves_during_a_second_attempt_cancels_it(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        other = await s.add(Role.DECODE)
        other.engine.stall_at = 0
        s.prefill.engine.stall_at = 0
        s.decode.engine.fails_with = Overloaded("full")
        calls = [asyncio.create_task(s.generate(text="x")) for _ in range(TURNS)]
        await until(lambda: len(other.engine.running) == TURNS)
        for call in calls:
            call.cancel()
        await until(lambda: s.is_idle)
        assert len(other.engine.cancelled) == TURNS


class HandedSession:
    """A Session in memory: the test says what a worker tells, whenever it likes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_connected = True
        self.load = Load()
        self.num_requests = 0
        self.sinks: dict[RequestKey, EventSink] = {}
        self.cancelled: list[RequestKey] = []

    def start(self, request: StartRequest, sink: EventSink) -> None:
        self.sinks[request.key] = sink

    def cancel(self, key: RequestKey) -> None:
        self.cancelled.append(key)

    def doubt(self) -> None: ...

    async def close(self) -> None: ...


async def test_late_events_of_an_earlier_attempt_reach_nobody(
    tokenizer_folder: Path, until: Any
) -> None:
    opened: dict[str, HandedSession] = {}

    def connect(address: str) -> HandedSession:
        return opened.setdefault(address, HandedSession(address))

    names = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
    directory = Directory(*(describe(name, role) for name, role in names.items()))
    pool = WorkerPool(directory, connect)
    metrics = GatewayMetrics(CollectorRegistry())
    flow = RequestFlow(pool, ModelTokenizer(tokenizer_folder), metrics, lambda: 7)
    sent: list[generation.GenerateResponse] = []

    async def send(response: generation.GenerateResponse) -> None:
        sent.append(response)

    request = generation.GenerateRequest(
        token_ids={"ids": [5]}, stopping={"max_tokens": 3, "ignore_eos": True}
    )
    limits = ModelLimits("m", 512, 200, 200, 3)
    serving = asyncio.create_task(flow.serve(request, limits, 30.0, send))
    prefill = opened["host:p"]
    decodes = [opened["host:d0"], opened["host:d1"]]

    async def begin(attempt: int) -> tuple[RequestKey, HandedSession]:
        await until(lambda: len(prefill.sinks) == attempt + 1)
        key = list(prefill.sinks)[attempt]
        handle = ExportHandle("p", 1, "host:p", 0, 1, FINGERPRINT, 1)
        prefill.sinks[key](Begun(key, handle))
        await until(lambda: any(key in d.sinks for d in decodes))
        return key, next(d for d in decodes if key in d.sinks)

    first, refusing = await begin(0)
    # Before the first token of all: nobody has asked for what follows it.
    refusing.sinks[first](Tokens(first, 1, (8,)))
    refusing.sinks[first](failed_from_error(first, Overloaded("full")))
    second, other = await begin(1)
    assert (first.request_id, first.attempt, second.attempt) == (second.request_id, 0, 1)
    assert other is not refusing
    assert prefill.cancelled == [first]
    # What was on its way when the first attempt ended.
    prefill.sinks[first](Tokens(first, 0, (8,)))
    refusing.sinks[first](Tokens(first, 0, (8, 8, 8)))
    refusing.sinks[first](Finished(first, FinishReason.STOP, Usage()))
    prefill.sinks[second](Tokens(second, 0, (9,)))
    other.sinks[second](Joined(second, 1, "memory"))
    other.sinks[second](Tokens(second, 0, (9, 10, 11)))
    other.sinks[second](Finished(second, FinishReason.LENGTH, Usage()))
    await serving
    assert [t for response in sent for t in response.token_ids] == [9, 10, 11]
    assert all(s.books == Books() for s in pool.snapshots())
    await pool.close()


async def test_a_decode_worker_that_is_cut_off_does_not_hold_back_the_first_token(
    serving: Any, until: Any
) -> None:
    """It comes from prefill, and while decode's Session is tried again nobody waits for it."""
    async with serving() as s:
        s.prefill.engine.stall_at = s.decode.engine.stall_at = 0
        responses = s.client.generate(generation.GenerateRequest(text="x"))
        first = asyncio.create_task(anext(responses))
        await until(lambda: bool(s.decode.engine.running))
        await s.decode.stop()
        decode = s.gateway._pool.session(s.decode.description.worker_id)
        await until(lambda: not decode.is_connected)
        s.prefill.engine.resume.set()
        assert len((await first).token_ids) == 1
        assert decode.num_requests == 1, "decode was given up before the first token came"
        with pytest.raises(WorkerUnavailable):
            await anext(responses)


def test_who_is_avoided_after_which_failure() -> None:
    placement = _placement(group="decode-0")

    def names(leg: Leg, error: HocketError) -> list[set[str]]:
        return [set(choice) for choice in suspects(placement, LegFailed(leg, error))]

    # A full queue is one rank's; a death or a drain is the group's.
    assert names(Leg.DECODE, Overloaded("full")) == [{"decode-0.1"}]
    assert names(Leg.DECODE, WorkerUnavailable("drains")) == [{"decode-0"}]
    assert names(Leg.DECODE, GroupLost("a rank died")) == [{"decode-0"}]
    assert names(Leg.PREFILL, WorkerUnavailable("drains")) == [{"prefill-0"}]
    both = [{"prefill-0", "decode-0.1"}, {"prefill-0"}, {"decode-0.1"}]
    assert names(Leg.DECODE, HandOffFailed("cut")) == both


def _placement(group: str) -> Placement:
    decode = replace(describe("decode-0.1", Role.DECODE), group=group, rank=1, group_size=2)
    return Placement(describe("prefill-0", Role.PREFILL), decode)
