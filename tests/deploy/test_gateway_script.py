"""The gateway pod's script, with stand-ins for `ray start` and `hocket`: what ends with what."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.rendering import CHART

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash here")

# Runs until SIGTERM, which it notes; arguments are noted too.
STAND_IN = """#!/bin/bash
echo "$0 $*" > "$LOGS/$(basename "$0").arguments"
trap 'echo drained > "$LOGS/$(basename "$0").drained"; exit 0' TERM
echo $$ > "$LOGS/$(basename "$0").pid"
while :; do sleep 0.05; done
"""


class Pod:
    """A running script and its two children."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.config = folder / "hocket.toml"
        self.config.write_text("[model]\n")
        shutil.copy(CHART / "files" / "gateway.sh", folder)
        for name in ("ray", "hocket"):
            (folder / name).write_text(STAND_IN)
            (folder / name).chmod(0o755)
        self.process = subprocess.Popen(
            [BASH or "bash", str(folder / "gateway.sh")],
            env={
                **os.environ,
                "PATH": f"{folder}:{os.environ['PATH']}",
                "LOGS": str(folder),
                "KUBERAY_GEN_RAY_START_CMD": "ray start --resources='{\"a\": 1}' --block",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.ray, self.hocket = self._pid("ray"), self._pid("hocket")

    def _pid(self, name: str) -> int:
        path = self.folder / f"{name}.pid"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if path.is_file() and path.read_text().strip():
                return int(path.read_text())
            time.sleep(0.02)
        raise AssertionError(f"{name} did not start")

    def note(self, name: str) -> str:
        path = self.folder / name
        return path.read_text().strip() if path.is_file() else ""

    def end(self) -> tuple[int, str]:
        """Waits; the exit code and what was printed. Both children must be gone then."""
        output, _ = self.process.communicate(timeout=20)
        for pid in (self.ray, self.hocket):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        return self.process.returncode, output


@pytest.fixture
def pod(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Pod]:
    made = Pod(tmp_path, getattr(request, "param", {}))
    yield made
    if made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
    assert made.process.stdout is not None
    made.process.stdout.close()


def test_both_are_started_as_told(pod: Pod) -> None:
    assert pod.note("ray.arguments").endswith('ray start --resources={"a": 1} --block')
    assert pod.note("hocket.arguments").endswith(f"hocket up --config {pod.config}")


@pytest.mark.parametrize("pod", [{"HOCKET_REDIS_URL": "redis://:a b@x:1"}], indirect=True)
def test_a_secret_url_overrides_the_configuration(pod: Pod) -> None:
    assert pod.note("hocket.arguments").endswith("--set redis.url=redis://:a b@x:1")


def test_sigterm_drains_and_ends_both(pod: Pod) -> None:
    pod.process.terminate()
    code, _ = pod.end()
    assert code == 0
    assert pod.note("hocket.drained") == pod.note("ray.drained") == "drained"


def test_when_hocket_dies_the_container_ends_and_fails(pod: Pod) -> None:
    os.kill(pod.hocket, signal.SIGKILL)
    code, _ = pod.end()
    assert code != 0
    assert pod.note("ray.drained") == "drained"


def test_when_the_ray_node_dies_hocket_is_drained(pod: Pod) -> None:
    os.kill(pod.ray, signal.SIGKILL)
    _, output = pod.end()
    assert "the Ray node has ended" in output
    assert pod.note("hocket.drained") == "drained"


def test_a_changed_configuration_starts_the_container_again(pod: Pod) -> None:
    pod.config.write_text("[model]\ndtype = 'bfloat16'\n")
    code, output = pod.end()
    assert "the configuration has changed" in output
    assert (code, pod.note("hocket.drained")) == (0, "drained")
