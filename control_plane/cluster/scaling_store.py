"""Where operators and the scaling loop meet: sizes asked for, and the state of both pools.

`hocket scale` writes sizes here, whether the autoscaler runs or not; the loop in the launcher
(`control_plane.cluster.scaling_loop`) reads them, acts, and publishes what became of it, which
`hocket status` shows. Sizes stay until they are given back or the autoscaler goes on from them, so
a launcher that is started again takes them up. Both live beside the worker registry, as soft state:
when the store loses them, the pools stay as they are and the next turn publishes again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

import redis

from hocket.clock import new_epoch
from hocket.config import RedisSettings
from hocket.types import Role


@dataclass(frozen=True, slots=True)
class AskedSize:
    """What an operator asked of one pool.

    size: workers; None gives the size back to the autoscaler.
    serial: differs from request to request, so that an equal one is seen as a new one.
    asked_unix_s: when.
    """

    size: int | None
    serial: int
    asked_unix_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Workers of one pool: asked for; serving; starting or loading; draining (not in `size`)."""

    size: int = 0
    ready: int = 0
    starting: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class ScalingStatus:
    """Both pools as the scaling loop saw them last.

    unix_s: when. is_autoscaled: whether sizes follow the load. reasons: of the newest decision,
    and what the pools wait for, a line each.
    """

    unix_s: float
    is_autoscaled: bool
    prefill: PoolStatus = field(default_factory=PoolStatus)
    decode: PoolStatus = field(default_factory=PoolStatus)
    reasons: tuple[str, ...] = ()


class ScalingStore:
    """Reads and writes both, synchronously. Every method but `close` may raise
    `redis.RedisError`."""

    def __init__(self, settings: RedisSettings) -> None:
        # The braces keep the keys on one node of a Redis cluster, as the registry's are.
        self._asked = f"{{{settings.prefix}}}:scaling:asked"
        self._status = f"{{{settings.prefix}}}:scaling:status"
        self._redis: Any = redis.Redis.from_url(
            settings.url, socket_timeout=2.0, socket_connect_timeout=2.0
        )

    def set_sizes(self, sizes: Mapping[Role, int | None]) -> None:
        """Asks for these sizes, all of them or none; a pool that is not named is left alone.

        None gives a pool back to the autoscaler. Sizes are not checked here: the loop moves one
        that is outside of the limits to the nearest one, and says so in its status.
        """
        assert sizes, "no size is given"
        serial, now = new_epoch(), time.time()
        asked = {role.value: AskedSize(size, serial, now) for role, size in sizes.items()}
        self._redis.hset(
            self._asked, mapping={name: json.dumps(asdict(one)) for name, one in asked.items()}
        )

    def sizes(self) -> dict[Role, AskedSize]:
        """What operators asked for last, of each pool that they asked anything of."""
        asked: dict[bytes, bytes] = self._redis.hgetall(self._asked)
        return {Role(n.decode()): AskedSize(**json.loads(text)) for n, text in asked.items()}

    def targets(self) -> dict[Role, int]:
        """Operators' sizes, of the pools that have one."""
        asked = self.sizes().items()
        return {role: one.size for role, one in asked if one.size is not None}

    def forget(self, role: Role) -> None:
        """Takes away what operators asked of a pool: it is over."""
        self._redis.hdel(self._asked, role.value)

    def publish(self, status: ScalingStatus) -> None:
        """Replaces the status."""
        self._redis.set(self._status, json.dumps(asdict(status), separators=(",", ":")))

    def status(self) -> ScalingStatus | None:
        """The newest status; None when no scaling loop has published any. Its age tells whether
        the loop still runs."""
        text = self._redis.get(self._status)
        return None if text is None else _status_from_json(text)

    def close(self) -> None:
        self._redis.close()


def _status_from_json(text: str | bytes) -> ScalingStatus:
    values = cast("dict[str, Any]", json.loads(text))
    return ScalingStatus(
        unix_s=values["unix_s"],
        is_autoscaled=values["is_autoscaled"],
        prefill=_pool_from(values["prefill"]),
        decode=_pool_from(values["decode"]),
        reasons=tuple(values["reasons"]),
    )


def _pool_from(values: Mapping[str, int]) -> PoolStatus:
    """Keys of a newer version are ignored."""
    known = {f.name for f in fields(PoolStatus)}
    return PoolStatus(**{name: number for name, number in values.items() if name in known})
