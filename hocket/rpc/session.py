"""Worker's side of a Session: commands in, events out, those of an engine step in one batch.

A gateway opens one Session per worker (`hocket.rpc.session_client`). `SessionServer.serve` is the
body of `Worker.Session` in both worker servers; it hands whole requests to the engine and routes
what the engine publishes back to the session that started each request. What is published while a
batch is on its way goes into the next one, all of it. Batches are numbered and kept until
acknowledged, so that a stream that broke can be opened again within a grace time and go on where it
stopped. A session that does not come back, falls too far behind, or was given up by its gateway,
which then opens another, is expired: its requests are cancelled.

Everything here runs on the event loop; nothing awaits the engine.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from hocket.errors import HocketError, InternalError
from hocket.logs import about
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import event_to_message, key_from_message, load_to_message, unpack_tokens
from hocket.rpc.convert_start import start_from_message
from hocket.rpc.session_state import PartialStart, SessionState
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

# Keeps a message far below the limit of one; the rest goes into the next.
MAX_BATCH_EVENTS = 1024


class SessionEngine(Protocol):
    """What a Session needs of an engine. Called on the event loop: neither method may block."""

    def submit(self, request: StartRequest) -> None:
        """Takes a request. Raises `HocketError` to refuse it at once."""
        ...

    def cancel(self, key: RequestKey) -> None:
        """Stops a request and frees what it holds, exported blocks too. An unknown or finished
        key is ignored. Events of the key published afterwards are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """grace_s: how long a broken session may take to come back. max_kept_events: how far a
    gateway may fall behind. pulse_s: silence after which the load is told without events. gap_s:
    pause after a batch, so that steps quicker than that share the next one; hardly any model is as
    quick. A request that is alone waits for nobody: there is a pause only within `crowded_s` after
    a request came to others."""

    grace_s: float = 10.0
    max_kept_events: int = 131_072
    pulse_s: float = 1.0
    gap_s: float = 0.002
    crowded_s: float = 0.1


class SessionServer:
    """All sessions of one worker."""

    def __init__(
        self, engine: SessionEngine, worker_epoch: int, limits: SessionLimits | None = None
    ) -> None:
        self._engine = engine
        self._epoch = worker_epoch
        self._limits = limits or SessionLimits()
        self._loop = asyncio.get_running_loop()
        self._load = Load()
        self._sessions: dict[str, SessionState] = {}
        self._owners: dict[RequestKey, SessionState] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that are open or may still be resumed."""
        return len(self._sessions)

    @property
    def num_requests(self) -> int:
        """Requests whose end has not been published."""
        return len(self._owners)

    @property
    def has_unsent(self) -> bool:
        """Whether a session whose stream is up has events that have yet to leave."""
        sessions = self._sessions.values()
        return any(session.unsent for session in sessions if session.stream is not None)

    def publish(self, events: Sequence[Event], load: Load) -> None:
        """Tells each session its events of one engine step, in order.

        Call it once per step, on the event loop. Events of requests that nobody waits for any
        more (cancelled, session expired) are dropped.
        """
        self._load = load
        batches: dict[SessionState, list[worker.Event]] = {}
        for event in events:
            session = self._owners.get(event.key)
            if session is None:
                continue
            batches.setdefault(session, []).append(event_to_message(event))
            if isinstance(event, Finished | Failed):
                self._forget(event.key)
        for session, messages in batches.items():
            session.unsent += messages
            session.has_unsent.set()
            if session.num_behind > self._limits.max_kept_events:
                logger.warning("session %s is too far behind: expired", session.session_id)
                self._expire(session)

    async def serve(
        self,
        commands: AsyncIterator[worker.SessionCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """The body of `Worker.Session`: returns when the stream is over or was taken over."""
        first = await anext(aiter(commands), None)
        if first is None or first.WhichOneof("command") != "open":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "a Session begins with OpenSession"
            )
        version = first.open.protocol_version
        if abs(version - PROTOCOL_VERSION) > 1:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the gateway speaks protocol {version}, the worker {PROTOCOL_VERSION}",
            )
        session = self._session(first.open)
        if session is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"session {first.open.session_id} is not known here, or no longer",
            )
        stream = self._attach(session, first.open.received_events)
        reader = asyncio.create_task(self._read(session, commands))
        try:
            await context.write(self._pulse(session))
            await self._write(session, stream, reader, context)
            if session.is_expired:
                await context.abort(
                    grpc.StatusCode.NOT_FOUND, f"session {session.session_id} was expired"
                )
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._detach(session, stream)

    def close(self) -> None:
        """Expires every session: cancels its requests and ends its stream."""
        for session in list(self._sessions.values()):
            self._expire(session)

    # -- one stream

    async def _read(
        self, session: SessionState, commands: AsyncIterator[worker.SessionCommand]
    ) -> None:
        try:
            async for message in commands:
                for command in message.batch.commands or (message,):
                    self._take(session, command)
        finally:
            session.has_unsent.set()

    async def _write(
        self,
        session: SessionState,
        stream: object,
        reader: asyncio.Task[None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        while session.stream is stream and not session.is_expired and not reader.done():
            batch = self._next_batch(session)
            if batch is not None:
                await context.write(batch)
                if self._loop.time() < session.crowded_until_s:
                    await asyncio.sleep(self._limits.gap_s)
                continue
            session.has_unsent.clear()
            try:
                async with asyncio.timeout(self._limits.pulse_s):
                    await session.has_unsent.wait()
            except TimeoutError:
                await context.write(self._pulse(session))

    def _session(self, opening: worker.OpenSession) -> SessionState | None:
        """The session to serve: a known one, or a new one; None when it can't be resumed."""
        session = self._sessions.get(opening.session_id)
        if session is not None or opening.received_events > 0:
            return session
        for other in self._of_gateway(opening.gateway_id):
            # Its gateway has given it up. One that a stream still serves may be the later one, if
            # this opening was long on its way.
            if other.stream is None:
                self._expire(other)
        session = SessionState(opening.session_id, opening.gateway_id)
        self._sessions[session.session_id] = session
        return session

    def _attach(self, session: SessionState, received_events: int) -> object:
        if session.expiry is not None:
            session.expiry.cancel()
            session.expiry = None
        session.acknowledge(received_events)
        session.again = deque(session.kept)
        session.stream = stream = object()
        session.has_unsent.set()
        return stream

    def _detach(self, session: SessionState, stream: object) -> None:
        if session.stream is not stream or session.is_expired:
            return
        session.stream = None
        is_given_up = session is not self._of_gateway(session.gateway_id)[-1]
        if is_given_up or session.received_commands == 0:
            self._expire(session)
            return
        session.expiry = self._loop.call_later(self._limits.grace_s, self._expire, session)

    def _of_gateway(self, gateway_id: str) -> list[SessionState]:
        """The sessions of one gateway, in the order in which they were opened. It uses one."""
        return [s for s in self._sessions.values() if s.gateway_id == gateway_id]

    def _expire(self, session: SessionState) -> None:
        session.is_expired = True
        self._sessions.pop(session.session_id, None)
        if session.expiry is not None:
            session.expiry.cancel()
        session.partial.clear()
        for key in list(session.keys):
            self._cancel(session, key)
        session.has_unsent.set()

    # -- commands

    def _take(self, session: SessionState, command: worker.SessionCommand) -> None:
        kind = command.WhichOneof("command")
        if kind == "acknowledge":
            session.acknowledge(command.acknowledge.received_events)
            return
        if command.sequence <= session.received_commands:
            return
        if command.sequence != session.received_commands + 1:
            raise ValueError(
                f"command {command.sequence} after {session.received_commands}: one is missing"
            )
        session.received_commands = command.sequence
        match kind:
            case "start":
                self._take_start(session, command.start)
            case "piece":
                self._take_piece(session, command.piece)
            case "cancel":
                self._cancel(session, key_from_message(command.cancel.key))
            case _:
                raise ValueError(f"command {command.sequence} of unexpected kind {kind}")

    def _take_start(self, session: SessionState, start: worker.Start) -> None:
        key = key_from_message(start.key)
        if key in self._owners:
            self._engine.cancel(key)
            self._fail(key, InternalError(f"request {key} was started twice", key=key))
            return
        self._owners[key] = session
        session.keys.add(key)
        if len(session.keys) > 1:
            session.crowded_until_s = self._loop.time() + self._limits.crowded_s
        token_ids = array("I", unpack_tokens(start.token_ids))
        session.partial[key] = PartialStart(start, token_ids)
        self._submit_when_whole(session, key)

    def _take_piece(self, session: SessionState, piece: worker.StartPiece) -> None:
        key = key_from_message(piece.key)
        partial = session.partial.get(key)
        if partial is None:
            return  # cancelled meanwhile
        if piece.offset != len(partial.token_ids):
            message = f"piece at {piece.offset}, expected {len(partial.token_ids)}"
            self._fail(key, InternalError(message, key=key))
            return
        partial.token_ids.extend(unpack_tokens(piece.token_ids))
        self._submit_when_whole(session, key)

    def _submit_when_whole(self, session: SessionState, key: RequestKey) -> None:
        partial = session.partial[key]
        if len(partial.token_ids) < partial.start.prompt_tokens:
            return
        del session.partial[key]
        try:
            request = start_from_message(partial.start, tuple(partial.token_ids))
            self._engine.submit(request)
        except HocketError as error:
            self._fail(key, error)
        except Exception as error:
            logger.exception("request %s could not be submitted", key, extra=about(key))
            self._fail(key, InternalError(f"submit failed: {error!r}", key=key))

    def _cancel(self, session: SessionState, key: RequestKey) -> None:
        session.partial.pop(key, None)
        self._forget(key)
        self._engine.cancel(key)

    def _fail(self, key: RequestKey, error: HocketError) -> None:
        self.publish([failed_from_error(key, error)], self._load)

    def _forget(self, key: RequestKey) -> None:
        session = self._owners.pop(key, None)
        if session is not None:
            session.keys.discard(key)
            session.partial.pop(key, None)

    # -- batches

    def _next_batch(self, session: SessionState) -> worker.SessionEvents | None:
        """What to send next: first what the gateway missed, then all that is new."""
        if session.again:
            return session.again.popleft()
        if not session.unsent:
            return None
        events = session.unsent[:MAX_BATCH_EVENTS]
        del session.unsent[:MAX_BATCH_EVENTS]
        session.last_batch += 1
        batch = self._batch(session, session.last_batch, events)
        session.keep(batch)
        return batch

    def _pulse(self, session: SessionState) -> worker.SessionEvents:
        return self._batch(session, 0, [])

    def _batch(
        self, session: SessionState, sequence: int, events: list[worker.Event]
    ) -> worker.SessionEvents:
        return worker.SessionEvents(
            sequence=sequence,
            worker_epoch=self._epoch,
            received_commands=session.received_commands,
            events=events,
            load=load_to_message(self._load),
        )
