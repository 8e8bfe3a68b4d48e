"""Fixtures of the scenarios: each runs on both transports."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hocket.model.transformer import Transformer
from tests.end_to_end.workers import conftest as engines
from tests.scenarios.hand_off_world import World
from tests.scenarios.nixl_process import send_elsewhere
from tests.scenarios.transfers import TRANSFERS, Transfer

# Both engines side by side, and what they should say.
checkpoint = engines.checkpoint
model = engines.model
reference = engines.reference
make_request = engines.make_request

_NIXL_MARKS = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"
    ),
]


NIXL_ONLY = pytest.param("nixl", marks=_NIXL_MARKS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    send_elsewhere(items, config)


@pytest.fixture(params=["memory", NIXL_ONLY])
def transfer(request: pytest.FixtureRequest) -> Transfer:
    return TRANSFERS[request.param]


@pytest.fixture
def world(transfer: Transfer) -> Iterator[World]:
    world = World(transfer)
    yield world
    world.close()


@pytest.fixture
def make_pair(model: Transformer, transfer: Transfer) -> Iterator[Callable[..., engines.Pair]]:
    """Builds a pair from the fields of `PairOptions`."""
    pairs: list[engines.Pair] = []

    def make(**options: Any) -> engines.Pair:
        pairs.append(engines.Pair(model, engines.PairOptions(transfer=transfer, **options)))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
