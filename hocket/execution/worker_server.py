"""The gRPC face that both kinds of worker share: Describe, Session, Drain, health, and the hops.

`WorkerServer` owns the gRPC server, the sessions and the engine's thread. Commands hop from the
event loop into the engine's inbox; what a turn produced hops back and is published to the sessions
and to the hand-off streams. What differs between the two kinds is passed in: the engine, and the
streams of the Export call (`HandOffStreams`): a prefill worker serves them, a decode worker opens
them. It decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from hocket import environment
from hocket.clock import SystemClock
from hocket.config import TelemetrySettings
from hocket.errors import ConfigError, WorkerUnavailable
from hocket.execution.engine_thread import (
    BeginDrain,
    CancelRequest,
    Engine,
    EngineThread,
    FailRequests,
    HandOffCommand,
    Message,
    StepOutput,
)
from hocket.execution.request_log import log_events
from hocket.execution.worker_metrics import EngineMetrics
from hocket.rpc import worker_pb2 as worker
from hocket.rpc import worker_pb2_grpc
from hocket.rpc.clients import server_options
from hocket.rpc.convert import description_to_message
from hocket.rpc.session import SessionServer
from hocket.telemetry import MetricsPage
from hocket.types import Joined, Load, RequestKey, StartRequest, WorkerDescription

# A turn is one model step: longer than this, and the engine hangs.
STUCK_S = 20.0
# How often an engine that turns without anything to tell still tells its load.
LOAD_EVERY_S = 0.1
# Time that the last events get to leave before a broken worker ends its process.
LAST_WORDS_S = 0.5
# Time that a gateway gets to read the last events of a drained worker.
LAST_EVENTS_S = 5.0

MessageIn = TypeVar("MessageIn", contravariant=True)

_logger = logging.getLogger(__name__)
_HealthServicer: Any = health.aio.HealthServicer  # pyright: ignore[reportAttributeAccessIssue]


class HandOffStreams(Protocol[MessageIn]):
    """The Export streams of one worker. All methods run on the event loop."""

    def deliver(self, messages: Sequence[MessageIn]) -> None:
        """Sends the engine's messages on their streams, in order, without waiting."""
        ...

    async def serve(
        self,
        updates: AsyncIterator[worker.ExportUpdate],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """The body of `Worker.Export`."""
        ...

    async def close(self) -> None:
        """Ends every stream."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerParts(Generic[HandOffCommand, Message]):
    """A worker as it was built, not yet running.

    `counters` are dataclasses of counts, by the beginning of their metrics' names. `release` frees
    its transfer after the engine's thread ended.
    """

    engine: Engine[HandOffCommand, Message]
    description: WorkerDescription
    counters: Mapping[str, object]
    release: Callable[[], None]


class WorkerServer(Generic[HandOffCommand, Message]):
    """One running worker. Built and used on one event loop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        parts: WorkerParts[HandOffCommand, Message],
        open_streams: Callable[[Callable[[HandOffCommand], None]], HandOffStreams[Message]],
        on_crash: Callable[[Exception], None],
    ) -> None:
        """`server` is bound but not started. `on_crash` is called on the event loop after the
        last events had time to leave."""
        self._server = server
        self._parts = parts
        self._on_crash = on_crash
        self._loop = asyncio.get_running_loop()
        self._thread: EngineThread[HandOffCommand, Message] = EngineThread(
            parts.engine,
            SystemClock(),
            name=parts.description.worker_id,
            on_output=self._hop_output,
            on_crash=self._hop_crash,
        )
        self._streams = open_streams(self._thread.post)
        self._sessions = SessionServer(self, parts.description.epoch)
        self._metrics = EngineMetrics(parts.description.role, parts.counters)
        self._metrics.observe_identity(parts.description)
        self._page: MetricsPage | None = None
        self._health = _HealthServicer()
        self._load = Load()
        self._transport = ""
        self._is_draining = False
        self._is_drained = asyncio.Event()
        self._told_at = 0.0
        # Of the engine's thread: seconds of its turns, and the decode steps of the last one.
        self._busy_s = 0.0
        self._decode_step_s = 0.0
        self._decode_steps = 0
        self._watch: asyncio.Task[None] | None = None
        # The number of turns that was seen last, and since when.
        self._pulse = (0, time.monotonic())

    async def start(self, telemetry: TelemetrySettings | None = None) -> None:
        """Serves; its metrics too, on a free port, if `telemetry` is given and wants them.

        Raises:
            ConfigError: nothing can listen on `telemetry.metrics_host`.
        """
        if telemetry is not None and telemetry.metrics_port >= 0:
            own_host = self.address.rpartition(":")[0]
            host = telemetry.metrics_host or own_host
            self._page = MetricsPage(self._metrics.registry, host, port=0)
        service = _WorkerService(self, self._sessions, self._streams)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._thread.start()
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_pulse())

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """Where the worker's metrics are read."""
        return self._metrics.registry

    @property
    def address(self) -> str:
        return self._parts.description.address

    def description(self) -> WorkerDescription:
        """The worker as it is now, with its load."""
        return replace(
            self._parts.description,
            load=self._load,
            is_draining=self._is_draining,
            transport=self._transport,
            metrics_address=self._page.address if self._page is not None else "",
        )

    def is_alive(self) -> bool:
        """Whether the engine turns: read off its counter, from any thread."""
        turns, now = self._thread.num_turns, time.monotonic()
        if turns != self._pulse[0]:
            self._pulse = (turns, now)
        return self._thread.is_alive and now - self._pulse[1] < STUCK_S

    def post(self, command: HandOffCommand) -> None:
        """Hands a command of this kind of worker to the engine; from any thread."""
        self._thread.post(command)

    def submit(self, request: StartRequest) -> None:
        """Hands a request to the engine, which refuses by a Failed event."""
        self._thread.post(request)

    def cancel(self, key: RequestKey) -> None:
        self._thread.post(CancelRequest(key))

    async def drain(self, deadline_s: float) -> int:
        """Refuses new requests and waits for the others, and for exported blocks to be read.

        Returns how many requests were still here at the deadline; they are failed.
        """
        if not self._thread.is_alive:
            return 0
        self._is_draining = True
        self._thread.post(BeginDrain())
        try:
            await asyncio.wait_for(self._is_drained.wait(), deadline_s)
        except TimeoutError:
            failed = self._load.running_requests + self._load.waiting_requests
            error = WorkerUnavailable("The worker was drained and stopped; retry elsewhere.")
            self._thread.post(FailRequests(error))
            await asyncio.wait_for(self._is_drained.wait(), STUCK_S)
        else:
            failed = 0
        await self._let_leave()
        return failed

    async def _let_leave(self) -> None:
        """Waits until what the engine told last is on its way to the gateways."""
        deadline = self._loop.time() + LAST_EVENTS_S
        while self._sessions.has_unsent and self._loop.time() < deadline:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Ends streams, server and engine, and frees the model. Call `drain` first to be kind."""
        if self._watch is not None:
            self._watch.cancel()
        self._sessions.close()
        await self._streams.close()
        await self._server.stop(grace=0.2)
        has_ended = await asyncio.to_thread(self._thread.stop, STUCK_S)
        if not has_ended:
            _logger.error("The engine did not end within %s s; its memory is kept.", STUCK_S)
            return
        await asyncio.to_thread(self._parts.release)
        if self._page is not None:
            await asyncio.to_thread(self._page.close)

    def _hop_output(self, output: StepOutput[Message], seconds: float) -> None:
        """In the engine's thread."""
        now = time.monotonic()
        if output.wait_s == 0:
            self._busy_s += seconds
            self._metrics.observe_step(seconds)
        if output.load.decode_steps > self._decode_steps:
            self._decode_steps = output.load.decode_steps
            self._decode_step_s += seconds
        has_news = output.events or output.messages or output.is_drained
        if has_news or now - self._told_at >= LOAD_EVERY_S:
            self._told_at = now
            load = replace(output.load, busy_s=self._busy_s, decode_step_s=self._decode_step_s)
            self._call_on_loop(self._publish, replace(output, load=load))

    def _publish(self, output: StepOutput[Message]) -> None:
        self._load = output.load
        self._metrics.observe(output.events, output.load)
        for event in output.events:
            if isinstance(event, Joined) and event.transport not in ("", self._transport):
                self._transport = event.transport
                self._metrics.observe_identity(self.description())
        log_events(self._parts.description.role, output.events)
        self._sessions.publish(output.events, output.load)
        self._streams.deliver(output.messages)
        if output.is_drained:
            self._is_drained.set()

    def _hop_crash(self, error: Exception) -> None:
        """In the engine's thread, which ends."""
        self._call_on_loop(self._crash, error)

    def _crash(self, error: Exception) -> None:
        self._loop.call_later(LAST_WORDS_S, self._on_crash, error)

    def _call_on_loop(self, function: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody listens any more.
            _logger.warning("The engine outlived its event loop.")

    async def _watch_pulse(self) -> None:
        while True:
            status = health_pb2.HealthCheckResponse
            now = status.SERVING if self.is_alive() else status.NOT_SERVING
            for service in ("", "hocket.worker.v1.Worker"):
                await self._health.set(service, now)
            await asyncio.sleep(1.0)


class _WorkerService(worker_pb2_grpc.WorkerServicer):
    """Translates the calls of worker.proto; see there."""

    def __init__(
        self,
        server: WorkerServer[Any, Any],
        sessions: SessionServer,
        streams: HandOffStreams[Any],
    ) -> None:
        self._server = server
        self._sessions = sessions
        self._streams = streams

    async def Describe(  # noqa: N802
        self, request: worker.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker.WorkerDescription:
        return description_to_message(self._server.description())

    async def Session(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker.SessionCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self._sessions.serve(request_iterator, context)

    async def Export(  # noqa: N802
        self,
        request_iterator: AsyncIterator[worker.ExportUpdate],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self._streams.serve(request_iterator, context)

    async def Drain(  # noqa: N802
        self, request: worker.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker.DrainResponse:
        failed = await self._server.drain(request.deadline_ms / 1000)
        return worker.DrainResponse(failed_requests=failed)


def bind(host: str, port: int) -> tuple[grpc.aio.Server, str]:
    """A server that is bound but not started, and its address; port 0 takes a free one.

    Raises:
        ConfigError: nothing can listen there, or no peer could call what is listened on.
    """
    if environment.is_no_address(host):
        raise ConfigError(
            f"A worker tells its peers the address that it binds, and they cannot call {host}: "
            "name one of this machine's own addresses.",
            field="cluster.host",
        )
    server = grpc.aio.server(options=server_options())
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"Nothing can listen on {host}:{port}: {error}") from error
    return server, f"{host}:{bound}"
