"""The gateway's view of the registry: a list of workers that outlives Redis.

`RedisWorkerDirectory.run` re-reads the registry whenever a worker enters or leaves (pub/sub), and
every `renew_s` at least. While Redis is away, or has just come back without its contents, the
last known list stays: a worker is dropped only after a whole lease in which the registry could be
read and did not name it. Whether a worker on the list answers is the router's to find out.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from control_plane.cluster.registry import Keys, descriptions
from hocket.config import RedisSettings
from hocket.types import WorkerDescription

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownWorkers:
    """What the gateway believes, as a value: `after_read` and `after_outage` give the next one.

    `store_life` names the contents of the store; another name means that it lost them.
    `forgiving_until` is the time until which a worker that is not named is kept all the same.
    """

    workers: Mapping[str, WorkerDescription] = field(default_factory=dict[str, WorkerDescription])
    store_life: str = ""
    forgiving_until: float = 0.0
    is_away: bool = False

    def after_outage(self) -> KnownWorkers:
        """The store could not be read."""
        return KnownWorkers(self.workers, self.store_life, self.forgiving_until, is_away=True)

    def after_read(
        self, named: Iterable[WorkerDescription], store_life: str, *, now: float, lease_s: float
    ) -> KnownWorkers:
        """The store was read at `now` and named these workers."""
        has_lost = bool(self.store_life) and store_life != self.store_life
        forgiving_until = self.forgiving_until
        if self.is_away or has_lost:
            forgiving_until = now + lease_s
        workers = {worker.worker_id: worker for worker in named}
        if now < forgiving_until:
            workers = {**self.workers, **workers}
        return KnownWorkers(workers, store_life, forgiving_until)


class RedisWorkerDirectory:
    """Implements the gateway's `WorkerDirectory` over the registry in Redis."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._keys = Keys(settings.prefix)
        self._known = KnownWorkers()
        self._watchers: list[Callable[[], None]] = []

    def workers(self) -> list[WorkerDescription]:
        """All workers believed to serve, by worker id; never blocks."""
        return [worker for _, worker in sorted(self._known.workers.items())]

    def watch(self, changed: Callable[[], None]) -> None:
        """Calls `changed` on the event loop after every read that altered who is listed."""
        self._watchers.append(changed)

    async def run(self) -> None:
        """Keeps the list fresh until cancelled. Redis being away is logged, not raised."""
        while True:
            client: Any = redis.asyncio.Redis.from_url(
                self._settings.url, socket_timeout=2.0, socket_connect_timeout=2.0
            )
            try:
                await self._follow(client)
            except (RedisError, OSError) as error:
                if not self._known.is_away:
                    _log.warning("registry is away, going on with the last list: %s", error)
                self._known = self._known.after_outage()
            finally:
                await client.aclose()
            await asyncio.sleep(self._settings.renew_s / 2)

    async def _follow(self, client: Any) -> None:
        """Reads the list now and after every change, until Redis fails."""
        async with client.pubsub(ignore_subscribe_messages=True) as changes:
            await changes.subscribe(self._keys.changes)
            while True:
                await self._read(client)
                _honour_cancellation()
                await changes.get_message(timeout=self._settings.renew_s)
                _honour_cancellation()

    async def _read(self, client: Any) -> None:
        # The first reader names the contents; a store that comes back empty has lost the name.
        await client.set(self._keys.store_life, uuid.uuid4().hex, nx=True)
        store_life = (await client.get(self._keys.store_life) or b"").decode()
        names = sorted(name.decode() for name in await client.smembers(self._keys.index))
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(self._keys.entry(name))
        entries = await pipeline.execute()
        expired = [name for name, entry in zip(names, entries, strict=True) if not entry]
        if expired:
            # A worker that renews meanwhile enters itself again.
            await client.srem(self._keys.index, *expired)

        before = _news(self._known)
        self._known = self._known.after_read(
            descriptions(entries),
            store_life,
            now=asyncio.get_running_loop().time(),
            lease_s=self._settings.lease_s,
        )
        if _news(self._known) != before:
            for changed in self._watchers:
                changed()


def _honour_cancellation() -> None:
    """Ends the task if it was cancelled: `asyncio.wait_for`, with which the client sends, returns
    as if nothing had happened when it is done at that very moment (Python 3.11)."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _news(known: KnownWorkers) -> set[tuple[str, int, bool, str]]:
    """Of which watchers are told; the load, which always changes, comes by the Sessions."""
    return {(w.worker_id, w.epoch, w.is_draining, w.transport) for w in known.workers.values()}
