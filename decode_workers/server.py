"""gRPC in, events out: a decode worker's server. It translates and decides nothing.

`serve` builds the whole worker: model, KV pool, importer, import table, scheduler, engine. For
each import the engine asks for an Export stream to a prefill worker; the stream is opened here, on
the event loop, and what comes down it hops to the engine. What both kinds of worker share is
`hocket/execution/worker_server.py`. Next: `engine.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc

from decode_workers.engine import DecodeEngine
from decode_workers.group_peers import GroupPeers, GroupService, WakeUp
from decode_workers.import_stream import (
    EndStream,
    EventArrived,
    ImportCommand,
    ImportMessage,
    ImportSettings,
    OpenStream,
    ReadsEnded,
    SendUpdate,
    StreamGone,
)
from decode_workers.kv_import import ImportTable
from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.config import DecodeSettings, WorkerSettings
from hocket.errors import HandOffFailed, HocketError
from hocket.execution.drafting.collector import DraftCollector
from hocket.execution.drafting.setup import set_up_drafts
from hocket.execution.grammars.setup import set_up_grammars
from hocket.execution.model_setup import set_up_model
from hocket.execution.transfer_setup import set_up_importer
from hocket.execution.worker_process import CrashSink, HostedWorker, end_process
from hocket.execution.worker_server import WorkerParts, WorkerServer, bind
from hocket.kv.prefix_cache import PrefixCache
from hocket.kv.transfer import KVImporter
from hocket.rpc import worker_pb2 as worker
from hocket.rpc import worker_pb2_grpc
from hocket.rpc.clients import WorkerClient
from hocket.rpc.status import error_from_rpc
from hocket.types import RequestKey

DecodeServer = WorkerServer[ImportCommand | WakeUp, ImportMessage]

# After an import ended: time that its stream gets to end in order before it is cut.
END_STREAM_S = 5.0


async def serve(settings: WorkerSettings, on_crash: CrashSink = end_process) -> DecodeServer:
    """Starts a decode worker; returns when requests can come.

    Raises:
        HocketError: the checkpoint or the settings cannot work.
    """
    server, address = bind(settings.host, settings.port)
    peers = GroupPeers(settings.epoch, asyncio.get_running_loop())
    parts, importer = await asyncio.to_thread(build_worker, settings, address, peers)
    running = DecodeServer(server, parts, partial(ImportStreams, peers), on_crash)
    importer.notify(lambda: running.post(ReadsEnded()))
    if settings.group is not None:
        service = GroupService(settings.epoch, running.post)
        worker_pb2_grpc.add_RankGroupServicer_to_server(service, server)
    await running.start(settings.telemetry)
    return running


WorkerProcess = partial(HostedWorker, serve)
"""`WorkerProcess(settings)`: the worker behind synchronous methods, for a Ray actor."""


class ImportStreams:
    """The Export streams that this worker has open at prefill workers; one channel per worker.
    The channels to `peers` are closed with them."""

    def __init__(self, peers: GroupPeers, post: Callable[[ImportCommand], None]) -> None:
        self._peers = peers
        self._post = post
        self._clients: dict[str, WorkerClient] = {}
        # What is to be sent on each stream; None half-closes it.
        self._to_send: dict[RequestKey, asyncio.Queue[worker.ExportUpdate | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def deliver(self, messages: Sequence[ImportMessage]) -> None:
        for message in messages:
            match message:
                case OpenStream(key, address, update):
                    self._open(key, address, update)
                case SendUpdate(key, update):
                    # A stream that broke meanwhile is gone from here; the engine was told.
                    if key in self._to_send:
                        self._to_send[key].put_nowait(update)
                case EndStream(key):
                    if key in self._to_send:
                        self._to_send.pop(key).put_nowait(None)

    async def serve(
        self,
        updates: AsyncIterator[worker.ExportUpdate],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """A decode worker exports nothing."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "This is a decode worker: it exports nothing."
        )

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        await self._peers.close()

    def _open(self, key: RequestKey, address: str, update: worker.ExportUpdate) -> None:
        if address not in self._clients:
            self._clients[address] = WorkerClient(address)
        to_send: asyncio.Queue[worker.ExportUpdate | None] = asyncio.Queue()
        to_send.put_nowait(update)
        self._to_send[key] = to_send
        task = asyncio.create_task(self._run(key, self._clients[address].export(), to_send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, key: RequestKey, call: Any, to_send: asyncio.Queue[worker.ExportUpdate | None]
    ) -> None:
        """One stream from its opening to its end."""
        writer = asyncio.create_task(self._write(call, to_send))
        error: HocketError = HandOffFailed(f"The Export stream of {key} ended before its bundle.")
        try:
            async for event in call:
                self._post(EventArrived(key, event))
        except grpc.aio.AioRpcError as rpc_error:
            # Whatever gRPC calls it, for the reader the hand-off failed.
            error = HandOffFailed(f"The Export stream of {key} broke: {error_from_rpc(rpc_error)}")
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
            if self._to_send.get(key) is to_send:
                del self._to_send[key]
                self._post(StreamGone(key, error))

    @staticmethod
    async def _write(call: Any, to_send: asyncio.Queue[worker.ExportUpdate | None]) -> None:
        while (update := await to_send.get()) is not None:
            await call.write(update)
        await call.done_writing()
        await asyncio.sleep(END_STREAM_S)
        call.cancel()


def build_worker(
    settings: WorkerSettings, address: str, peers: GroupPeers
) -> tuple[WorkerParts[ImportCommand | WakeUp, ImportMessage], KVImporter]:
    """The whole worker, from the checkpoint to the engine, not yet running; and its importer."""
    pool = settings.pool
    assert isinstance(pool, DecodeSettings), settings.role
    model = set_up_model(settings, peers.wake)
    cache, transfer = model.runner.cache, settings.transfer
    importer = set_up_importer(settings, model.registered_pool())
    imports = ImportTable(
        cache.pool,
        importer,
        ImportSettings(
            worker_id=settings.worker_id,
            worker_epoch=settings.epoch,
            fingerprint=model.fingerprint,
            progress_timeout_s=transfer.progress_timeout_s,
            read_timeout_s=transfer.read_timeout_s,
            max_quarantine_share=transfer.max_quarantine_share,
        ),
    )
    sizes = (pool.max_batch, pool.max_waiting, pool.chunk_tokens, model.max_draft_tokens)
    policy = DecodePolicy(*sizes, reserve_output_share=pool.reserve_output_share)
    block_tokens = cache.layout.block_tokens
    prefixes = PrefixCache(cache.pool, model.fingerprint.weights, block_tokens)
    scheduler = DecodeScheduler(model.limits, policy)
    drafts = set_up_drafts(settings, model)
    grammars = set_up_grammars(settings, model)
    engine = DecodeEngine(
        scheduler,
        model.runner,
        imports,
        can_recompute=transfer.policy == "recompute",
        together=model.rank.lockstep if model.rank is not None else None,
        prefixes=prefixes if pool.prefix_cache else None,
        grammars=grammars,
        drafts=drafts,
    )
    if model.rank is not None:
        # Also the moment from which every rank has its model.
        everyone = model.rank.group.tell_all("address", address)
        peers.meet([other for other in everyone if other != address])
    release = ExitStack()
    release.callback(importer.close)
    release.callback(grammars.close)
    description = model.description(settings, address)
    counters: dict[str, object] = {
        "hocket": scheduler.counters,
        "hocket_decode_hand_off": imports.counters,
        "hocket_prefix_cache": prefixes.entries.counters,
        "hocket_transfer": importer.counters,
        "hocket_draft_controller": DraftCollector(drafts, pool.synthetic_acceptance),
    }
    parts: WorkerParts[ImportCommand | WakeUp, ImportMessage] = WorkerParts(
        engine, description, counters, release=release.close
    )
    return parts, importer
