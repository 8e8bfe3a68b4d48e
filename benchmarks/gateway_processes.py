"""The processes that `gateway.py` measures: stub workers, gateway, bare gRPC server, client.

Each runs alone in a process of its own, tells its port through a pipe and lives until the pipe is
closed. The stub workers answer a Session as real ones do (`hocket.rpc.session.SessionServer`) but
have no model: a step gives every running request one token. The bare server is the least that
`grpc.aio` can do for the same client: the same messages, made beforehand, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from control_plane.gateway import Gateway, GatewayOptions
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import PUBLIC_MESSAGE_BYTES, open_channel, server_options
from hocket.rpc.generation_pb2_grpc import (
    GenerationServicer,
    GenerationStub,
    add_GenerationServicer_to_server,
)
from hocket.rpc.session import SessionServer
from hocket.rpc.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from hocket.types import (
    Begun,
    Event,
    ExportHandle,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Load,
    RequestKey,
    Role,
    StartRequest,
    Tokens,
    Usage,
    WorkerDescription,
)

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = REPOSITORY / "hocket" / "checkpoints" / "hocket-tiny"
MODEL = "hocket-tiny"
FINGERPRINT = Fingerprint("stub", "stub", 64, "float32", "1-invariant")
# Ordinary words of the vocabulary; none of them ends an output.
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 1000

Stop = Callable[[], Awaitable[object]]


async def serve_until_closed(pipe: Connection, port: int, stop: Stop) -> None:
    """Sends the port; ends when the other end of the pipe is closed."""
    pipe.send(port)
    with suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    await stop()


# -- stub workers


class StubEngine:
    """Steps while it has requests, `step_s` apart: each step publishes in one batch."""

    def __init__(self, worker: WorkerDescription, step_s: float) -> None:
        self.worker = worker
        self.sessions = SessionServer(self, worker.epoch)
        self._step_s = step_s
        self._index: dict[RequestKey, int] = {}
        self._requests: dict[RequestKey, StartRequest] = {}
        self._has_work = asyncio.Event()
        self._num_steps = 0

    def submit(self, request: StartRequest) -> None:
        self._requests[request.key] = request
        self._index[request.key] = 0
        self._has_work.set()

    def cancel(self, key: RequestKey) -> None:
        self._requests.pop(key, None)
        self._index.pop(key, None)

    async def run(self) -> None:
        while True:
            if not self._requests:
                self._has_work.clear()
                await self._has_work.wait()
            await asyncio.sleep(self._step_s)
            self._step()

    def _step(self) -> None:
        self._num_steps += 1
        events: list[Event] = []
        advance = self._prefill if self.worker.role is Role.PREFILL else self._decode
        for request in list(self._requests.values()):
            advance(request, self._index[request.key], events)
        load = Load(
            running_requests=len(self._requests), free_blocks=self.worker.num_blocks,
            num_blocks=self.worker.num_blocks, steps=self._num_steps,
        )  # fmt: skip
        self.sessions.publish(events, load)

    def _prefill(self, request: StartRequest, index: int, events: list[Event]) -> None:
        """Begun in the first step, the first token and the end in the second."""
        key, worker = request.key, self.worker
        if index == 0:
            handle = ExportHandle(
                worker.worker_id, worker.epoch, worker.address, 0, 1, FINGERPRINT, 1
            )
            events.append(Begun(key, handle))
            self._index[key] = 1
            return
        events.append(Tokens(key, 0, (token_at(0),)))
        usage = Usage(prompt_tokens=len(request.token_ids))
        is_whole = request.stopping.max_tokens == 1
        events.append(Finished(key, FinishReason.LENGTH if is_whole else None, usage))
        self.cancel(key)

    def _decode(self, request: StartRequest, index: int, events: list[Event]) -> None:
        key = request.key
        if index == 0:
            events.append(Joined(key, 4096, "memory"))
        events.append(Tokens(key, index, (token_at(index),)))
        self._index[key] = index + 1
        if index + 1 == request.stopping.max_tokens:
            events.append(Finished(key, FinishReason.LENGTH, Usage()))
            self.cancel(key)


def token_at(index: int) -> int:
    """The output's token of this index."""
    return FIRST_TOKEN_ID + index * 37 % NUM_TOKEN_IDS


class _StubServicer(WorkerServicer):
    def __init__(self, sessions: SessionServer) -> None:
        self._sessions = sessions

    async def Session(self, request_iterator: Any, context: Any) -> None:  # noqa: N802
        await self._sessions.serve(request_iterator, context)


def stub_worker(pipe: Connection, role: Role, step_s: float) -> None:
    """Body of a stub worker's process."""

    async def serve() -> None:
        server = grpc.aio.server(options=server_options())
        port = server.add_insecure_port("127.0.0.1:0")
        engine = StubEngine(stub_description(role, port), step_s)
        add_WorkerServicer_to_server(_StubServicer(engine.sessions), server)
        await server.start()
        steps = asyncio.create_task(engine.run())
        await serve_until_closed(pipe, port, lambda: server.stop(None))
        steps.cancel()

    asyncio.run(serve())


def stub_description(role: Role, port: int) -> WorkerDescription:
    """The stub worker that listens on this port of the loopback."""
    return WorkerDescription(
        worker_id=f"{role.value}-0",
        epoch=1,
        role=role,
        address=f"127.0.0.1:{port}",
        fingerprint=FINGERPRINT,
        model=MODEL,
        num_blocks=4096,
        block_tokens=64,
        block_bytes=4096,
        max_context_tokens=4096,
        max_prompt_tokens=2048,
        max_draft_tokens=0,
        has_mtp=False,
    )


# -- the gateway and the bare server


class ListedWorkers:
    """A directory that never changes."""

    def __init__(self, workers: list[WorkerDescription]) -> None:
        self._workers = workers

    def workers(self) -> list[WorkerDescription]:
        return self._workers

    def watch(self, changed: Callable[[], None]) -> None:
        """Nothing will ever change."""


def gateway(pipe: Connection, workers: list[WorkerDescription]) -> None:
    """Body of the gateway's process."""

    async def serve() -> None:
        options = GatewayOptions("127.0.0.1", 0, model=MODEL, tokenizer_folder=TINY)
        served = Gateway(options, ListedWorkers(workers))
        port = await served.start()
        await served.wait_until_serving(10)
        await serve_until_closed(pipe, port, served.stop)

    asyncio.run(serve())


class _BareServicer(GenerationServicer):
    def __init__(self, num_messages: int) -> None:
        self._messages = [
            generation.GenerateResponse(
                request_id="0" * 32, output_index=index, token_ids=[token_at(index)], text=" word"
            )
            for index in range(num_messages)
        ]
        finish = self._messages[-1].finish
        finish.reason = generation.FINISH_REASON_LENGTH
        finish.usage.prompt_tokens, finish.usage.output_tokens = 64, num_messages
        finish.timing.first_token_s, finish.timing.total_s = 0.1, 0.2
        finish.seed = 1 << 60

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        for message in self._messages:
            await context.write(message)


def bare_server(pipe: Connection, num_messages: int) -> None:
    """Body of the bare server's process."""

    async def serve() -> None:
        server = grpc.aio.server(options=server_options(PUBLIC_MESSAGE_BYTES))
        add_GenerationServicer_to_server(_BareServicer(num_messages), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await serve_until_closed(pipe, port, lambda: server.stop(None))

    asyncio.run(serve())


# -- the client


@dataclass(frozen=True)
class Job:
    """Load from one client: `concurrency` requests at a time, each followed by the next.

    Counted are the requests that end in the `seconds` after `warm_up_s`.
    """

    port: int
    concurrency: int
    num_tokens: int
    is_text: bool
    warm_up_s: float
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What the client saw. Times in seconds, one entry per counted request; `num_messages` of
    those; `num_all`: requests in all, those before and after the counted ones too."""

    latencies_s: list[float]
    first_message_s: list[float]
    num_messages: int
    num_all: int


def client(pipe: Connection) -> None:
    """Body of the client's process: a Job in, a Measured out, until the pipe is closed."""
    asyncio.run(_answer_jobs(pipe))


async def _answer_jobs(pipe: Connection) -> None:
    pipe.send(0)
    while True:
        try:
            job: Job = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        pipe.send(await _Load(job).run())


class _Load:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._latencies_s: list[float] = []
        self._first_message_s: list[float] = []
        prompt: dict[str, Any] = {"text": "the words of a prompt, again and again; " * 6}
        if not job.is_text:
            prompt = {"token_ids": {"ids": [FIRST_TOKEN_ID + i for i in range(64)]}}
        self._request = generation.GenerateRequest(
            **prompt, stopping={"max_tokens": job.num_tokens, "ignore_eos": True}
        )
        self._num_messages = self._num_all = 0

    async def run(self) -> Measured:
        job = self._job
        channel = open_channel(f"127.0.0.1:{job.port}", message_bytes=PUBLIC_MESSAGE_BYTES)
        stub: Any = GenerationStub(channel)
        await channel.channel_ready()
        self._begin_s = time.perf_counter() + job.warm_up_s
        self._end_s = self._begin_s + job.seconds
        await asyncio.gather(*(self._repeat(stub) for _ in range(job.concurrency)))
        await channel.close()
        return Measured(self._latencies_s, self._first_message_s, self._num_messages, self._num_all)

    async def _repeat(self, stub: Any) -> None:
        while (started_s := time.perf_counter()) < self._end_s:
            first_s, num_messages, num_tokens = 0.0, 0, 0
            async for response in stub.Generate(self._request):
                first_s = first_s or time.perf_counter()
                num_messages += 1
                num_tokens += len(response.token_ids)
            ended_s = time.perf_counter()
            assert num_tokens == self._job.num_tokens, num_tokens
            self._num_all += 1
            if self._begin_s <= ended_s <= self._end_s:
                self._latencies_s.append(ended_s - started_s)
                self._first_message_s.append(first_s - started_s)
                self._num_messages += num_messages
