"""What cannot work is refused before anything is started, naming the key."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cluster.cluster import Cluster
from hocket.config import EMBEDDED_MODEL, ModelSettings, load_config
from hocket.errors import CheckpointError, ConfigError

FREE_PORTS = ("gateway.port=0", "gateway.http_port=0", "gateway.admin_port=0")


def start(*overrides: str) -> None:
    """Must raise; whatever else it does would take longer than the test may."""
    told: list[str] = []
    cluster = Cluster(load_config(None, [*FREE_PORTS, *overrides]), told.append)
    try:
        cluster.start()
    finally:
        cluster.stop()
        assert told == [], "something was started"


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("decode.workers=4096", r"prefill\.workers \+ decode\.workers is 4097"),
        ("redis.url=redis://127.0.0.1:1", r"redis\.url"),
        ("redis.url=nonsense", r"redis\.url"),
        ("cluster.host=0.0.0.0", r"cluster\.host is '0\.0\.0\.0'.*nobody can call"),
        ("cluster.host=10.0.0.1", r"redis\.url is empty"),
        ("gateway.host=nosuch.host.invalid", "nosuch"),
        ("telemetry.metrics_host=nosuch.host.invalid", r"telemetry\.metrics_port"),
        ("model.path=/nowhere", r"model\.path"),
        ("telemetry.log_folder=/proc/nowhere", r"telemetry\.log_folder"),
    ],
)
def test_a_setting_that_cannot_work_is_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        start(override)


@pytest.mark.parametrize(
    "key",
    ["gateway.port", "gateway.http_port", "gateway.admin_port", "telemetry.metrics_port"],
)
def test_a_port_that_is_taken_is_named(taken_port: int, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is {taken_port}.*another gateway"):
        start(f"{key}={taken_port}")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("text", ["", "{", "\0\1"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "model"
    skip = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(ModelSettings(EMBEDDED_MODEL).checkpoint(), folder, ignore=skip)
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        start(f"model.path={folder}")


def test_a_group_of_more_ranks_than_experts_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"decode\.group_size is 9.* 8 experts"):
        start("decode.group_size=9")
