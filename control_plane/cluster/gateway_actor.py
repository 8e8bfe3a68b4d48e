"""What runs inside a gateway's Ray actor: the gateway on an event loop of its own thread.

Clients talk to the gateway's gRPC server, not to the actor; Ray carries starting, pulse and
stopping only, as for workers. The gateway finds its workers in the registry by itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from control_plane.cluster.directory import RedisWorkerDirectory
from control_plane.cluster.worker_actor import configure_logging
from control_plane.gateway import Gateway, GatewayOptions
from hocket.config import Config
from hocket.telemetry import MetricsPage

_Answer = TypeVar("_Answer")

# A call on the event loop that takes longer than this means that the loop hangs.
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Where a gateway listens. http is -1 when it has no HTTP door, metrics when it shows none."""

    grpc: int
    http: int
    metrics: int


def gateway_options(config: Config) -> GatewayOptions:
    """The gateway's options as the configuration has them."""
    return GatewayOptions(
        host=config.gateway.host,
        port=config.gateway.port,
        http_port=config.gateway.http_port,
        model=config.model.name,
        tokenizer_folder=config.model.checkpoint(),
        max_context_tokens=config.model.max_context_tokens,
        default_max_tokens=config.gateway.default_max_tokens,
        max_message_bytes=config.gateway.max_message_bytes,
        deadline_s=config.gateway.deadline_s,
    )


class _RunningGateway:
    """The gateway and its directory. All methods run on one event loop."""

    def __init__(self, config: Config) -> None:
        self._directory = RedisWorkerDirectory(config.redis)
        self._options = gateway_options(config)
        self._telemetry = config.telemetry
        self._page: MetricsPage | None = None

    async def start(self) -> GatewayPorts:
        """Listens; returns the ports."""
        self._follow = asyncio.create_task(self._directory.run())
        self._gateway = Gateway(self._options, self._directory)
        port = await self._gateway.start()
        telemetry = self._telemetry
        if telemetry.metrics_port >= 0:
            host = telemetry.metrics_host or self._options.host
            self._page = MetricsPage(self._gateway.metrics.registry, host, telemetry.metrics_port)
        metrics_port = self._page.port if self._page is not None else -1
        return GatewayPorts(port, self._gateway.http_port, metrics_port)

    async def is_following(self) -> bool:
        return not self._follow.done()

    async def is_routable(self, num_workers: int) -> bool:
        if len(self._directory.workers()) < num_workers:
            return False
        try:
            await self._gateway.wait_until_serving(_ANSWER_S / 5)
        except TimeoutError:
            return False
        return True

    async def stop(self, drain_s: float) -> None:
        await self._gateway.stop(drain_s)
        self._follow.cancel()
        await asyncio.gather(self._follow, return_exceptions=True)
        if self._page is not None:
            await asyncio.to_thread(self._page.close)


class GatewayActor:
    """One gateway in its own process. Ray calls its methods from several threads.

    It has no coroutine methods: a single one would make Ray run all of them on one event loop.
    """

    def __init__(self, config: Config) -> None:
        configure_logging(config.telemetry.log_level)
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

    def is_routable(self, num_workers: int) -> bool:
        """Whether `num_workers` are listed and a request would find a pair among them."""
        return self._wait(self._running.is_routable(num_workers), _ANSWER_S)

    def wait_until_closed(self) -> None:
        """Returns after `stop`; a caller that gets an error instead knows the process died."""
        self._closed.wait()

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
