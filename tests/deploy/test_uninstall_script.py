"""What runs before `helm uninstall`: against a small API server, without Kubernetes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import certifi
import pytest

from tests.deploy.rendering import CHART

PATH = "/apis/ray.io/v1/namespaces/serving/rayclusters/hocket"


class Api:
    """Answers with the statuses of a list, in order, and notes what it was asked."""

    def __init__(self, statuses: list[int]) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(f"{self.command} {self.path} {self.headers['Authorization']}")
                self.send_response(statuses[len(asked) - 1])
                self.end_headers()

            do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        """The script, told of this server instead of the cluster's."""
        shutil.copy(certifi.where(), folder / "ca.crt")
        (folder / "token").write_text("t")
        text = (CHART / "files" / "delete_raycluster.py").read_text()
        for there, here in (
            ("https://kubernetes.default.svc", f"http://127.0.0.1:{self.server.server_port}"),
            ("/var/run/secrets/kubernetes.io/serviceaccount", str(folder)),
            ("time.sleep(2)", "time.sleep(0.01)"),
        ):
            assert there in text
            text = text.replace(there, here)
        return subprocess.run(
            [sys.executable, "-c", text, "serving", "hocket"],
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    made = Api(request.param)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("api", [[200, 200, 200, 404]], indirect=True)
def test_it_deletes_and_waits_until_the_cluster_is_gone(api: Api, tmp_path: Path) -> None:
    done = api.run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert api.asked == [f"DELETE {PATH} Bearer t", *[f"GET {PATH} Bearer t"] * 3]
    assert "RayCluster serving/hocket is gone" in done.stdout


@pytest.mark.parametrize("api", [[404]], indirect=True)
def test_a_cluster_that_is_gone_already_is_fine(api: Api, tmp_path: Path) -> None:
    assert api.run(tmp_path).returncode == 0
    assert len(api.asked) == 1


@pytest.mark.parametrize("api", [[403]], indirect=True)
def test_a_refusal_fails_the_uninstall(api: Api, tmp_path: Path) -> None:
    done = api.run(tmp_path)
    assert done.returncode != 0
    assert "403" in done.stderr
