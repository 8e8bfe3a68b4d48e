"""An operator's door over a gateway of the `serving` fixture, with the store in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from redis.exceptions import ConnectionError as RedisGone

from control_plane.admin import AdminOptions, AdminServer, ScalingView, SizeLimit
from control_plane.cluster.scaling_store import AskedSize, PoolStatus, ScalingStatus
from hocket.rpc.clients import ClusterClient
from hocket.telemetry import PoolMetrics
from hocket.types import Role

LIMITS = {
    Role.PREFILL: SizeLimit(1, 4, "Raise autoscaler.prefill.max_workers."),
    Role.DECODE: SizeLimit(1, 8, "Raise autoscaler.decode.max_workers."),
}


@dataclass
class MemoryBoard:
    """The store of sizes in memory; `is_away` makes every call fail as Redis does."""

    asked: dict[Role, AskedSize] = field(default_factory=dict)
    published: ScalingStatus | None = None
    is_away: bool = False
    serial: int = 0

    def set_sizes(self, sizes: Mapping[Role, int | None]) -> None:
        self._answer()
        self.serial += 1
        self.asked |= {r: AskedSize(n, self.serial, time.time()) for r, n in sizes.items()}

    def sizes(self) -> dict[Role, AskedSize]:
        self._answer()
        return dict(self.asked)

    def status(self) -> ScalingStatus | None:
        self._answer()
        return self.published

    def publish(self, prefill: PoolStatus, decode: PoolStatus, *reasons: str, **more: Any) -> None:
        fields = {"unix_s": time.time(), "is_autoscaled": True} | more
        self.published = ScalingStatus(prefill=prefill, decode=decode, reasons=reasons, **fields)

    def _answer(self) -> None:
        if self.is_away:
            raise RedisGone("Connection refused")


@dataclass
class OpenDoor:
    address: str
    client: ClusterClient
    board: MemoryBoard
    view: ScalingView
    registry: CollectorRegistry


@asynccontextmanager
async def operator_door(gateway: Any) -> AsyncIterator[OpenDoor]:
    """The door is open, and the store has been read once."""
    board, registry = MemoryBoard(), gateway.metrics.registry
    view = ScalingView(board, PoolMetrics(registry), every_s=0.02)
    options = AdminOptions("127.0.0.1", 0, "fox", gateway.options.gateway_id, LIMITS)
    server = AdminServer(options, view, gateway.snapshots, gateway.metrics.figures)
    address = f"127.0.0.1:{await server.start()}"
    client = ClusterClient(address)
    await view.refresh()
    try:
        yield OpenDoor(address, client, board, view, registry)
    finally:
        await client.close()
        await server.stop()
