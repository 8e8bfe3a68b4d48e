"""gRPC in, events out: a prefill worker's server. It translates and decides nothing.

`serve` builds the whole worker: model, KV pool, exporter, export table, scheduler, engine. Decode
workers open Export streams here; each becomes a number for the engine, which says what to send on
it. What both kinds of worker share is `hocket/execution/worker_server.py`. Next: `engine.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc

from hocket.config import PrefillSettings, WorkerSettings
from hocket.execution.grammars.setup import set_up_grammars
from hocket.execution.model_setup import set_up_model
from hocket.execution.transfer_setup import set_up_exporter
from hocket.execution.worker_process import CrashSink, HostedWorker, end_process
from hocket.execution.worker_server import WorkerParts, WorkerServer, bind
from hocket.kv.prefix_cache import PrefixCache
from hocket.rpc import worker_pb2 as worker
from prefill_workers.engine import PrefillEngine
from prefill_workers.export_stream import (
    EndStream,
    ExportCommand,
    ExportMessage,
    ExportSettings,
    SendEvent,
    StreamGone,
    UpdateArrived,
)
from prefill_workers.kv_export import ExportTable
from prefill_workers.scheduler import PrefillPolicy, PrefillScheduler

PrefillServer = WorkerServer[ExportCommand, ExportMessage]


async def serve(settings: WorkerSettings, on_crash: CrashSink = end_process) -> PrefillServer:
    """Starts a prefill worker; returns when requests can come.

    Raises:
        HocketError: the checkpoint or the settings cannot work.
    """
    server, address = bind(settings.host, settings.port)
    parts = await asyncio.to_thread(build_worker, settings, address)
    running = WorkerServer(server, parts, ExportStreams, on_crash)
    await running.start(settings.telemetry)
    return running


WorkerProcess = partial(HostedWorker, serve)
"""`WorkerProcess(settings)`: the worker behind synchronous methods, for a Ray actor."""


class ExportStreams:
    """The Export streams that decode workers have open here."""

    def __init__(self, post: Callable[[ExportCommand], None]) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._to_send: dict[int, asyncio.Queue[ExportMessage]] = {}

    def deliver(self, messages: Sequence[ExportMessage]) -> None:
        for message in messages:
            # A stream that broke meanwhile is gone from here; the engine was told.
            if message.stream in self._to_send:
                self._to_send[message.stream].put_nowait(message)

    async def serve(
        self,
        updates: AsyncIterator[worker.ExportUpdate],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One stream: until the engine ends it, or the peer is gone (then gRPC cancels this)."""
        stream = next(self._numbers)
        to_send: asyncio.Queue[ExportMessage] = asyncio.Queue()
        self._to_send[stream] = to_send
        reader = asyncio.create_task(self._read(stream, updates))
        try:
            while isinstance(message := await to_send.get(), SendEvent):
                await context.write(message.event)
        finally:
            del self._to_send[stream]
            reader.cancel()
            self._post(StreamGone(stream))

    async def close(self) -> None:
        self.deliver([EndStream(stream) for stream in self._to_send])

    async def _read(self, stream: int, updates: AsyncIterator[worker.ExportUpdate]) -> None:
        """Updates to the engine. A peer that sends no more is gone, if it did not close before."""
        async for update in updates:
            self._post(UpdateArrived(stream, update))
        self._post(StreamGone(stream))


def build_worker(
    settings: WorkerSettings, address: str
) -> WorkerParts[ExportCommand, ExportMessage]:
    """The whole worker, from the checkpoint to the engine, not yet running."""
    pool = settings.pool
    assert isinstance(pool, PrefillSettings), settings.role
    model = set_up_model(settings)
    cache, transfer = model.runner.cache, settings.transfer
    exporter = set_up_exporter(settings, model.registered_pool())
    exports = ExportTable(
        cache.pool,
        exporter,
        ExportSettings(
            worker_id=settings.worker_id,
            worker_epoch=settings.epoch,
            address=address,
            fingerprint=model.fingerprint,
            num_slots=transfer.num_slots,
            progress_timeout_s=transfer.progress_timeout_s,
            open_timeout_s=transfer.open_timeout_s,
            max_unread_share=transfer.max_unread_share,
            has_checksums=transfer.checksum != "off",
        ),
    )
    policy = PrefillPolicy(pool.chunk_tokens, pool.max_batch, pool.max_waiting)
    scheduler = PrefillScheduler(model.limits, policy)
    prefixes = PrefixCache(cache.pool, model.fingerprint.weights, cache.layout.block_tokens)
    grammars = set_up_grammars(settings, model)
    engine = PrefillEngine(
        scheduler,
        model.runner,
        exports,
        synchronize=model.synchronize,
        prefixes=prefixes if pool.prefix_cache else None,
        grammars=grammars,
    )
    release = ExitStack()
    release.callback(exporter.close)
    release.callback(grammars.close)
    description = model.description(settings, address)
    counters: dict[str, object] = {
        "hocket_prefill_hand_off": exports.counters,
        "hocket_prefix_cache": prefixes.entries.counters,
    }
    return WorkerParts(engine, description, counters, release=release.close)
