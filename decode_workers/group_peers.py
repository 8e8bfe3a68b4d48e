"""Wakes the other ranks of an expert-parallel group when this one has work again.

A group without work sleeps: its ranks wait for commands, not for each other. The rank that gets
a request first tells the others over gRPC which step it is about to enter, see
`hocket.parallel.lockstep`; to them it is one more command in the engine's inbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from hocket.errors import HocketError, InvalidRequest
from hocket.rpc import worker_pb2 as worker
from hocket.rpc import worker_pb2_grpc
from hocket.rpc.clients import WorkerClient
from hocket.rpc.status import abort

WAKE_TIMEOUT_S = 5.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Another rank is about to enter this step of the group."""

    step: int


class GroupPeers:
    """The other ranks, as far as waking goes. `wake` may be called from any thread."""

    def __init__(self, epoch: int, loop: asyncio.AbstractEventLoop) -> None:
        """`epoch` is the group's life."""
        self._epoch = epoch
        self._loop = loop
        self._addresses: tuple[str, ...] = ()
        self._clients: list[WorkerClient] = []
        self._calls: set[asyncio.Task[None]] = set()

    def meet(self, addresses: Sequence[str]) -> None:
        """The other ranks serve there; once, before the first step."""
        self._addresses = tuple(addresses)

    def wake(self, step: int) -> None:
        """Tells every other rank, without waiting."""
        self._loop.call_soon_threadsafe(self._wake, step)

    async def close(self) -> None:
        """Ends the calls that are out, and the channels."""
        for call in self._calls:
            call.cancel()
        for client in self._clients:
            await client.close()

    def _wake(self, step: int) -> None:
        if not self._clients:
            self._clients = [WorkerClient(address) for address in self._addresses]
        for client, address in zip(self._clients, self._addresses, strict=True):
            call = asyncio.create_task(self._call(client, address, step))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, client: WorkerClient, address: str, step: int) -> None:
        try:
            await client.wake(self._epoch, step, timeout_s=WAKE_TIMEOUT_S)
        except HocketError as error:
            # The step that waits for this rank ends the group when it does not come.
            _logger.warning("The rank at %s cannot be woken for step %d: %s", address, step, error)


class GroupService(worker_pb2_grpc.RankGroupServicer):
    """Passes wake-ups of other ranks on to the engine."""

    def __init__(self, epoch: int, post: Callable[[WakeUp], None]) -> None:
        self._epoch = epoch
        self._post = post

    async def Wake(  # noqa: N802
        self, request: worker.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker.WakeResponse:
        if request.epoch != self._epoch:
            limit = f"{self._epoch}: this rank belongs to another life of the group"
            await abort(context, InvalidRequest("epoch", request.epoch, limit))
        self._post(WakeUp(request.step))
        return worker.WakeResponse()
