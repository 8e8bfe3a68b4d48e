"""What happens while Ray has no room for a pool."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from control_plane.cluster.ray_runtime import RayRuntime, temporary_folder
from hocket.config import load_config
from hocket.errors import ConfigError

pytestmark = pytest.mark.e2e
CONFIG = load_config(None, ["decode.placement.num_gpus=1000"])


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[RayRuntime]:
    folder = temporary_folder()
    runtime = RayRuntime(CONFIG, folder, verbose=False)
    yield runtime
    runtime.close()
    shutil.rmtree(folder, ignore_errors=True)


def test_a_local_ray_that_lacks_gpus_says_so_at_once(ray_runtime: RayRuntime) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"decode\.placement.*no room.*1000.*it has .*'GPU': 0"):
        ray_runtime.reserve("decode", CONFIG.decode, 600.0, lambda _: None)
    assert time.monotonic() - started < 60


def test_waiting_for_room_is_told_and_can_be_interrupted(ray_runtime: RayRuntime) -> None:
    told: list[str] = []

    def interrupt(text: str) -> None:
        told.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ray_runtime.reserve("decode", CONFIG.decode, 600.0, interrupt)
    assert "waiting for room in Ray for decode: 1 x " in told[0]
