"""Runs an engine in a thread of its own, between a server's inbox and its event loop.

Commands come in from any thread (`post`); the outcome of every turn goes out through one callback,
which the server hops onto its event loop. So gRPC never waits on a model step, and a step never
waits on gRPC. An idle engine sleeps until a command comes or its next timer is due, and wakes at
least every `PULSE_S`: `num_turns` moves while the thread lives, and health is read off it. An
error that an engine did not handle itself ends the thread: every request is failed first.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hocket.clock import Clock
from hocket.errors import GroupLost, HocketError, WorkerUnavailable
from hocket.types import Event, Load, RequestKey, StartRequest

PULSE_S = 0.5

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Forget a request wherever it is; one that is not here is no error."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class BeginDrain:
    """Refuse new requests from here on."""


@dataclass(frozen=True, slots=True)
class FailRequests:
    """End every request with this error."""

    error: HocketError


Command = StartRequest | CancelRequest | BeginDrain | FailRequests

HandOffCommand = TypeVar("HandOffCommand")
HandOffCommandIn = TypeVar("HandOffCommandIn", contravariant=True)
Message = TypeVar("Message")
MessageOut = TypeVar("MessageOut", covariant=True)


@dataclass(frozen=True, slots=True)
class StepOutput(Generic[MessageOut]):
    """What one turn of an engine produced.

    `messages` belong on the hand-off streams, in this order. `wait_s` is how long the engine may
    sleep now when no command comes: 0 when there is work left. `is_drained`: it drains, and
    nothing is left on it, exported blocks included.
    """

    events: tuple[Event, ...]
    messages: tuple[MessageOut, ...]
    load: Load
    wait_s: float
    is_drained: bool


class Engine(Protocol[HandOffCommandIn, MessageOut]):
    """The loop body of a worker. All methods are called by one thread."""

    def take(self, command: Command | HandOffCommandIn, now: float) -> None:
        """Takes note of a command; what follows from it comes out of the next step."""
        ...

    def step(self, now: float) -> StepOutput[MessageOut]:
        """One turn: timers, admissions, one model step, events."""
        ...

    def fail_all(self, error: HocketError, now: float) -> None:
        """Ends every request with `error`."""
        ...

    def collect(self, now: float) -> StepOutput[MessageOut]:
        """What is to be told since the last collection; `step` ends with it."""
        ...


class EngineThread(Generic[HandOffCommand, Message]):
    """Owns the thread and the inbox.

    `on_output` (a turn's outcome and its seconds) and `on_crash` are called in that thread.
    """

    def __init__(
        self,
        engine: Engine[HandOffCommand, Message],
        clock: Clock,
        *,
        name: str,
        on_output: Callable[[StepOutput[Message], float], None],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_output = on_output
        self._on_crash = on_crash
        self._inbox: deque[Command | HandOffCommand] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._num_turns = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def num_turns(self) -> int:
        """Turns of the loop so far; read from any thread."""
        return self._num_turns

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command | HandOffCommand) -> None:
        """Hands over a command and wakes the engine; from any thread."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its current turn; False when it has not ended in time."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            wait_s = 0.0
            while not self._is_stopping:
                wait_s = self._turn(wait_s)
        except Exception as error:
            _logger.exception("The engine ends: every request on it fails.")
            self._fail_all(error)
            self._on_crash(error)

    def _turn(self, wait_s: float) -> float:
        for command in self._wait(min(wait_s, PULSE_S)):
            self._engine.take(command, self._clock.now())
        started = self._clock.now()
        output = self._engine.step(started)
        self._num_turns += 1
        self._on_output(output, self._clock.now() - started)
        return output.wait_s

    def _wait(self, timeout_s: float) -> list[Command | HandOffCommand]:
        with self._changed:
            if timeout_s > 0 and not self._inbox and not self._is_stopping:
                self._changed.wait(timeout_s)
            commands = list(self._inbox)
            self._inbox.clear()
        return commands

    def _fail_all(self, cause: Exception) -> None:
        error = WorkerUnavailable(f"The worker's engine failed ({type(cause).__name__}); retry.")
        if isinstance(cause, GroupLost):
            error = cause
        try:
            self._engine.fail_all(error, self._clock.now())
            self._on_output(self._engine.collect(self._clock.now()), 0.0)
        except Exception:
            _logger.exception("The engine could not fail its requests; their streams will break.")
