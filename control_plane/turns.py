"""When requests may write to their clients: at once, unless writing takes more than half the time.

A token that came in on a Session wakes its request, which sends a message. When messages cost more
time than there is, Sessions would be read too late and everything would fall behind. So requests
are woken together, in turns, and after a long turn the next one waits as long as the turn took:
meanwhile Sessions are read, and what comes goes into fewer, longer messages. A gateway with little
to do never waits. `control_plane.legs` asks for turns.
"""

from __future__ import annotations

import asyncio

# A shorter pause than this is none: the event loop's timers are no finer.
SHORTEST_PAUSE_S = 0.001


class Turns:
    """The turns of one gateway, on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []
        self._is_set = False
        self._free_s = 0.0

    def wake(self, waiter: asyncio.Future[None]) -> None:
        """Sets the waiter's result in the next turn."""
        self._waiting.append(waiter)
        if not self._is_set:
            self._set()

    def _set(self) -> None:
        self._is_set = True
        if self._free_s - self._loop.time() < SHORTEST_PAUSE_S:
            self._loop.call_soon(self._run)
        else:
            self._loop.call_at(self._free_s, self._run)

    def _run(self) -> None:
        began_s = self._loop.time()
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        # Callbacks run in the order in which they were set: after all that were woken.
        self._loop.call_soon(self._end, began_s)

    def _end(self, began_s: float) -> None:
        ended_s = self._loop.time()
        self._free_s = ended_s + (ended_s - began_s)
        self._is_set = False
        if self._waiting:
            self._set()
