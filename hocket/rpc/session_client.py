"""Gateway's side of a Session: one `SessionClient` per worker, shared by all its requests.

`start` sends a request and names a sink; every event of that request goes to its sink, ending with
Finished or Failed. The stream is read without pause: a slow client of the gateway never holds up
others. A broken stream is opened again and resumed within `reconnect_s`; when that fails, when
nobody listens there any more, or the worker has restarted meanwhile, every request on it gets a
Failed event (WorkerUnavailable) at once and later ones are refused at once until the worker is
back. The other end is `hocket.rpc.session.SessionServer`.
"""

# gRPC's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from hocket.errors import WorkerUnavailable
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.clients import WorkerClient
from hocket.rpc.convert import (
    event_from_message,
    key_from_message,
    key_to_message,
    load_from_message,
)
from hocket.rpc.convert_start import start_to_messages
from hocket.rpc.status import failed_from_error
from hocket.types import (
    PROTOCOL_VERSION,
    Event,
    Failed,
    Finished,
    Load,
    RequestKey,
    StartRequest,
)

logger = logging.getLogger(__name__)

# A message of commands takes no more once it has reached this: a cancel never waits for long.
BATCH_BYTES = 16 << 10
# What `read` returns at the end of a stream; gRPC's own types leave it out.
_END: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]

EventSink = Callable[[Event], None]
"""Takes the next event of a request; called on the event loop, must not block or raise."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """reconnect_s: how long a broken stream may take to come back before its requests fail.
    refused_s: the same where every connection is refused: a worker listens as long as it lives.
    silence_s: a stream without even a pulse for this long counts as broken. retry_s: pause between
    tries. piece_tokens: prompt tokens in one message. acknowledge_every: batches."""

    reconnect_s: float = 2.0
    refused_s: float = 0.5
    silence_s: float = 10.0
    retry_s: float = 0.2
    piece_tokens: int = 16_384
    acknowledge_every: int = 32


class _SessionLostError(Exception):
    """The worker does not know the session (any more): nothing of it can be resumed."""


class SessionClient:
    """The Session of this gateway with the worker at `address`. Build it on a running loop."""

    def __init__(
        self,
        address: str,
        gateway_id: str,
        *,
        settings: SessionSettings | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._gateway_id = gateway_id
        self._settings = settings or SessionSettings()
        self._client = WorkerClient(address, credentials=credentials)
        self._loop = asyncio.get_running_loop()
        self._sinks: dict[RequestKey, EventSink] = {}
        # Turned into a Load when somebody asks: far less often than it comes.
        self._load_message = worker.Load()
        self._load: Load | None = None
        self._is_connected = False
        self._down_since_s = self._loop.time()
        self._is_lost = False
        self._is_closed = False
        self._is_doubted = False
        self._refused_since_s: float | None = None
        self._has_unsent = asyncio.Event()
        self._begin_session()
        self._task = asyncio.create_task(self._run())

    @property
    def is_connected(self) -> bool:
        """Whether the stream is up and the worker has answered on it."""
        return self._is_connected

    @property
    def load(self) -> Load:
        """The worker's load as it told last."""
        if self._load is None:
            self._load = load_from_message(self._load_message)
        return self._load

    @property
    def num_requests(self) -> int:
        """Requests whose last event has not come."""
        return len(self._sinks)

    def start(self, request: StartRequest, sink: EventSink) -> None:
        """Sends a request. Its events go to `sink`, the last one Finished or Failed.

        Never raises for a worker that is away: that is a Failed event too.
        """
        if self._is_lost or self._is_closed:
            why = "is no longer used by this gateway" if self._is_closed else "is not reachable"
            sink(failed_from_error(request.key, self._unavailable(why)))
            return
        assert request.key not in self._sinks, f"{request.key} was started twice"
        self._sinks[request.key] = sink
        start, pieces = start_to_messages(request, self._settings.piece_tokens)
        self._bulk.append(worker.SessionCommand(start=start))
        self._bulk.extend(worker.SessionCommand(piece=piece) for piece in pieces)
        self._has_unsent.set()

    def cancel(self, key: RequestKey) -> None:
        """Stops a request, also one whose leg here is over but whose blocks may still be exported.
        No event of it reaches its sink any more. It overtakes prompts that wait to be sent."""
        self._sinks.pop(key, None)
        if self._bulk:
            self._bulk = deque(c for c in self._bulk if _bulk_key(c) != key)
        if self._is_lost:
            return
        self._urgent.append(worker.SessionCommand(cancel=worker.Cancel(key=key_to_message(key))))
        self._has_unsent.set()

    def doubt(self) -> None:
        """The directory says that this life of the worker is over. What runs may end, but a
        connection that is refused is not tried again."""
        self._is_doubted = True

    async def close(self) -> None:
        """Cancels what still runs (sinks get Failed), sends that if it can, and ends the stream."""
        self._is_closed = True
        for key in list(self._sinks):
            sink = self._sinks[key]
            self.cancel(key)
            sink(failed_from_error(key, self._unavailable("is no longer used by this gateway")))
        deadline_s = self._loop.time() + 0.5
        while self._is_connected and self._urgent and self._loop.time() < deadline_s:
            await asyncio.sleep(0.005)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._client.close()

    # -- connection

    def _begin_session(self) -> None:
        """A new session id; nothing sent, nothing received."""
        self._session_id = uuid.uuid4().hex
        self._epoch: int | None = None
        self._received_events = 0
        self._received_commands = 0
        self._last_command = 0
        # Sent and not yet taken by the worker; again for this stream; not yet sent, in two lanes.
        self._unacknowledged: deque[worker.SessionCommand] = deque()
        self._again: deque[worker.SessionCommand] = deque()
        self._urgent: deque[worker.SessionCommand] = deque()
        self._bulk: deque[worker.SessionCommand] = deque()

    async def _run(self) -> None:
        while True:
            try:
                await self._serve_stream()
            except _SessionLostError as lost:
                logger.warning("worker %s: %s", self.address, lost)
                self._lose(str(lost))
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                self._note_break(error)
            except Exception:
                logger.exception("worker %s sent what cannot be read", self.address)
                self._lose("sent what cannot be read")
            if not self._is_lost and (why := self._why_hopeless()):
                self._lose(why)
                self._is_lost = True
            await asyncio.sleep(self._settings.retry_s)

    def _why_hopeless(self) -> str:
        """Why the session will not come back, in words; "" while it may."""
        now_s, settings = self._loop.time(), self._settings
        down_s = now_s - self._down_since_s
        if self._refused_since_s is not None:
            refused_s = now_s - self._refused_since_s
            if self._is_doubted or refused_s >= min(settings.refused_s, settings.reconnect_s):
                return "has ended: nobody listens there any more"
        return f"was not reachable for {down_s:.1f} s" if down_s >= settings.reconnect_s else ""

    async def _serve_stream(self) -> None:
        """One stream from its opening to its end, which is always an exception or a plain end."""
        call = self._client.session()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._settings.reconnect_s):
                await call.write(worker.SessionCommand(open=self._opening()))
                greeting = await call.read()
            if greeting is _END:
                return
            self._greeted(greeting)
            writer = asyncio.create_task(self._write(call))
            async with asyncio.timeout(self._settings.silence_s) as silence:
                while (batch := await call.read()) is not _END:
                    silence.reschedule(self._loop.time() + self._settings.silence_s)
                    self._take(batch)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise _SessionLostError(f"refused to resume: {error.details()}") from error
            raise
        finally:
            if self._is_connected:
                self._is_connected = False
                self._down_since_s = self._loop.time()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    def _opening(self) -> worker.OpenSession:
        return worker.OpenSession(
            session_id=self._session_id,
            gateway_id=self._gateway_id,
            protocol_version=PROTOCOL_VERSION,
            received_events=self._received_events,
        )

    def _greeted(self, greeting: worker.SessionEvents) -> None:
        if self._epoch is not None and greeting.worker_epoch != self._epoch:
            raise _SessionLostError("restarted")
        if greeting.received_commands < self._received_commands:
            raise _SessionLostError("has forgotten the session")
        self._epoch = greeting.worker_epoch
        self._is_connected, self._is_lost = True, False
        self._is_doubted, self._refused_since_s = False, None
        self._take(greeting)
        self._again = deque(self._unacknowledged)

    def _note_break(self, error: grpc.aio.AioRpcError | TimeoutError) -> None:
        is_rpc = isinstance(error, grpc.aio.AioRpcError)
        reason = error.details() or "" if is_rpc else "silence"
        if "Connection refused" not in reason:
            self._refused_since_s = None
        elif self._refused_since_s is None:
            self._refused_since_s = self._loop.time()
        if not self._is_lost:
            logger.info("Session with %s broke: %s", self.address, reason)

    def _lose(self, why: str) -> None:
        """Fails every request and begins anew."""
        sinks, self._sinks = self._sinks, {}
        self._begin_session()
        error = self._unavailable(why)
        for key, sink in sinks.items():
            sink(failed_from_error(key, error))

    def _unavailable(self, why: str) -> WorkerUnavailable:
        return WorkerUnavailable(f"worker {self.address} {why}", worker=self.address)

    # -- both directions

    async def _write(self, call: Any) -> None:
        while True:
            commands = self._next_commands()
            if not commands:
                self._has_unsent.clear()
                await self._has_unsent.wait()
            elif len(commands) == 1:
                await call.write(commands[0])
            else:
                batch = worker.CommandBatch(commands=commands)
                await call.write(worker.SessionCommand(batch=batch))

    def _next_commands(self) -> list[worker.SessionCommand]:
        """What goes into the next message: all that waits, as long as it is small."""
        commands: list[worker.SessionCommand] = []
        size_bytes = 0
        while size_bytes < BATCH_BYTES and (command := self._next_command()) is not None:
            commands.append(command)
            size_bytes += command.ByteSize()
        return commands

    def _next_command(self) -> worker.SessionCommand | None:
        """What to send next. Commands get their number here, so cancels overtake prompts."""
        if self._again:
            return self._again.popleft()
        lane = self._urgent or self._bulk
        if not lane:
            return None
        command = lane.popleft()
        if not command.HasField("acknowledge"):
            self._last_command += 1
            command.sequence = self._last_command
            self._unacknowledged.append(command)
        return command

    def _take(self, batch: worker.SessionEvents) -> None:
        self._load_message, self._load = batch.load, None
        self._drop_taken(batch.received_commands)
        if batch.sequence == 0 or batch.sequence <= self._received_events:
            return
        if batch.sequence != self._received_events + 1:
            raise _SessionLostError(
                f"sent batch {batch.sequence} after {self._received_events}: one is missing"
            )
        self._received_events = batch.sequence
        if batch.sequence % self._settings.acknowledge_every == 0:
            acknowledge = worker.AcknowledgeEvents(received_events=batch.sequence)
            self._urgent.append(worker.SessionCommand(acknowledge=acknowledge))
            self._has_unsent.set()
        for message in batch.events:
            self._deliver(message)

    def _deliver(self, message: worker.Event) -> None:
        key = key_from_message(message.key)
        sink = self._sinks.get(key)
        if sink is None:
            return  # cancelled here, the worker did not know it yet
        event = event_from_message(message, key)
        if isinstance(event, Finished | Failed):
            del self._sinks[key]
        sink(event)

    def _drop_taken(self, received_commands: int) -> None:
        if received_commands <= self._received_commands:
            return
        self._received_commands = received_commands
        while self._unacknowledged and self._unacknowledged[0].sequence <= received_commands:
            self._unacknowledged.popleft()


def _bulk_key(command: worker.SessionCommand) -> RequestKey:
    is_start = command.WhichOneof("command") == "start"
    return key_from_message(command.start.key if is_start else command.piece.key)
