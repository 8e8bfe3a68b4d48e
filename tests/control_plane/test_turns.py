"""Requests write in turns, and a long turn is followed by as long a pause. The clock is ours."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from control_plane.turns import SHORTEST_PAUSE_S, Turns


class ManualLoop:
    """An event loop as far as `Turns` and its futures need one; `run` empties the ready queue."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.ready: deque[Callable[[], None]] = deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> None:
        self.ready.append(lambda: callback(*arguments))

    def call_at(self, when_s: float, callback: Any, *arguments: Any) -> None:
        self.timers.append((when_s, lambda: callback(*arguments)))

    def get_debug(self) -> bool:
        return False

    def run(self) -> None:
        due = [timer for timer in self.timers if timer[0] <= self.now_s]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_s]
        self.ready.extend(callback for _, callback in due)
        while self.ready:
            self.ready.popleft()()


class Writers:
    """Requests that are woken, and then write for a while."""

    def __init__(self, loop: ManualLoop, turns: Turns, write_s: float) -> None:
        self.loop, self.turns, self.write_s = loop, turns, write_s
        self.written: list[str] = []

    def wake(self, name: str) -> asyncio.Future[None]:
        loop: Any = self.loop
        waiter: asyncio.Future[None] = asyncio.Future(loop=loop)
        waiter.add_done_callback(lambda _: self.write(name))
        self.turns.wake(waiter)
        return waiter

    def write(self, name: str) -> None:
        self.written.append(name)
        self.loop.now_s += self.write_s


def begin(write_s: float) -> tuple[ManualLoop, Writers]:
    loop: Any = ManualLoop()
    return loop, Writers(loop, Turns(loop), write_s)


def test_an_idle_gateway_wakes_at_once_and_again_at_once_after_a_short_turn() -> None:
    loop, writers = begin(write_s=SHORTEST_PAUSE_S / 4)
    for name in "abc":
        writers.wake(name)
        loop.run()
        assert writers.written[-1] == name
    assert loop.timers == []


def test_after_a_long_turn_the_next_waits_as_long_as_it_took() -> None:
    loop, writers = begin(write_s=0.004)
    for name in "abc":
        writers.wake(name)
    loop.run()
    assert writers.written == ["a", "b", "c"]
    ended_s = loop.now_s
    writers.wake("d")
    writers.wake("e")
    loop.run()
    assert writers.written == ["a", "b", "c"]
    (timer,) = loop.timers
    assert abs(timer[0] - (ended_s + 0.012)) < 1e-9
    loop.now_s = timer[0]
    loop.run()
    assert writers.written == ["a", "b", "c", "d", "e"]


def test_who_is_woken_during_a_turn_gets_the_next_one() -> None:
    loop, writers = begin(write_s=0.004)
    writers.wake("a").add_done_callback(lambda _: writers.wake("later"))
    loop.run()
    assert writers.written == ["a"]
    loop.now_s = loop.timers[0][0]
    loop.run()
    assert writers.written == ["a", "later"]


def test_a_request_that_left_meanwhile_is_passed_over() -> None:
    loop, writers = begin(write_s=0.0)
    writers.wake("gone").cancel()
    writers.wake("there")
    loop.run()
    assert writers.written[-1] == "there"
