"""Claims about the engine's thread: commands in, outputs out, idle sleep, crash."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

import pytest

from hocket.clock import SystemClock
from hocket.errors import HocketError
from hocket.execution.engine_thread import BeginDrain, CancelRequest, EngineThread, StepOutput
from hocket.rpc.status import failed_from_error
from hocket.types import Event, Load, RequestKey

A, B = RequestKey("a"), RequestKey("b")


class EchoEngine:
    """Fails every request it is told to cancel; raises on `BeginDrain`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.live = [A, B]
        self.steps = 0

    def take(self, command: object, now: float) -> None:
        match command:
            case CancelRequest(key):
                self.live.remove(key)
                self.events.append(failed_from_error(key, HocketError("cancelled")))
            case BeginDrain():
                raise ZeroDivisionError("a bug")
            case _:
                raise AssertionError(command)

    def step(self, now: float) -> StepOutput[str]:
        self.steps += 1
        return self.collect(now)

    def fail_all(self, error: HocketError, now: float) -> None:
        self.events += [failed_from_error(key, error) for key in self.live]

    def collect(self, now: float) -> StepOutput[str]:
        events, self.events = tuple(self.events), []
        return StepOutput(events, (), Load(steps=self.steps), wait_s=60.0, is_drained=False)


class Rig:
    def __init__(self) -> None:
        self.outputs: queue.Queue[StepOutput[str]] = queue.Queue()
        self.crashes: queue.Queue[Exception] = queue.Queue()
        self.thread: EngineThread[str, str] = EngineThread(
            EchoEngine(),
            SystemClock(),
            name="engine",
            on_output=lambda output, seconds: self.outputs.put(output),
            on_crash=self.crashes.put,
        )

    def next_event(self) -> Event:
        while not (events := self.outputs.get(timeout=5).events):
            pass
        return events[0]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.thread.start()
    yield rig
    assert rig.thread.stop(5)


def test_a_command_wakes_an_idle_engine_at_once(rig: Rig) -> None:
    rig.outputs.get(timeout=5)
    started = time.monotonic()
    rig.thread.post(CancelRequest(A))
    assert rig.next_event().key == A
    assert time.monotonic() - started < 0.4


def test_an_idle_engine_keeps_a_slow_pulse(rig: Rig) -> None:
    rig.outputs.get(timeout=5)
    before, cpu = rig.thread.num_turns, time.process_time()
    rig.outputs.get(timeout=5)
    rig.outputs.get(timeout=5)
    assert before < rig.thread.num_turns <= before + 3
    assert time.process_time() - cpu < 0.5


def test_an_unexpected_error_fails_every_request_and_ends_the_thread(rig: Rig) -> None:
    rig.thread.post(BeginDrain())
    assert isinstance(rig.crashes.get(timeout=5), ZeroDivisionError)
    failed: list[Event] = []
    while not rig.outputs.empty():
        failed += rig.outputs.get().events
    assert {(event.key, getattr(event, "reason", "")) for event in failed} == {
        (A, "WORKER_UNAVAILABLE"),
        (B, "WORKER_UNAVAILABLE"),
    }
    rig.thread.stop(5)
    assert not rig.thread.is_alive
