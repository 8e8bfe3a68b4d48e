"""A Session that breaks again and again, at any byte, both ways, under load: nothing is lost,
nothing comes twice, nothing changes its place."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from hocket.rpc import worker_pb2 as messages
from hocket.rpc.clients import server_options
from hocket.rpc.convert import event_to_message
from hocket.rpc.session import SessionLimits
from hocket.rpc.session_client import SessionClient, SessionSettings
from hocket.rpc.worker_pb2_grpc import (
    WorkerServicer,
    WorkerStub,
    add_WorkerServicer_to_server,
)
from hocket.types import (
    PROTOCOL_VERSION,
    Failed,
    Finished,
    FinishReason,
    Load,
    RequestKey,
    StartRequest,
    Tokens,
    Usage,
)
from tests.rpc.test_session import (
    Relay,
    Sink,
    Worker,
    connected,
    finished,
    request,
    running_worker,
    start_worker,
    tokens,
    until,
)

PATIENT = SessionSettings(reconnect_s=20.0, retry_s=0.01, piece_tokens=16, acknowledge_every=4)
LASTING = SessionLimits(grace_s=20.0, gap_s=0.0)


class CuttingRelay(Relay):
    """Every connection is cut after some bytes of either direction, in the middle of whatever it
    carries, until `is_calm`. Some are cut at the gateway's end only: what it had sent comes to the
    worker late, when the gateway is back on another connection."""

    def __init__(self, target_port: int, chance: random.Random, most_bytes: int) -> None:
        super().__init__(target_port)
        self.chance = chance
        self.most_bytes = most_bytes
        self.is_calm = False
        self.num_cuts = 0

    async def pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_upward: bool
    ) -> None:
        left = self.chance.randint(1, self.most_bytes)
        try:
            while data := await source.read(65536):
                if not self.is_calm and len(data) >= left:
                    if is_upward and self.chance.random() < 0.5:
                        await self.deliver_late(data, sink)
                        return
                    sink.write(data[:left])
                    await sink.drain()
                    # What is under way may arrive or not: both are right.
                    self.num_cuts += 1
                    self.cut()
                    return
                left -= len(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()

    async def deliver_late(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        self.num_cuts += 1
        self.near_ends[sink].transport.abort()
        await asyncio.sleep(self.chance.random() * 0.1)
        sink.write(data)
        await sink.drain()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def behind_a_cutting_relay(seed: int, most_bytes: int) -> AsyncIterator[Worker]:
    relay = CuttingRelay(0, random.Random(seed), most_bytes)
    await relay.start()
    worker = await start_worker(relay=relay, limits=LASTING)
    try:
        yield worker
    finally:
        await worker.stop()


async def answer(worker: Worker, started: StartRequest, chance: random.Random) -> None:
    """Publishes as an engine would: some tokens per step, other requests in between."""
    key, index = started.key, 0
    while index < started.stopping.max_tokens:
        number = min(chance.randint(1, 4), started.stopping.max_tokens - index)
        ids = tuple(range(index, index + number))
        worker.sessions.publish([Tokens(key, index, ids)], Load(steps=index))
        index += number
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.002)))
    worker.sessions.publish([Finished(key, FinishReason.LENGTH, Usage())], Load())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most_bytes", [1500, 12_000])
async def test_every_event_arrives_exactly_once_and_in_order_whatever_breaks(
    seed: int, most_bytes: int
) -> None:
    chance = random.Random(seed)
    async with behind_a_cutting_relay(seed, most_bytes) as worker:
        client = SessionClient(worker.address, "gateway", settings=PATIENT)
        sinks: dict[str, Sink] = {}
        sent: list[StartRequest] = []
        cancelled: list[RequestKey] = []
        answering: list[asyncio.Task[None]] = []
        submit = worker.engine.submit

        def answered_submit(started: StartRequest) -> None:
            submit(started)
            answering.append(asyncio.create_task(answer(worker, started, chance)))

        worker.engine.submit = answered_submit  # type: ignore[method-assign]
        assert isinstance(worker.relay, CuttingRelay)
        for number in itertools.count():
            if worker.relay.num_cuts >= 20 and number >= 80:
                break
            # Some prompts are cut into pieces.
            one = request(f"r{number}", chance.choice((3, 40, 100)))
            one = replace(one, stopping=replace(one.stopping, max_tokens=chance.randint(1, 40)))
            sent.append(one)
            sinks[one.key.request_id] = sink = Sink()
            client.start(one, sink)
            if chance.random() < 0.2:
                victim = chance.choice(sent).key
                cancelled.append(victim)
                client.cancel(victim)
                seen = sinks[victim.request_id]
                seen.events = [*seen.events, "cancelled"]  # type: ignore[list-item]
            await asyncio.sleep(chance.choice((0.0, 0.005)))
        worker.relay.is_calm = True
        await until(lambda: client.num_requests == 0, 30)
        for one in sent:
            events = sinks[one.key.request_id].events
            if one.key in cancelled:
                assert events.count("cancelled") >= 1  # type: ignore[arg-type]
                first = events.index("cancelled")  # type: ignore[arg-type]
                assert all(e == "cancelled" for e in events[first:]), "an event after the cancel"
                continue
            assert not any(isinstance(e, Failed) for e in events), events
            ids = [t for e in events if isinstance(e, Tokens) for t in e.token_ids]
            assert ids == list(range(one.stopping.max_tokens)), one.key
            assert [isinstance(e, Finished) for e in events] == [False] * (len(events) - 1) + [True]
        # The other direction: every request once and whole, every cancel once.
        started = worker.engine.submitted
        assert len({r.key for r in started}) == len(started)
        by_key = {r.key: r for r in started}
        for one in sent:
            if one.key not in cancelled:
                assert by_key[one.key].token_ids == one.token_ids
        await until(lambda: len(worker.engine.cancelled) == len(cancelled))
        assert sorted(map(str, worker.engine.cancelled)) == sorted(map(str, cancelled))
        assert worker.sessions.num_sessions == 1, "it was never given up"
        assert worker.servicer.opened_streams > 5, "hardly a stream was cut"
        await asyncio.gather(*answering)
        await client.close()


class FreezingRelay(Relay):
    """Nothing comes through while `is_frozen`, as with a stopped process or a cut cable."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.moves = asyncio.Event()
        self.moves.set()

    async def pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_upward: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                await self.moves.wait()
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()


@asynccontextmanager
async def behind_a_freezing_relay(
    limits: SessionLimits,
) -> AsyncIterator[tuple[Worker, FreezingRelay]]:
    relay = FreezingRelay(0)
    await relay.start()
    worker = await start_worker(relay=relay, limits=limits)
    try:
        yield worker, relay
    finally:
        relay.moves.set()
        await worker.stop()


PULSING = SessionLimits(grace_s=20.0, pulse_s=0.05)


async def test_a_worker_that_was_stopped_for_a_while_goes_on_where_it_stood() -> None:
    settings = replace(PATIENT, silence_s=0.3)
    async with (
        behind_a_freezing_relay(PULSING) as (worker, relay),
        connected(worker, settings) as client,
    ):
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        worker.sessions.publish([tokens("r", 0)], Load())
        await until(lambda: len(sink.events) == 1)
        relay.moves.clear()
        worker.sessions.publish([tokens("r", 1)], Load())
        await until(lambda: not client.is_connected)
        client.start(request("meanwhile"), Sink())
        worker.sessions.publish([tokens("r", 2)], Load())
        relay.moves.set()
        await until(lambda: len(sink.events) == 3)
        worker.sessions.publish([finished("r")], Load())
        await until(lambda: client.num_requests == 1)
        assert sink.token_ids == [100, 101, 102]
        await until(lambda: len(worker.engine.submitted) == 2)
        assert worker.engine.cancelled == []


async def test_a_worker_that_stays_stopped_fails_its_requests_in_bounded_time() -> None:
    settings = replace(PATIENT, silence_s=0.3, reconnect_s=0.3)
    async with (
        behind_a_freezing_relay(PULSING) as (worker, relay),
        connected(worker, settings) as client,
    ):
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        relay.moves.clear()
        await until(lambda: sink.failure is not None)
        assert sink.failure is not None
        assert sink.failure.is_retryable
        # When it moves again nobody waits for its events any more, and it learns of it at once.
        relay.moves.set()
        await until(lambda: client.is_connected)
        await until(lambda: worker.engine.cancelled == [RequestKey("r")])
        assert worker.sessions.num_sessions == 1
        worker.sessions.publish([tokens("r", 0)], Load())
        client.start(request("next"), later := Sink())
        await until(lambda: len(worker.engine.submitted) == 2)
        worker.sessions.publish([tokens("next", 0)], Load())
        await until(lambda: bool(later.events))
        assert len(sink.events) == 1


async def test_a_gateway_that_comes_back_after_the_grace_time_begins_anew() -> None:
    """Its requests were cancelled at the worker; here they fail, so that others can take them."""
    limits = SessionLimits(grace_s=0.1, pulse_s=0.05)
    settings = replace(PATIENT, silence_s=0.2)
    async with (
        behind_a_freezing_relay(limits) as (worker, relay),
        connected(worker, settings) as client,
    ):
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        worker.sessions.publish([tokens("r", 0)], Load())
        await until(lambda: len(sink.events) == 1)
        relay.moves.clear()
        relay.cut()
        await until(lambda: worker.engine.cancelled == [RequestKey("r")])
        relay.moves.set()
        await until(lambda: sink.failure is not None)
        await until(lambda: client.is_connected)
        client.start(request("next"), Sink())
        await until(lambda: len(worker.engine.submitted) == 2)
        assert worker.sessions.num_requests == 1


@pytest.mark.parametrize("is_doubted", [False, True])
async def test_a_worker_whose_port_is_closed_is_not_waited_for(is_doubted: bool) -> None:
    """Refused for half a second means that its process has ended; at once, when the directory says
    so too. Nobody waits for `reconnect_s`."""
    settings = replace(PATIENT, reconnect_s=60.0, refused_s=60.0 if is_doubted else 0.2)
    async with running_worker() as worker, connected(worker, settings) as client:
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        await worker.stop()
        if is_doubted:
            client.doubt()
        await until(lambda: sink.failure is not None)
        assert sink.failure is not None
        assert "nobody listens there any more" in sink.failure.message
        client.start(request("later"), later := Sink())
        assert later.failure is not None


async def test_a_doubted_worker_may_finish_what_it_has() -> None:
    async with running_worker() as worker, connected(worker) as client:
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        client.doubt()
        worker.relay.cut()
        await until(lambda: not client.is_connected)
        await until(lambda: client.is_connected)
        worker.sessions.publish([finished("r")], Load())
        await until(lambda: len(sink.events) == 1)
        assert isinstance(sink.events[0], Finished)


async def test_an_opening_that_was_long_on_its_way_harms_no_later_session() -> None:
    """The gateway gave it up before the worker saw it, and has requests on another by now."""
    async with running_worker() as worker, connected(worker) as client:
        client.start(request(), sink := Sink())
        await until(lambda: bool(worker.engine.submitted))
        async with grpc.aio.insecure_channel(worker.address) as channel:
            call = WorkerStub(channel).Session()  # type: ignore[arg-type]
            opening = messages.OpenSession(
                session_id="late", gateway_id="gateway", protocol_version=PROTOCOL_VERSION
            )
            await call.write(messages.SessionCommand(open=opening))
            await call.read()
            assert worker.sessions.num_sessions == 2
        await until(lambda: worker.sessions.num_sessions == 1)
        worker.relay.cut()
        worker.sessions.publish([finished("r")], Load())
        await until(lambda: len(sink.events) == 1)
        assert isinstance(sink.events[0], Finished)
        assert worker.engine.cancelled == []


async def test_a_gateway_of_another_protocol_is_refused_with_both_versions() -> None:
    async with running_worker() as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            call = WorkerStub(channel).Session()  # type: ignore[arg-type]
            opening = messages.OpenSession(
                session_id="s", gateway_id="g", protocol_version=PROTOCOL_VERSION + 2
            )
            await call.write(messages.SessionCommand(open=opening))
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"speaks protocol {PROTOCOL_VERSION + 2}" in await call.details()
        assert worker.sessions.num_sessions == 0


class RepeatingServicer(WorkerServicer):
    """Sends each batch of events twice."""

    async def Session(self, request_iterator: Any, context: Any) -> None:
        commands = aiter(request_iterator)
        await anext(commands)
        await context.write(messages.SessionEvents(worker_epoch=1))
        start = await anext(commands)
        for number, event in enumerate((tokens("r", 0), tokens("r", 1), finished("r")), 1):
            batch = messages.SessionEvents(
                sequence=number,
                worker_epoch=1,
                received_commands=start.sequence,
                events=[event_to_message(event)],
            )
            await context.write(batch)
            await context.write(batch)
        await asyncio.Event().wait()


async def test_a_batch_that_comes_twice_is_taken_once() -> None:
    server = grpc.aio.server(options=server_options())
    add_WorkerServicer_to_server(RepeatingServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = SessionClient(f"127.0.0.1:{port}", "gateway", settings=PATIENT)
    client.start(request(), sink := Sink())
    await until(lambda: client.num_requests == 0)
    assert sink.events == [tokens("r", 0), tokens("r", 1), finished("r")]
    await client.close()
    await server.stop(None)
