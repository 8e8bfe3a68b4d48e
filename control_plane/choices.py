"""Several completions of one prompt as one stream: each is a run of its own, all end together.

`request_flow` serves each choice as a coroutine; here they run side by side, and their messages go
to the client one at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from control_plane.request_log import RequestRecord
from hocket.rpc import generation_pb2 as generation

Send = Callable[[generation.GenerateResponse], Awaitable[None]]
"""Passes a message on to the client; waits while the client is slow."""


class OneStream:
    """The messages of all choices, one after the other. One per request.

    Only the request's own task writes: a choice that is ended because another one failed must not
    leave a message half written, after which gRPC would take no status either.
    """

    def __init__(self, send: Send, num_choices: int, record: RequestRecord) -> None:
        self._send = send
        self._num_choices = self._num_open = num_choices
        self._record = record
        self._waiting: deque[tuple[generation.GenerateResponse, asyncio.Future[None]]] = deque()
        self._news = asyncio.Event()

    async def send(self, response: generation.GenerateResponse) -> None:
        """For the choices: returns when the message has been passed on."""
        if self._num_choices == 1:
            return await self._pass_on(response)
        passed_on = asyncio.get_running_loop().create_future()
        self._waiting.append((response, passed_on))
        self._news.set()
        await passed_on

    async def serve(self, choices: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Runs the choices to their ends. The first error ends the others too and is raised."""
        if self._num_choices == 1:
            return await choices[0]
        tasks = [asyncio.create_task(choice) for choice in choices]
        for task in tasks:
            task.add_done_callback(lambda _: self._news.set())
        try:
            while self._waiting or not all(task.done() for task in tasks):
                self._news.clear()
                if self._waiting:
                    response, passed_on = self._waiting.popleft()
                    await self._pass_on(response)
                    passed_on.set_result(None)
                else:
                    await self._news.wait()
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, response: generation.GenerateResponse) -> None:
        self._num_open -= response.HasField("finish")
        self._record.is_answered = not self._num_open
        await self._send(response)
