"""Claims about a prefill worker's server: real gRPC on loopback, a real engine, a tiny model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hocket.errors import HocketError
from hocket.execution.worker_server import WorkerParts, WorkerServer, bind
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.clients import WorkerClient
from hocket.rpc.convert import fingerprint_to_message, handle_to_message, key_to_message
from hocket.rpc.session_client import SessionClient
from hocket.types import (
    Begun,
    Event,
    ExportHandle,
    Failed,
    Finished,
    Leg,
    RequestKey,
    Role,
    StartRequest,
    Tokens,
    WorkerDescription,
)
from prefill_workers.server import ExportStreams

NUM_BLOCKS = 16


@dataclass
class Running:
    """A served worker, a session to it, and what the session heard."""

    server: WorkerServer[Any, Any]
    client: WorkerClient
    session: SessionClient
    worker: Any
    crashes: list[Exception]
    events: list[Event] = field(default_factory=list)

    def start(self, name: str, prompt_tokens: int = 20, max_tokens: int = 8) -> RequestKey:
        request = StartRequest(
            key=RequestKey(name),
            token_ids=tuple(i % 50 for i in range(prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens),
            leg=Leg.PREFILL,
            deadline_s=30.0,
        )
        self.session.start(request, self.events.append)
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

    def opening(self, key: RequestKey, handle: ExportHandle) -> worker.ExportUpdate:
        return worker.ExportUpdate(
            open=worker.OpenExport(
                key=key_to_message(key),
                export=handle_to_message(handle),
                worker_id="d",
                worker_epoch=1,
                fingerprint=fingerprint_to_message(self.worker.fingerprint),
            )
        )


@asynccontextmanager
async def serving(tiny_worker: Any) -> AsyncIterator[Running]:
    server, address = bind("127.0.0.1", 0)
    description = WorkerDescription(
        worker_id="p",
        epoch=1,
        role=Role.PREFILL,
        address=address,
        fingerprint=tiny_worker.fingerprint,
        model="tiny",
        num_blocks=NUM_BLOCKS,
        block_tokens=16,
        block_bytes=8,
        max_context_tokens=300,
        max_prompt_tokens=256,
        max_draft_tokens=0,
        has_mtp=True,
    )
    crashes: list[Exception] = []
    counters: dict[str, object] = {"hocket_prefill_hand_off": tiny_worker.exports.counters}
    parts = WorkerParts(tiny_worker.engine, description, counters, release=lambda: None)
    running = WorkerServer(server, parts, ExportStreams, crashes.append)
    await running.start()
    client, session = WorkerClient(address), SessionClient(address, "test")
    try:
        yield Running(running, client, session, tiny_worker, crashes)
    finally:
        await session.close()
        await client.close()
        await running.stop()


async def read_all(call: Any) -> list[worker.ExportEvent]:
    return [event async for event in call]


async def test_a_prompt_is_read_to_its_end_over_the_export_stream(tiny_worker: Any) -> None:
    async with serving(tiny_worker) as running:
        key = running.start("a", 60)
        await running.until(lambda: bool(running.of(Finished)))
        call = running.client.export()
        await call.write(running.opening(key, running.of(Begun)[0].export))
        kinds: list[str] = []
        while not kinds or kinds[-1] != "bundle":
            kinds.append((await call.read()).WhichOneof("event"))
        assert kinds == ["opened", "chunk", "bundle"]
        close = worker.CloseExport(reason=worker.CloseExport.REASON_DONE)
        await call.write(worker.ExportUpdate(close=close))
        assert await call.read() is grpc.aio.EOF
        assert running.free_blocks == NUM_BLOCKS
        assert [event.reason for event in running.of(Finished)] == [None]
        assert len(running.of(Tokens)) == 1


async def test_an_unknown_export_is_refused_loudly_and_frees_nothing(tiny_worker: Any) -> None:
    async with serving(tiny_worker) as running:
        running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        held = running.free_blocks
        call = running.client.export()
        handle = running.of(Begun)[0].export
        await call.write(running.opening(RequestKey("never"), handle))
        (event,) = await read_all(call)
        assert event.aborted.reason == "HAND_OFF_FAILED"
        assert "never begun" in event.aborted.message
        assert running.free_blocks == held < NUM_BLOCKS


@pytest.mark.parametrize("leave", ["cancel", "half-close"])
async def test_a_reader_that_leaves_frees_its_export_at_once(tiny_worker: Any, leave: str) -> None:
    async with serving(tiny_worker) as running:
        key = running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        call = running.client.export()
        await call.write(running.opening(key, running.of(Begun)[0].export))
        assert (await call.read()).HasField("opened")
        if leave == "cancel":
            call.cancel()
        else:
            await call.done_writing()
        await running.until(lambda: running.free_blocks == NUM_BLOCKS)
        assert tiny_worker.exports.counters.peers_gone == 1


async def test_a_cancel_over_the_session_frees_the_export(tiny_worker: Any) -> None:
    async with serving(tiny_worker) as running:
        key = running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        running.session.cancel(key)
        await running.until(lambda: running.free_blocks == NUM_BLOCKS)


async def test_draining_waits_for_exports_and_fails_what_is_there_at_the_deadline(
    tiny_worker: Any,
) -> None:
    async with serving(tiny_worker) as running:
        running.start("exported")
        await running.until(lambda: bool(running.of(Finished)))
        assert await running.client.drain(0.2) == 0
        running.start("late")
        await running.until(lambda: bool(running.of(Failed)))
        assert running.of(Failed)[0].reason == "WORKER_UNAVAILABLE"
        assert running.free_blocks == NUM_BLOCKS
        described = await running.client.describe()
        assert described.is_draining
        assert described.load.num_blocks == NUM_BLOCKS


async def test_an_engine_that_breaks_fails_its_requests_and_is_no_longer_healthy(
    tiny_worker: Any,
) -> None:
    async with serving(tiny_worker) as running:
        tiny_worker.runner.num_broken = 100
        for i in range(3):
            running.start(f"r{i}")
            await running.until(lambda i=i: len(running.of(Failed)) > i)
        reasons = [failed.reason for failed in running.of(Failed)]
        assert reasons == ["INTERNAL", "INTERNAL", "WORKER_UNAVAILABLE"]
        await running.until(lambda: bool(running.crashes))
        assert not running.server.is_alive()
        assert await running.server.drain(5.0) == 0
        async with grpc.aio.insecure_channel(running.server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(30):
                answer = await stub.Check(health_pb2.HealthCheckRequest())
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
                await asyncio.sleep(0.1)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_second_worker_cannot_take_the_same_port(tiny_worker: Any) -> None:
    async with serving(tiny_worker) as running:
        host, port = running.server.address.split(":")
        with pytest.raises(HocketError, match=port):
            bind(host, int(port))


async def test_metrics_show_load_hand_offs_and_failures(tiny_worker: Any) -> None:
    async with serving(tiny_worker) as running:
        running.start("a")
        await running.until(lambda: bool(running.of(Finished)))
        registry = running.server.metrics_registry
        assert registry.get_sample_value("hocket_prefill_hand_off_begun_total") == 1
        assert registry.get_sample_value("hocket_worker_kv_blocks", {"state": "all"}) == 16
        assert (registry.get_sample_value("hocket_worker_step_seconds_count") or 0) >= 1
