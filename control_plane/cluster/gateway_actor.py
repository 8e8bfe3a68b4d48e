"""What runs inside a gateway's Ray actor: the gateway on an event loop of its own thread.

Clients talk to the gateway's gRPC server, not to the actor; Ray carries starting, pulse and
stopping only, as for workers. The gateway finds its workers in the registry by itself. Beside it
stands the operator's door, `control_plane.admin`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from control_plane.admin import AdminOptions, AdminServer, ScalingView, SizeLimit
from control_plane.autoscaler.windows import GatewayCounts
from control_plane.cluster.directory import RedisWorkerDirectory
from control_plane.cluster.scaling_policy import (
    limits_of,
    most_workers,
    pool_settings,
    scale_settings,
)
from control_plane.cluster.scaling_store import ScalingStore
from control_plane.gateway import Gateway, GatewayOptions
from hocket.config import Config
from hocket.logs import configure_logging
from hocket.telemetry import MetricsPage, PoolMetrics
from hocket.types import Role

_Answer = TypeVar("_Answer")

# A call on the event loop that takes longer than this means that the loop hangs.
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Where a gateway listens. http is -1 when it has no HTTP door, metrics when it shows none,
    admin when it has no operator's door."""

    grpc: int
    http: int
    metrics: int
    admin: int


def gateway_options(config: Config) -> GatewayOptions:
    """The gateway's options as the configuration has them."""
    return GatewayOptions(
        host=config.gateway.host,
        port=config.gateway.port,
        http_port=config.gateway.http_port,
        is_aggregated=config.prefill.workers == 0,
        model=config.model.name,
        tokenizer_folder=config.model.checkpoint(),
        max_context_tokens=config.model.max_context_tokens,
        default_max_tokens=config.gateway.default_max_tokens,
        max_message_bytes=config.gateway.max_message_bytes,
        deadline_s=config.gateway.deadline_s,
    )


def size_limits(config: Config) -> dict[Role, SizeLimit]:
    """How many workers an operator may ask of each pool; aggregated serving has no prefill pool."""
    limits = limits_of(config)
    return {
        role: SizeLimit(pool.min_workers, pool.max_workers, _way_out(config, role))
        for role, pool in ((Role.PREFILL, limits.prefill), (Role.DECODE, limits.decode))
        if pool_settings(config, role).workers
    }


def _way_out(config: Config, role: Role) -> str:
    """What to change for a larger pool."""
    scale, key = scale_settings(config, role), f"autoscaler.{role.value}.max_workers"
    if scale.max_workers > most_workers(config, role):
        return "A local Ray has no room for more; join a cluster with cluster.ray_address."
    return f"{key} is the limit: start `hocket up` with a higher one."


class _RunningGateway:
    """The gateway, its directory and the operator's door. All methods run on one event loop."""

    def __init__(self, config: Config) -> None:
        self._directory = RedisWorkerDirectory(config.redis)
        self._options = gateway_options(config)
        self._config = config
        self._page: MetricsPage | None = None
        self._admin: AdminServer | None = None

    async def start(self) -> GatewayPorts:
        """Listens; returns the ports."""
        self._follow = asyncio.create_task(self._directory.run())
        self._gateway = Gateway(self._options, self._directory)
        port = await self._gateway.start()
        admin_port = await self._start_admin()
        telemetry = self._config.telemetry
        if telemetry.metrics_port >= 0:
            host = telemetry.metrics_host or self._options.host
            self._page = MetricsPage(self._gateway.metrics.registry, host, telemetry.metrics_port)
        metrics_port = self._page.port if self._page is not None else -1
        return GatewayPorts(port, self._gateway.http_port, metrics_port, admin_port)

    async def _start_admin(self) -> int:
        """Follows the pools' sizes and opens the operator's door; its port, -1 if it is closed."""
        config, gateway = self._config, self._gateway
        self._store = ScalingStore(config.redis)
        metrics = PoolMetrics(gateway.metrics.registry)
        view = ScalingView(self._store, metrics, config.redis.renew_s)
        self._follow_sizes = asyncio.create_task(view.run())
        if config.gateway.admin_port < 0:
            return -1
        options = AdminOptions(
            host=config.gateway.admin_host,
            port=config.gateway.admin_port,
            model=config.model.name,
            gateway_id=gateway.options.gateway_id,
            limits=size_limits(config),
        )
        self._admin = AdminServer(options, view, gateway.snapshots, gateway.metrics.figures)
        return await self._admin.start()

    async def is_following(self) -> bool:
        return not self._follow.done()

    async def unroutable(self, num_workers: int) -> str:
        listed = len(self._directory.workers())
        if listed < num_workers:
            return f"{listed} of {num_workers} workers are listed"
        unready = [f"{name} {why}" for name, why in sorted(self._gateway.unready().items())]
        if unready:
            return "; ".join(unready)
        try:
            await self._gateway.wait_until_serving(_ANSWER_S / 5)
        except TimeoutError:
            return "no request would find its workers"
        return ""

    def counts(self) -> GatewayCounts:
        """What it has counted, for the autoscaler; from any thread."""
        figures = self._gateway.metrics.figures()
        return GatewayCounts(
            life=self._options.gateway_id,
            requests=figures.arrived_requests,
            prompt_tokens=figures.arrived_prompt_tokens,
            first_tokens=figures.first_token.count,
            first_token_s=figures.first_token.sum_s,
            later_tokens=figures.inter_token.count,
            later_token_s=figures.inter_token.sum_s,
            ended_requests=figures.requests_by_outcome.get("OK", 0),
            output_tokens=figures.finished_output_tokens,
            cached_tokens=figures.cached_tokens,
        )

    async def stop(self, drain_s: float) -> None:
        await self._gateway.stop(drain_s)
        if self._admin is not None:
            await self._admin.stop()
        followers = (self._follow, self._follow_sizes)
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        self._store.close()
        if self._page is not None:
            await asyncio.to_thread(self._page.close)


class GatewayActor:
    """One gateway in its own process. Ray calls its methods from several threads.

    It has no coroutine methods: a single one would make Ray run all of them on one event loop.
    """

    def __init__(self, config: Config) -> None:
        telemetry = config.telemetry
        configure_logging(telemetry.log_level, "gateway", folder=telemetry.log_folder)
        self._running = _RunningGateway(config)
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gateway", daemon=True).start()

    def start(self) -> GatewayPorts:
        """Listens; returns the ports."""
        return self._wait(self._running.start())

    def pulse(self) -> bool:
        """Whether the event loop turns and the registry is followed."""
        return self._wait(self._running.is_following(), _ANSWER_S)

    def unroutable(self, num_workers: int) -> str:
        """Why it cannot be said that `num_workers` are listed, that canaries have passed all of
        them, and that a request would find its workers; "" when it can."""
        return self._wait(self._running.unroutable(num_workers), _ANSWER_S)

    def wait_until_closed(self) -> None:
        """Returns after `stop`; a caller that gets an error instead knows the process died."""
        self._closed.wait()

    def counts(self) -> GatewayCounts:
        """What the gateway has counted since its start."""
        return self._running.counts()

    def process_id(self) -> int:
        return os.getpid()

    def stop(self, drain_s: float) -> None:
        """Takes no new calls, gives running ones `drain_s` to end, then ends everything."""
        self._wait(self._running.stop(drain_s))
        self._closed.set()

    def _wait(
        self, awaited: Coroutine[Any, Any, _Answer], timeout_s: float | None = None
    ) -> _Answer:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(timeout_s)
