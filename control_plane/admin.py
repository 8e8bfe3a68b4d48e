"""The operator's door of a gateway: the service `hocket.v1.Cluster`, on a listener of its own.

`hocket status` and `hocket scale` come in here. It tells what the gateway knows and what whoever
runs the pools has published in the store; it writes operators' sizes into the store and acts on
nothing itself. `ScalingView` reads the store in the background, so that neither a status nor a
request ever waits for Redis. Next: `control_plane.cluster_status` builds the answer.
"""

# gRPC's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import grpc
from grpc_reflection.v1alpha import reflection
from redis.exceptions import RedisError

from control_plane.cluster.scaling_store import AskedSize, ScalingStatus
from control_plane.cluster_status import (
    Scaling,
    gateway_status,
    pools_status,
    targets_message,
    workers_status,
)
from control_plane.router.snapshot import WorkerSnapshot
from hocket.errors import (
    ConfigError,
    InvalidRequest,
    StoreUnavailable,
)
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.clients import PUBLIC_MESSAGE_BYTES, server_options
from hocket.rpc.cluster_pb2_grpc import ClusterServicer, add_ClusterServicer_to_server
from hocket.rpc.status import answered
from hocket.telemetry import GatewayFigures, PoolMetrics
from hocket.types import Role

logger = logging.getLogger(__name__)

SERVICE = cluster.DESCRIPTOR.services_by_name["Cluster"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class ScalingBoard(Protocol):
    """The store of sizes, synchronous. Every method may raise `RedisError` or `OSError`."""

    def set_sizes(self, sizes: Mapping[Role, int | None]) -> None:
        """Writes what an operator asks for; None gives the pool back to the autoscaler."""
        ...

    def sizes(self) -> Mapping[Role, AskedSize]:
        """What operators asked for last, of each pool that they asked anything of."""
        ...

    def status(self) -> ScalingStatus | None:
        """What whoever runs the pools published last."""
        ...


class ScalingView:
    """The store's contents as they were read last, kept by `run` on the gateway's event loop."""

    def __init__(self, board: ScalingBoard, metrics: PoolMetrics, every_s: float) -> None:
        self._board = board
        self._metrics = metrics
        self._every_s = every_s
        self.scaling = Scaling(fault="the store was not read yet")

    async def run(self) -> None:
        """Reads until cancelled. The store being away is shown, not raised."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._every_s)

    async def refresh(self) -> None:
        """Reads once."""
        try:
            self.scaling = await asyncio.to_thread(self._read)
        except (RedisError, OSError) as error:
            self._lose(f"the store is away: {error}")
        except (ValueError, KeyError, TypeError) as error:
            self._lose(f"another version has written what the store holds: {error!r}")
        self._show()

    async def set_sizes(self, sizes: Mapping[Role, int | None]) -> Mapping[Role, AskedSize]:
        """Writes operators' sizes; returns all that are written then. Raises StoreUnavailable."""
        try:
            await asyncio.to_thread(self._board.set_sizes, sizes)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(
                f"the store of sizes is away ({error}); it may have them or not: ask again."
            ) from error
        await self.refresh()
        if self.scaling.fault:
            raise StoreUnavailable(f"{self.scaling.fault}; the sizes were written before.")
        return self.scaling.asked

    def _lose(self, fault: str) -> None:
        """What the store said before may be long past: that nothing is known is the answer."""
        if fault != self.scaling.fault:
            logger.warning("pool sizes are not known: %s", fault)
        self.scaling = Scaling(fault=fault)

    def _read(self) -> Scaling:
        return Scaling(self._board.status(), self._board.sizes())

    def _show(self) -> None:
        self._metrics.clear()
        scaling = self.scaling
        if scaling.status is not None:
            pools = (("prefill", scaling.status.prefill), ("decode", scaling.status.decode))
            for pool, status in pools:
                self._metrics.observe_pool(pool, asdict(status))
            self._metrics.is_autoscaled.set(scaling.status.is_autoscaled)
            self._metrics.published.set(scaling.status.unix_s)
        for role, asked in scaling.asked.items():
            if asked.size is not None:
                self._metrics.operator_workers.labels(role.value).set(asked.size)


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """How many workers a pool may be asked to have, and what to change to get more."""

    least: int
    most: int
    way_out: str


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """host, port: where to listen; port 0 takes a free one. limits: of the size of each pool that
    there is."""

    host: str
    port: int
    model: str
    gateway_id: str
    limits: Mapping[Role, SizeLimit]


class AdminServer:
    """The listener. `start`, then `stop`; both on the gateway's event loop."""

    def __init__(
        self,
        options: AdminOptions,
        view: ScalingView,
        snapshots: Callable[[], list[WorkerSnapshot]],
        figures: Callable[[], GatewayFigures],
    ) -> None:
        """`snapshots` and `figures` are the gateway's, as of the call."""
        self._options = options
        self._service = _ClusterService(options, view, snapshots, figures)

    async def start(self) -> int:
        """Listens; returns the port. Raises ConfigError when the address cannot be bound."""
        options = self._options
        self._server = grpc.aio.server(options=server_options(PUBLIC_MESSAGE_BYTES))
        add_ClusterServicer_to_server(self._service, self._server)
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), self._server)
        try:
            port = self._server.add_insecure_port(f"{options.host}:{options.port}")
        except RuntimeError as error:
            await self._server.stop(None)
            raise ConfigError(
                f"gateway.admin_host and gateway.admin_port: {options.host}:{options.port} cannot "
                "be bound; is another gateway running? Port 0 takes a free one, -1 closes the "
                "operator's door.",
                field="gateway.admin_port",
            ) from error
        await self._server.start()
        return port

    async def stop(self) -> None:
        """Ends it at once: no call here lasts."""
        await self._server.stop(None)


def checked_sizes(
    request: cluster.ScaleRequest, limits: Mapping[Role, SizeLimit]
) -> dict[Role, int | None]:
    """The sizes asked for; None for "auto". Raises InvalidRequest."""
    sizes: dict[Role, int | None] = {}
    for role in Role:
        if request.HasField(role.value):
            size = getattr(request, role.value)
            if role not in limits:
                way_out = f"`hocket up` was started with {role.value}.workers = 0."
                asked = "auto" if size.WhichOneof("size") == "auto" else size.workers
                raise InvalidRequest(role.value, asked, "left out: there is no such pool", way_out)
            sizes[role] = _checked_size(role, size, limits[role])
    if not sizes:
        raise InvalidRequest("sizes", None, "prefill=N, decode=N or both; N may be auto")
    return sizes


def _checked_size(role: Role, size: cluster.PoolSize, limit: SizeLimit) -> int | None:
    kind = size.WhichOneof("size")
    if kind == "auto" and size.auto:
        return None
    workers = size.workers if kind == "workers" else None
    if workers is None or not limit.least <= workers <= limit.most:
        way_out = limit.way_out if (workers or 0) > limit.most else ""
        span = f"from {limit.least} to {limit.most}, or auto"
        raise InvalidRequest(role.value, workers, span, way_out)
    return workers


class _ClusterService(ClusterServicer):
    """Translates: gRPC in, gRPC out, every HocketError into a status."""

    def __init__(
        self,
        options: AdminOptions,
        view: ScalingView,
        snapshots: Callable[[], list[WorkerSnapshot]],
        figures: Callable[[], GatewayFigures],
    ) -> None:
        self._options = options
        self._view = view
        self._snapshots = snapshots
        self._figures = figures
        self._started_s = time.monotonic()

    async def GetStatus(  # noqa: N802
        self, request: cluster.GetStatusRequest, context: _Context
    ) -> cluster.ClusterStatus:
        async def status() -> cluster.ClusterStatus:
            return self._status()

        return await answered(context, status)

    async def Scale(  # noqa: N802
        self, request: cluster.ScaleRequest, context: _Context
    ) -> cluster.ScaleResponse:
        async def scale() -> cluster.ScaleResponse:
            sizes = checked_sizes(request, self._options.limits)
            self._check_auto(sizes)
            written = await self._view.set_sizes(sizes)
            asked = {role.value: "auto" if n is None else n for role, n in sizes.items()}
            logger.info("an operator asked for sizes", extra={"sizes": asked})
            message = targets_message(written, unix_s=time.time())
            return cluster.ScaleResponse(targets=message)

        return await answered(context, scale)

    def _check_auto(self, sizes: Mapping[Role, int | None]) -> None:
        """Raises InvalidRequest when a pool is to be given to an autoscaler that is off."""
        pools = self._view.scaling.status
        given = [role for role, size in sizes.items() if size is None]
        if given and pools is not None and not pools.is_autoscaled:
            way_out = "Set autoscaler.enabled and start `hocket up` again to have one."
            limit = "a number: no autoscaler runs"
            raise InvalidRequest(given[0].value, "auto", limit, way_out)

    def _status(self) -> cluster.ClusterStatus:
        scaling, options = self._view.scaling, self._options
        pools, unix_s = scaling.status, time.time()
        return cluster.ClusterStatus(
            model=options.model,
            gateway=gateway_status(
                self._figures(),
                gateway_id=options.gateway_id,
                uptime_s=time.monotonic() - self._started_s,
            ),
            workers=workers_status(self._snapshots()),
            pools=pools_status(pools, unix_s=unix_s) if pools is not None else None,
            targets=targets_message(scaling.asked, unix_s=unix_s),
            store_fault=scaling.fault,
        )
