"""Channels and thin clients: `GenerationClient` for the gateway, `WorkerClient` for a worker,
`ClusterClient` for the operator's door.

All raise `HocketError`s. Start here to talk to a running Hocket from Python; `hocket generate`
and the tests do. A worker's Session is not driven by hand but by
`hocket.rpc.session_client.SessionClient`, its Export by the decode worker's server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc import generation_pb2 as generation
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.cluster_pb2_grpc import ClusterStub
from hocket.rpc.convert import description_from_message
from hocket.rpc.generation_pb2_grpc import GenerationStub
from hocket.rpc.status import error_from_rpc
from hocket.rpc.worker_pb2_grpc import RankGroupStub, WorkerStub
from hocket.types import WorkerDescription

PUBLIC_MESSAGE_BYTES = 4 << 20
INTERNAL_MESSAGE_BYTES = 64 << 20
KEEPALIVE_S = 10
KEEPALIVE_TIMEOUT_S = 5

_Answer = TypeVar("_Answer")


def message_size_options(message_bytes: int) -> list[tuple[str, Any]]:
    """Limits of one message, both ways."""
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
    ]


def channel_options(message_bytes: int = INTERNAL_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """For channels: a peer that is gone is noticed within KEEPALIVE_S + KEEPALIVE_TIMEOUT_S also
    when nothing is sent; one that comes back is found within a second."""
    return [
        *message_size_options(message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        # gRPC pings also to measure the line, with a minute's patience, and no other ping is sent
        # as long as one is out.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the least time that one attempt to connect gets; a refused one is tried again sooner.
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def server_options(message_bytes: int = INTERNAL_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """For servers: the same limits, pings as often as `channel_options` sends them, and no port
    shared with another process by accident."""
    return [
        *message_size_options(message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        # gRPC pings also to measure the line, with a minute's patience, and no other ping is sent
        # as long as one is out.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_S * 500),
        ("grpc.so_reuseport", 0),
    ]


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    message_bytes: int = INTERNAL_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to `host:port`; plain text without credentials. Connects at the first call."""
    options = channel_options(message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


class GenerationClient:
    """The public service of a gateway at `host:port`."""

    def __init__(
        self,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        message_bytes: int = INTERNAL_MESSAGE_BYTES,
    ) -> None:
        self._channel = open_channel(address, credentials, message_bytes)
        self._stub: Any = GenerationStub(self._channel)

    async def generate(
        self, request: generation.GenerateRequest, *, timeout_s: float | None = None
    ) -> AsyncIterator[generation.GenerateResponse]:
        """The answer as it is made; the last message has `finish`. Raises `HocketError`.

        Leaving the loop early cancels the request once the iterator is closed (`aclose`).
        """
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as rpc_error:
            raise error_from_rpc(rpc_error) from rpc_error
        finally:
            call.cancel()

    async def tokenize(self, request: generation.TokenizeRequest) -> list[int]:
        """The token ids that generate would see. Raises `HocketError`."""
        answer: generation.TokenizeResponse = await _answer(self._stub.Tokenize(request))
        return list(answer.token_ids)

    async def get_model(self, name: str = "") -> generation.Model:
        """What is served, and its limits. Raises `HocketError`."""
        return await _answer(self._stub.GetModel(generation.GetModelRequest(model=name)))

    async def close(self) -> None:
        """Ends the channel and the calls on it."""
        await self._channel.close()


class ClusterClient:
    """The operator's service of a gateway, at its `admin` address `host:port`."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub: Any = ClusterStub(self._channel)

    async def get_status(self, *, timeout_s: float = 5.0) -> cluster.ClusterStatus:
        """What the gateway knows. Raises `HocketError`; `WorkerUnavailable` when nobody answers."""
        return await _answer(self._stub.GetStatus(cluster.GetStatusRequest(), timeout=timeout_s))

    async def scale(
        self, request: cluster.ScaleRequest, *, timeout_s: float = 10.0
    ) -> cluster.ScaleResponse:
        """Asks for pool sizes; returns when they are written. Raises `HocketError`."""
        return await _answer(self._stub.Scale(request, timeout=timeout_s))

    async def close(self) -> None:
        """Ends the channel and the calls on it."""
        await self._channel.close()


class WorkerClient:
    """The internal service of a worker at `host:port`."""

    def __init__(self, address: str, *, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = open_channel(address, credentials)
        self._stub: Any = WorkerStub(self._channel)
        self._group_stub: Any = RankGroupStub(self._channel)

    async def describe(self, *, timeout_s: float = 5.0) -> WorkerDescription:
        """Who the worker is. Raises `HocketError`; `WorkerUnavailable` when nobody answers."""
        request = worker.DescribeRequest()
        return description_from_message(
            await _answer(self._stub.Describe(request, timeout=timeout_s))
        )

    async def drain(self, deadline_s: float) -> int:
        """Waits until the worker is drained; how many requests had to be failed at the deadline."""
        request = worker.DrainRequest(deadline_ms=round(deadline_s * 1000))
        answer: worker.DrainResponse = await _answer(self._stub.Drain(request))
        return answer.failed_requests

    def session(self) -> Any:
        """A new Session call: `write` SessionCommands, `read` SessionEvents."""
        return self._stub.Session()

    def export(self) -> Any:
        """A new Export call: `write` ExportUpdates, `read` ExportEvents."""
        return self._stub.Export()

    async def wake(self, epoch: int, step: int, *, timeout_s: float) -> None:
        """Tells a rank of one's own expert-parallel group that `step` begins. Raises
        `HocketError`."""
        request = worker.WakeRequest(epoch=epoch, step=step)
        await _answer(self._group_stub.Wake(request, timeout=timeout_s))

    async def close(self) -> None:
        """Ends the channel and the calls on it."""
        await self._channel.close()


async def _answer(call: grpc.aio.UnaryUnaryCall[Any, _Answer]) -> _Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as rpc_error:
        raise error_from_rpc(rpc_error) from rpc_error
