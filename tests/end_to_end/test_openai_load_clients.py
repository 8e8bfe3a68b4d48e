"""Load generators of other projects against the HTTP door, where they are installed.

They bring many packages of their own, so they are no dependency: each is found on PATH (its own
virtual environment's bin folder, for example) or its test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running_cluster import Running, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_REQUESTS = 24


def _command(name: str) -> str:
    """Where the program is; skips the test that asks when it is nowhere."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH")
    return found


@pytest.fixture(scope="module")
def aiperf() -> str:
    return _command("aiperf")


@pytest.fixture(scope="module")
def guidellm() -> str:
    return _command("guidellm")


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    """Asked for after the program, so that no cluster is started for a test that is skipped."""
    with running() as cluster:
        yield cluster


def _run(folder: Path, *command: str) -> None:
    """Runs a program; its output is shown when it fails."""
    done = subprocess.run(
        ["nice", *command], cwd=folder, capture_output=True, text=True, timeout=600,
        env={k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_completes_every_request(
    aiperf: str, up: Running, checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    _run(
        tmp_path, aiperf, "profile", "--model", "hocket-tiny", "--tokenizer", str(checkpoint),
        "--url", f"http://{up.serving.http_address}", "--endpoint-type", kind, "--streaming",
        "--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--isl", "64", "--osl", "16",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", str(tmp_path),
    )  # fmt: skip
    (path,) = tmp_path.rglob("profile_export_aiperf.json")
    told = json.loads(path.read_text())
    assert told["request_count"]["avg"] == NUM_REQUESTS
    assert told["error_summary"] == []


def test_guidellm_completes_every_request(
    guidellm: str, up: Running, checkpoint: Path, tmp_path: Path
) -> None:
    target = f"http://{up.serving.http_address}"
    path = tmp_path / "told.json"
    _run(
        tmp_path, guidellm, "run",
        "--backend", f"kind=openai_http,target={target},model=hocket-tiny",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={checkpoint}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={path}", "--disable-console-interactive",
    )  # fmt: skip
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["total"]) == (NUM_REQUESTS, NUM_REQUESTS)
