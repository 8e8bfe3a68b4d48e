"""The store that `up` brings along: one socket, many lives."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import redis

from control_plane.cluster.embedded_store import StoreProcess, store_url
from control_plane.cluster.registry import check_redis
from control_plane.cluster.supervisor import Health
from hocket.config import RedisSettings
from hocket.errors import ConfigError


def _process_id(folder: Path) -> int:
    return redis.Redis.from_url(store_url(folder)).info("server")["process_id"]


def test_a_store_that_died_is_seen_and_started_again_where_it_was(tmp_path: Path) -> None:
    first = StoreProcess(tmp_path)
    assert first.look() is Health.SERVING
    check_redis(RedisSettings(url=store_url(tmp_path)))
    os.kill(_process_id(tmp_path), signal.SIGKILL)
    deadline = time.monotonic() + 5
    while first.look() is not Health.DEAD:
        assert time.monotonic() < deadline
    assert "does not answer" in first.why()
    first.kill()
    second = StoreProcess(tmp_path)
    assert second.look() is Health.SERVING
    second.kill()
    assert second.look() is Health.DEAD


def test_a_store_that_hangs_is_silent_and_holds_nobody_up(tmp_path: Path) -> None:
    store = StoreProcess(tmp_path)
    process = _process_id(tmp_path)
    os.kill(process, signal.SIGSTOP)
    assert store.look() is Health.SILENT
    os.kill(process, signal.SIGCONT)
    store.kill()


def test_a_store_that_cannot_start_is_dead_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "valkey.conf").mkdir()
    store = StoreProcess(tmp_path)
    assert store.look() is Health.DEAD
    assert "did not start" in store.why()
    store.kill()


def test_two_stores_never_answer_for_each_other(tmp_path: Path) -> None:
    """They are started in the same moment by two `hocket up`; ports would be raced for."""
    folders = [tmp_path / "a", tmp_path / "b"]
    stores = [StoreProcess(folder) for folder in folders]
    assert len({_process_id(folder) for folder in folders}) == 2
    for store in stores:
        store.kill()


@pytest.mark.parametrize("url", ["redis://user:secret@127.0.0.1:1", "nonsense", "unix:///nowhere"])
def test_a_redis_that_is_not_there_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis\.url") as caught:
        check_redis(RedisSettings(url=url))
    assert "secret" not in str(caught.value)
