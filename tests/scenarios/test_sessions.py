"""A5 between gateway and worker: what comes twice counts once, whoever sent it twice."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from tokenizers import Tokenizer

from control_plane.detokenizer import OutputText
from control_plane.output import Output
from hocket.config import ModelSettings
from hocket.request_params import StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import event_to_message
from hocket.rpc.convert_start import start_to_messages
from hocket.rpc.session_client import SessionClient
from hocket.rpc.worker_pb2_grpc import WorkerServicer, WorkerStub, add_WorkerServicer_to_server
from hocket.types import Finished, RequestKey, Tokens
from tests.rpc.test_session import QUICK, Sink, finished, request, running_worker, tokens, until


class _TellsTwice(WorkerServicer):
    """A worker whose first batch of events comes a second time."""

    async def Session(self, request_iterator: Any, context: Any) -> None:
        commands = aiter(request_iterator)
        await anext(commands)
        await context.write(worker.SessionEvents(worker_epoch=1))
        await anext(commands)
        for sequence, event in ((1, tokens("r", 0)), (1, tokens("r", 0)), (2, finished("r"))):
            events = [event_to_message(event)]
            batch = worker.SessionEvents(worker_epoch=1, sequence=sequence, events=events)
            await context.write(batch)
        async for _ in commands:
            pass


async def _hear_twice() -> Sink:
    server = grpc.aio.server()
    add_WorkerServicer_to_server(_TellsTwice(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = SessionClient(f"127.0.0.1:{port}", "gateway", settings=QUICK)
    try:
        await until(lambda: client.is_connected)
        client.start(request(), sink := Sink())
        await until(lambda: any(isinstance(event, Finished) for event in sink.events))
    finally:
        await client.close()
        await server.stop(None)
    return sink


def test_a5_events_that_a_worker_tells_twice_are_taken_once() -> None:
    assert asyncio.run(_hear_twice()).token_ids == [100]


async def _command_twice(starts: list[int]) -> tuple[list[str], list[str]]:
    """The requests that the engine was given and those that it was told to drop, when a start is
    sent under each of these numbers and others follow."""
    async with running_worker() as process:
        channel = grpc.aio.insecure_channel(process.address)
        stub: Any = WorkerStub(channel)
        call = stub.Session()
        await call.write(worker.SessionCommand(open=worker.OpenSession(session_id="s")))
        (start, *_), (last, *_) = (start_to_messages(request(name), 100) for name in ("r", "last"))
        for number in starts:
            await call.write(worker.SessionCommand(sequence=number, start=start))
        await call.write(worker.SessionCommand(sequence=starts[-1] + 1, start=last))
        await until(lambda: any(r.key.request_id == "last" for r in process.engine.submitted))
        await channel.close()
        submitted = [r.key.request_id for r in process.engine.submitted]
        return submitted, [key.request_id for key in process.engine.cancelled]


def test_a5_commands_that_a_gateway_repeats_are_taken_once() -> None:
    assert asyncio.run(_command_twice([1, 1, 1])) == (["r", "last"], [])


def test_a6_an_attempt_that_is_started_twice_never_runs_twice() -> None:
    submitted, cancelled = asyncio.run(_command_twice([1, 2]))
    assert submitted == ["r", "last"]
    assert cancelled == ["r"]


def test_a5_tokens_that_both_legs_tell_are_taken_once() -> None:
    tokenizer = Tokenizer.from_file(str(ModelSettings().checkpoint() / "tokenizer.json"))
    output = Output(OutputText(tokenizer, ()), StoppingParams(max_tokens=9))
    key = RequestKey("r")
    for index, told in ((0, (10,)), (0, (10, 11)), (1, (11, 12))):
        output.add(Tokens(key, index, told))
    assert output.token_ids == (10, 11, 12)
