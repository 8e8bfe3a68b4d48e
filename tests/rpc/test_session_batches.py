"""What shares a message on a Session: events of several steps, commands of several requests.

The stream is in memory here, so that a test says when a message has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import event_from_message
from hocket.rpc.convert_start import start_to_messages
from hocket.rpc.session import MAX_BATCH_EVENTS, SessionLimits, SessionServer
from hocket.rpc.session_client import BATCH_BYTES, SessionClient
from hocket.types import Leg, Load, RequestKey, StartRequest, Tokens

LONG_S = 3600.0


class Engine:
    def __init__(self) -> None:
        self.submitted: list[StartRequest] = []
        self.cancelled: list[RequestKey] = []

    def submit(self, request: StartRequest) -> None:
        self.submitted.append(request)

    def cancel(self, key: RequestKey) -> None:
        self.cancelled.append(key)


class Stream:
    """Both directions of one Session stream; a batch leaves when the test lets it."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[worker.SessionCommand] = asyncio.Queue()
        self.batches: list[worker.SessionEvents] = []
        self.may_leave = asyncio.Event()
        self.may_leave.set()

    async def write(self, batch: worker.SessionEvents) -> None:
        self.batches.append(batch)
        await self.may_leave.wait()

    async def incoming(self) -> AsyncIterator[worker.SessionCommand]:
        while True:
            yield await self.commands.get()

    @property
    def indices(self) -> list[list[int]]:
        """Output indices of each batch, pulses left out."""
        return [
            [e.output_index for m in b.events if isinstance(e := event_from_message(m), Tokens)]
            for b in self.batches
            if b.sequence
        ]


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[tuple[SessionServer, Engine, Stream]]:
    engine, stream = Engine(), Stream()
    sessions = SessionServer(engine, 1, SessionLimits(pulse_s=LONG_S, **limits))
    opening = worker.OpenSession(session_id="s")
    stream.commands.put_nowait(worker.SessionCommand(open=opening))
    context: Any = stream
    task = asyncio.create_task(sessions.serve(stream.incoming(), context))
    await turns()
    yield sessions, engine, stream
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    """Lets everything run that waits for nothing but its turn."""
    for _ in range(20):
        await asyncio.sleep(0)


def request(name: str, num_tokens: int = 4) -> StartRequest:
    return StartRequest(
        key=RequestKey(name),
        token_ids=tuple(range(num_tokens)),
        sampling=SamplingParams(),
        stopping=StoppingParams(8),
        leg=Leg.PREFILL,
        deadline_s=30.0,
    )


def start(name: str, sequence: int) -> worker.SessionCommand:
    return worker.SessionCommand(sequence=sequence, start=start_to_messages(request(name), 99)[0])


def tokens(name: str, index: int) -> Tokens:
    return Tokens(RequestKey(name), index, (index,))


async def test_steps_that_end_while_a_batch_is_on_its_way_share_the_next_one() -> None:
    async with serving() as (sessions, _, stream):
        stream.commands.put_nowait(start("a", 1))
        await turns()
        stream.may_leave.clear()
        for index in range(4):
            sessions.publish([tokens("a", index)], Load(steps=index))
            await turns()
        assert stream.indices == [[0]]
        stream.may_leave.set()
        await turns()
        assert stream.indices == [[0], [1, 2, 3]]
        assert [b.sequence for b in stream.batches] == [0, 1, 2]
        assert stream.batches[-1].load.steps == 3


async def test_a_request_that_is_alone_has_every_step_sent_at_once() -> None:
    async with serving(gap_s=LONG_S) as (sessions, _, stream):
        stream.commands.put_nowait(start("a", 1))
        await turns()
        for index in range(3):
            sessions.publish([tokens("a", index)], Load())
            await turns()
        assert stream.indices == [[0], [1], [2]]


async def test_in_a_crowd_steps_quicker_than_the_gap_share_a_batch() -> None:
    async with serving(gap_s=0.05, crowded_s=LONG_S) as (sessions, _, stream):
        for sequence, name in enumerate("ab", start=1):
            stream.commands.put_nowait(start(name, sequence))
        await turns()
        for index in range(3):
            sessions.publish([tokens("a", index), tokens("b", index)], Load())
            await turns()
        assert stream.indices == [[0, 0]]
        async with asyncio.timeout(5):
            while len(stream.indices) < 2:
                await asyncio.sleep(0.01)
        assert stream.indices == [[0, 0], [1, 1, 2, 2]]


async def test_a_batch_is_never_larger_than_a_message_may_be() -> None:
    async with serving() as (sessions, _, stream):
        stream.commands.put_nowait(start("a", 1))
        await turns()
        events = [tokens("a", index) for index in range(MAX_BATCH_EVENTS + 5)]
        sessions.publish(events, Load())
        await turns()
        assert [len(batch) for batch in stream.indices] == [MAX_BATCH_EVENTS, 5]
        assert [i for batch in stream.indices for i in batch] == list(range(len(events)))


async def test_commands_of_one_message_are_taken_in_order_and_once() -> None:
    async with serving() as (_, engine, stream):
        cancel = worker.Cancel(key=worker.RequestKey(request_id="a"))
        commands = [
            start("a", 1),
            start("b", 2),
            start("b", 2),
            worker.SessionCommand(sequence=3, cancel=cancel),
        ]
        batch = worker.SessionCommand(batch=worker.CommandBatch(commands=commands))
        stream.commands.put_nowait(batch)
        stream.commands.put_nowait(batch)
        await turns()
        assert [r.key.request_id for r in engine.submitted] == ["a", "b"]
        assert engine.cancelled == [RequestKey("a")]


async def test_commands_that_wait_share_a_message_and_a_large_one_ends_it() -> None:
    client = SessionClient("127.0.0.1:1", "gateway")
    for name in "abc":
        client.start(request(name), lambda event: None)
    client.start(request("long", BATCH_BYTES), lambda event: None)
    client.start(request("d"), lambda event: None)
    client.cancel(RequestKey("earlier"))
    messages = iter(client._next_commands, [])
    kinds = [
        [c.start.key.request_id or c.WhichOneof("command") for c in commands]
        for commands in messages
    ]
    assert kinds == [["cancel", "a", "b", "c", "long"], ["d"]]
    await client.close()
