"""Claims about a decode worker's server: real gRPC on loopback, a real engine, a tiny model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import pytest

from decode_workers.group_peers import GroupPeers
from decode_workers.server import ImportStreams
from hocket.execution.worker_server import WorkerParts, WorkerServer, bind
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc import worker_pb2_grpc
from hocket.rpc.clients import WorkerClient
from hocket.rpc.session_client import SessionClient
from hocket.types import (
    Event,
    ExportHandle,
    Failed,
    Finished,
    Joined,
    Leg,
    RequestKey,
    Role,
    StartRequest,
    Tokens,
    WorkerDescription,
)

NUM_BLOCKS = 8


@dataclass
class Running:
    """A served worker, a session to it, and what the session heard."""

    server: WorkerServer[Any, Any]
    client: WorkerClient
    session: SessionClient
    worker: Any
    events: list[Event] = field(default_factory=list)

    def start(self, name: str, export_at: str = "", **changes: Any) -> RequestKey:
        request = StartRequest(
            key=RequestKey(name),
            token_ids=tuple(range(20)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(8),
            leg=Leg.WHOLE,
            deadline_s=30.0,
        )
        if export_at:
            handle = ExportHandle("p", 1, export_at, 0, 1, self.worker.fingerprint, 2)
            request = replace(request, leg=Leg.DECODE, export=handle)
        self.session.start(replace(request, **changes), self.events.append)
        return request.key

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not is_true():
            assert time.monotonic() < deadline, self.events
            await asyncio.sleep(0.005)

    @property
    def free_blocks(self) -> int:
        return self.worker.runner.cache.pool.num_free


@asynccontextmanager
async def serving(tiny_worker: Any) -> AsyncIterator[Running]:
    server, address = bind("127.0.0.1", 0)
    description = WorkerDescription(
        worker_id="d",
        epoch=1,
        role=Role.DECODE,
        address=address,
        fingerprint=tiny_worker.fingerprint,
        model="tiny",
        num_blocks=NUM_BLOCKS,
        block_tokens=16,
        block_bytes=8,
        max_context_tokens=200,
        max_prompt_tokens=128,
        max_draft_tokens=3,
        has_mtp=True,
    )
    counters: dict[str, object] = {
        "hocket": tiny_worker.scheduler.counters,
        "hocket_decode_hand_off": tiny_worker.imports.counters,
    }
    parts = WorkerParts(tiny_worker.engine, description, counters, release=lambda: None)
    peers = GroupPeers(parts.description.epoch, asyncio.get_running_loop())
    running = WorkerServer(server, parts, partial(ImportStreams, peers), lambda error: None)
    await running.start()
    client, session = WorkerClient(address), SessionClient(address, "test")
    try:
        yield Running(running, client, session, tiny_worker)
    finally:
        await session.close()
        await client.close()
        await running.stop()


async def test_a_whole_request_streams_its_tokens_and_frees_its_blocks(
    make_worker: Callable[..., Any],
) -> None:
    async with serving(make_worker()) as running:
        running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        assert sum(len(tokens.token_ids) for tokens in running.of(Tokens)) == 8
        assert running.of(Finished)[0].usage.output_tokens == 8
        await running.until(lambda: running.free_blocks == NUM_BLOCKS)
        registry = running.server.metrics_registry
        assert registry.get_sample_value("hocket_verify_emitted_tokens_total") == 7


async def test_a_request_that_gives_way_is_counted_and_its_stream_has_no_gap(
    make_worker: Callable[..., Any],
) -> None:
    async with serving(make_worker(reserve_output_share=0.0)) as running:
        for name in ("a", "b"):
            running.start(name, stopping=StoppingParams(100))
        await running.until(lambda: len(running.of(Finished)) == 2)
        for name in ("a", "b"):
            told = [e for e in running.of(Tokens) if e.key.request_id == name]
            indices = [e.output_index + i for e in told for i in range(len(e.token_ids))]
            assert indices == list(range(100))
        registry = running.server.metrics_registry
        assert (registry.get_sample_value("hocket_preemptions_total") or 0) > 0


async def test_the_load_counts_what_was_done_and_leaves_idle_turns_out(
    make_worker: Callable[..., Any],
) -> None:
    async with serving(make_worker()) as running:
        running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        load = running.server.description().load
        assert (load.computed_prompt_tokens, load.emitted_tokens) == (20, 7)
        assert 2 <= load.decode_steps == load.decode_batch_sum <= 7
        assert 0 < load.decode_step_s < load.busy_s
        # Idle turns come by themselves.
        await running.until(lambda: running.server.description().load.steps >= load.steps + 2)
        later = running.server.description().load
        assert replace(later, steps=0, free_blocks=0) == replace(
            load, steps=0, free_blocks=0, running_requests=0
        )


async def test_a_prefill_worker_that_is_not_there_is_noticed_and_made_up_for(
    make_worker: Callable[..., Any],
) -> None:
    async with serving(make_worker()) as running:
        running.start("a", export_at="127.0.0.1:1")
        await running.until(lambda: bool(running.of(Finished)))
        assert [joined.recomputed for joined in running.of(Joined)] == [True]
        registry = running.server.metrics_registry
        assert registry.get_sample_value("hocket_worker_recomputed_prompts_total") == 1
        assert registry.get_sample_value("hocket_decode_hand_off_failed_total") == 1


async def test_a_prefill_worker_that_is_not_there_fails_the_request_by_policy(
    make_worker: Callable[..., Any],
) -> None:
    async with serving(make_worker(can_recompute=False)) as running:
        running.start("a", export_at="127.0.0.1:1")
        await running.until(lambda: bool(running.of(Failed)))
        assert running.of(Failed)[0].is_retryable
        assert running.free_blocks == NUM_BLOCKS


class BrokenPrefill(worker_pb2_grpc.WorkerServicer):
    """Ends every Export stream with a status that only gRPC itself would say."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code

    async def Export(self, request_iterator: Any, context: Any) -> None:
        await context.abort(self.code, "Internal error from Core")


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED]
)
async def test_a_stream_that_breaks_is_a_failed_hand_off_whatever_grpc_calls_it(
    make_worker: Callable[..., Any], code: grpc.StatusCode
) -> None:
    server, address = bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(BrokenPrefill(code), server)
    await server.start()
    async with serving(make_worker()) as running:
        running.start("a", export_at=address)
        await running.until(lambda: bool(running.of(Finished)))
        assert [joined.recomputed for joined in running.of(Joined)] == [True]
    await server.stop(0)


class SilentPrefill(worker_pb2_grpc.WorkerServicer):
    """Accepts Export streams, notes what comes, and never says a word."""

    def __init__(self) -> None:
        self.updates: list[str] = []
        self.num_open = 0

    async def Export(self, request_iterator: Any, context: Any) -> None:
        self.num_open += 1
        try:
            async for update in request_iterator:
                self.updates.append(update.WhichOneof("update"))
        finally:
            self.num_open -= 1


async def test_a_cancel_closes_the_export_stream_in_order(
    make_worker: Callable[..., Any],
) -> None:
    silent = SilentPrefill()
    server, address = bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(silent, server)
    await server.start()
    async with serving(make_worker()) as running:
        key = running.start("a", export_at=address)
        await running.until(lambda: silent.updates == ["open"])
        running.session.cancel(key)
        await running.until(lambda: silent.updates == ["open", "close"])
        await running.until(lambda: silent.num_open == 0)
        assert running.free_blocks == NUM_BLOCKS
    await server.stop(0)


async def test_a_decode_worker_exports_nothing(make_worker: Callable[..., Any]) -> None:
    async with serving(make_worker()) as running:
        call = running.client.export()
        await call.write(worker.ExportUpdate(progress=worker.Progress()))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_draining_lets_requests_finish(make_worker: Callable[..., Any]) -> None:
    async with serving(make_worker()) as running:
        running.start("a", stopping=StoppingParams(60))
        await running.until(lambda: bool(running.of(Joined)))
        assert await running.client.drain(10.0) == 0
        await running.until(lambda: bool(running.of(Finished)))


async def test_what_is_there_at_the_drain_deadline_fails_and_is_counted(
    make_worker: Callable[..., Any],
) -> None:
    silent = SilentPrefill()
    server, address = bind("127.0.0.1", 0)
    worker_pb2_grpc.add_WorkerServicer_to_server(silent, server)
    await server.start()
    async with serving(make_worker()) as running:
        running.start("a", export_at=address)
        await running.until(lambda: silent.updates == ["open"])
        assert await running.client.drain(0.2) == 1
        await running.until(lambda: bool(running.of(Failed)))
        assert running.of(Failed)[0].reason == "WORKER_UNAVAILABLE"
        assert running.free_blocks == NUM_BLOCKS
    await server.stop(0)


async def test_a_session_that_ends_cancels_its_requests(make_worker: Callable[..., Any]) -> None:
    async with serving(make_worker()) as running:
        running.start("a", stopping=StoppingParams(100))
        await running.until(lambda: bool(running.of(Joined)))
        await running.session.close()
        await running.until(lambda: running.free_blocks == NUM_BLOCKS)
