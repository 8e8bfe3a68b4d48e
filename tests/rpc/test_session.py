"""Sessions over real gRPC on loopback: an engine in memory behind a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from hocket.errors import Overloaded
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.clients import server_options
from hocket.rpc.session import SessionLimits, SessionServer
from hocket.rpc.session_client import SessionClient, SessionSettings
from hocket.rpc.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from hocket.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Leg,
    Load,
    RequestKey,
    StartRequest,
    Tokens,
    Usage,
)

QUICK = SessionSettings(reconnect_s=0.5, retry_s=0.05, piece_tokens=16, acknowledge_every=4)


class RecordingEngine:
    """Keeps what it is told; the test publishes in its place."""

    def __init__(self, refuses: bool = False) -> None:
        self.submitted: list[StartRequest] = []
        self.cancelled: list[RequestKey] = []
        self.refuses = refuses

    def submit(self, request: StartRequest) -> None:
        if self.refuses:
            raise Overloaded("the queue is full", limit=4)
        self.submitted.append(request)

    def cancel(self, key: RequestKey) -> None:
        self.cancelled.append(key)


class SessionServicer(WorkerServicer):
    """Serves Session and nothing else."""

    def __init__(self, sessions: SessionServer) -> None:
        self.sessions = sessions
        self.num_streams = 0
        self.opened_streams = 0

    async def Session(self, request_iterator: Any, context: Any) -> None:
        self.num_streams += 1
        self.opened_streams += 1
        try:
            await self.sessions.serve(request_iterator, context)
        finally:
            self.num_streams -= 1


class Relay:
    """A TCP relay in front of a worker, whose connections can be cut."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.port = 0
        # What the gateway sends is lost on the way.
        self.swallows = False
        self.swallowed_bytes = 0
        self.writers: list[asyncio.StreamWriter] = []
        # The gateway's end of what is written to the worker.
        self.near_ends: dict[asyncio.StreamWriter, asyncio.StreamWriter] = {}
        self.pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self.server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        self.writers += [writer, far_writer]
        self.near_ends[far_writer] = writer
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            pump = asyncio.create_task(self.pump(source, sink, is_upward=source is reader))
            self.pumps.add(pump)
            pump.add_done_callback(self.pumps.discard)

    async def pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, is_upward: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                if is_upward and self.swallows:
                    self.swallowed_bytes += len(data)
                    continue
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def stop(self) -> None:
        self.cut()
        self.server.close()
        await asyncio.gather(*self.pumps, return_exceptions=True)


@dataclass
class Worker:
    engine: RecordingEngine
    sessions: SessionServer
    servicer: SessionServicer
    server: grpc.aio.Server
    port: int
    relay: Relay

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.relay.port}"

    async def stop(self) -> None:
        await self.server.stop(None)
        await self.relay.stop()


async def start_worker(
    *,
    epoch: int = 1,
    relay: Relay | None = None,
    refuses: bool = False,
    limits: SessionLimits | None = None,
) -> Worker:
    engine = RecordingEngine(refuses)
    sessions = SessionServer(engine, epoch, limits)
    servicer = SessionServicer(sessions)
    server = grpc.aio.server(options=server_options())
    add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if relay is None:
        relay = Relay(port)
        await relay.start()
    relay.target_port = port
    return Worker(engine, sessions, servicer, server, port, relay)


@asynccontextmanager
async def running_worker(**options: Any) -> AsyncIterator[Worker]:
    started = await start_worker(**options)
    try:
        yield started
    finally:
        await started.stop()


@asynccontextmanager
async def connected(
    worker: Worker, settings: SessionSettings = QUICK
) -> AsyncIterator[SessionClient]:
    client = SessionClient(worker.address, "gateway", settings=settings)
    try:
        await until(lambda: client.is_connected)
        yield client
    finally:
        await client.close()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@dataclass
class Sink:
    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def token_ids(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Tokens) for t in e.token_ids]

    @property
    def failure(self) -> Failed | None:
        return next((e for e in self.events if isinstance(e, Failed)), None)


def request(name: str = "r", num_tokens: int = 5) -> StartRequest:
    return StartRequest(
        key=RequestKey(name),
        token_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(seed=7),
        stopping=StoppingParams(max_tokens=8),
        leg=Leg.PREFILL,
        deadline_s=30.0,
    )


def tokens(name: str, index: int) -> Tokens:
    return Tokens(RequestKey(name), index, (100 + index,))


def finished(name: str) -> Finished:
    return Finished(RequestKey(name), FinishReason.LENGTH, Usage())


async def test_a_request_reaches_the_engine_and_its_events_come_back_in_order() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        assert worker.engine.submitted == [request()]
        for index in range(20):
            worker.sessions.publish([tokens("r", index)], Load(steps=index))
        worker.sessions.publish([finished("r")], Load(steps=20))
        await until(lambda: isinstance(sink.events[-1:], list) and len(sink.events) == 21)
        assert sink.token_ids == [100 + i for i in range(20)]
        assert isinstance(sink.events[-1], Finished)
        assert client.load == Load(steps=20)
        assert client.num_requests == worker.sessions.num_requests == 0


async def test_the_last_events_of_a_worker_arrive_when_it_stops_once_they_have_left() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        for index in range(200):
            worker.sessions.publish([tokens("r", index)], Load())
        worker.sessions.publish([finished("r")], Load())
        assert worker.sessions.has_unsent
        await until(lambda: not worker.sessions.has_unsent)
        worker.sessions.close()
        await worker.server.stop(0.2)
        await until(lambda: len(sink.events) == 201)
        assert isinstance(sink.events[-1], Finished)


async def test_a_large_prompt_is_cut_into_pieces_and_put_together_again() -> None:
    async with running_worker() as worker, connected(worker) as client:
        client.start(request("long", 100), Sink())
        client.start(request("short", 3), Sink())
        await until(lambda: len(worker.engine.submitted) == 2)
        assert worker.engine.submitted == [request("long", 100), request("short", 3)]


async def test_a_cancel_overtakes_a_prompt_that_is_not_sent_yet() -> None:
    async with running_worker() as worker, connected(worker) as client:
        client.start(request("first", 3), Sink())
        await until(lambda: len(worker.engine.submitted) == 1)
        client.start(request("long", 10_000), Sink())
        client.start(request("dropped", 10_000), Sink())
        client.cancel(RequestKey("first"))
        client.cancel(RequestKey("dropped"))
        await until(lambda: len(worker.engine.cancelled) == 2)
        assert worker.engine.submitted == [request("first", 3)]
        await until(lambda: len(worker.engine.submitted) == 2)
        assert worker.engine.submitted[1] == request("long", 10_000)
        assert worker.sessions.num_requests == 1


async def test_events_after_a_cancel_reach_nobody() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        client.cancel(RequestKey("r"))
        await until(lambda: worker.engine.cancelled == [RequestKey("r")])
        worker.sessions.publish([tokens("r", 0)], Load(steps=1))
        client.start(request("other"), other := Sink())
        await until(lambda: len(worker.engine.submitted) == 2)
        worker.sessions.publish([tokens("other", 0)], Load(steps=2))
        await until(lambda: bool(other.events))
        assert sink.events == []


async def test_a_refused_request_gets_the_engines_error() -> None:
    async with running_worker(refuses=True) as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: sink.failure is not None)
        assert sink.failure is not None
        assert sink.failure.reason == "OVERLOADED"
        assert sink.failure.is_retryable
        assert dict(sink.failure.metadata) == {"limit": "4"}
        assert worker.sessions.num_requests == 0


async def test_a_broken_stream_is_resumed_without_a_gap_or_a_repeat() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        for index in range(40):
            worker.sessions.publish([tokens("r", index)], Load())
            if index in (3, 25):
                worker.relay.cut()
                await until(lambda: not client.is_connected)
            if index == 20:
                await until(lambda: client.is_connected)
        client.start(request("later"), Sink())
        worker.sessions.publish([finished("r")], Load())
        await until(lambda: any(isinstance(e, Finished) for e in sink.events))
        assert sink.token_ids == [100 + i for i in range(40)]
        await until(lambda: len(worker.engine.submitted) == 2)
        assert worker.engine.cancelled == []
        assert worker.sessions.num_sessions == 1
        assert worker.servicer.opened_streams == 3


async def test_commands_that_were_lost_with_the_stream_are_sent_again_once() -> None:
    async with running_worker() as worker, connected(worker) as client:
        client.start(request("before"), Sink())
        await until(lambda: len(worker.engine.submitted) == 1)
        worker.relay.swallows = True
        client.start(request("lost", 100), sink := Sink())
        client.cancel(RequestKey("before"))
        await until(lambda: worker.relay.swallowed_bytes > 400)
        worker.relay.swallows = False
        worker.relay.cut()
        await until(lambda: len(worker.engine.submitted) == 2 and bool(worker.engine.cancelled))
        assert worker.engine.submitted[1] == request("lost", 100)
        assert worker.engine.cancelled == [RequestKey("before")]
        worker.sessions.publish([finished("lost")], Load())
        await until(lambda: len(sink.events) == 1)
        assert isinstance(sink.events[0], Finished)


async def test_a_session_that_does_not_come_back_has_its_requests_cancelled() -> None:
    async with running_worker(limits=SessionLimits(grace_s=0.05)) as worker:
        client = SessionClient(worker.address, "gateway", settings=SessionSettings(retry_s=60))
        client.start(request(), Sink())
        await until(lambda: bool(worker.engine.submitted))
        worker.relay.cut()
        await until(lambda: worker.engine.cancelled == [RequestKey("r")])
        assert worker.sessions.num_sessions == worker.sessions.num_requests == 0
        await client.close()


async def test_an_expired_session_is_not_resumed_and_its_requests_fail_at_once() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        worker.sessions.publish([tokens("r", 0)], Load())
        await until(lambda: bool(sink.events))
        worker.sessions.close()
        await until(lambda: sink.failure is not None)
        assert worker.engine.cancelled == [RequestKey("r")]
        await until(lambda: client.is_connected)
        client.start(request("next"), Sink())
        await until(lambda: len(worker.engine.submitted) == 2)


async def test_a_gateway_that_falls_too_far_behind_is_expired() -> None:
    limits = SessionLimits(grace_s=60, max_kept_events=10)
    async with running_worker(limits=limits) as worker:
        client = SessionClient(worker.address, "gateway", settings=SessionSettings(retry_s=60))
        client.start(request(), Sink())
        await until(lambda: bool(worker.engine.submitted))
        worker.relay.cut()
        await until(lambda: worker.servicer.num_streams == 0)
        for index in range(11):
            worker.sessions.publish([tokens("r", index)], Load())
        assert worker.engine.cancelled == [RequestKey("r")]
        assert worker.sessions.num_sessions == 0
        await client.close()


async def test_requests_on_a_worker_that_dies_fail_in_bounded_time_and_later_ones_at_once() -> None:
    async with running_worker() as worker, connected(worker) as client:
        sink = Sink()
        client.start(request(), sink)
        await until(lambda: bool(worker.engine.submitted))
        loop = asyncio.get_running_loop()
        stopped_s = loop.time()
        await worker.stop()
        await until(lambda: sink.failure is not None)
        assert loop.time() - stopped_s < 2 * QUICK.reconnect_s + 1
        assert sink.failure is not None
        assert (sink.failure.code, sink.failure.reason) == (14, "WORKER_UNAVAILABLE")
        assert worker.address in sink.failure.message
        client.start(request("later"), later := Sink())
        assert later.failure is not None
        assert not client.is_connected


async def test_a_restarted_worker_fails_the_old_requests_and_serves_new_ones() -> None:
    first = await start_worker(epoch=1)
    client = SessionClient(first.address, "gateway", settings=SessionSettings(retry_s=0.05))
    sink = Sink()
    client.start(request(), sink)
    await until(lambda: bool(first.engine.submitted))
    await first.server.stop(None)
    second = await start_worker(epoch=2, relay=first.relay)
    await until(lambda: sink.failure is not None)
    await until(lambda: client.is_connected)
    client.start(request("new"), Sink())
    await until(lambda: second.engine.submitted == [request("new")])
    await client.close()
    await second.stop()


async def test_a_silent_stream_counts_as_broken() -> None:
    """A worker that holds the connection open but never even pulses."""
    limits = SessionLimits(pulse_s=60)
    settings = SessionSettings(silence_s=0.1, retry_s=0.01)
    async with running_worker(limits=limits) as worker, connected(worker, settings):
        await until(lambda: worker.servicer.opened_streams > 1)


async def test_an_idle_worker_tells_its_load_by_pulse() -> None:
    async with (
        running_worker(limits=SessionLimits(pulse_s=0.02)) as worker,
        connected(worker) as client,
    ):
        worker.sessions.publish([], Load(free_blocks=9, num_blocks=9))
        await until(lambda: client.load.free_blocks == 9)


async def test_repeated_commands_are_ignored() -> None:
    async with running_worker() as worker_process:
        channel = grpc.aio.insecure_channel(worker_process.address)
        from hocket.rpc.convert_start import start_to_messages
        from hocket.rpc.worker_pb2_grpc import WorkerStub

        stub: Any = WorkerStub(channel)
        call = stub.Session()
        start, _ = start_to_messages(request(), 100)
        await call.write(worker.SessionCommand(open=worker.OpenSession(session_id="s")))
        for _ in range(3):
            await call.write(worker.SessionCommand(sequence=1, start=start))
        cancel = worker.Cancel(key=worker.RequestKey(request_id="r"))
        await call.write(worker.SessionCommand(sequence=2, cancel=cancel))
        await until(lambda: bool(worker_process.engine.cancelled))
        assert worker_process.engine.submitted == [request()]
        await channel.close()


@pytest.mark.parametrize("command", ["cancel", "start"])
async def test_a_stream_that_does_not_begin_with_open_is_refused(command: str) -> None:
    async with running_worker() as worker_process:
        channel = grpc.aio.insecure_channel(worker_process.address)
        from hocket.rpc.worker_pb2_grpc import WorkerStub

        stub: Any = WorkerStub(channel)
        call = stub.Session()
        await call.write(worker.SessionCommand(sequence=1, **{command: {}}))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()
