"""`make demo`, as a stranger sees it: from any folder, from nothing to nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running_cluster import descendants, still_alive

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CLOSING_LINE = re.compile(
    r"\d+ tokens, (stop|length) \| TTFT \d+ ms \| inter-token [\d.]+ ms \| [\d.]+ tokens/s"
    r" \| acceptance length \d\.\d\d \| \d+ KiB KV moved over \w+ \| seed \d+"
)


def test_the_demo_answers_twice_and_stops_everything(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "hocket.cli", "demo", "--set", "cluster.startup_timeout_s=200"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    told: list[str] = []
    started: dict[int, str] = {}
    for line in process.stdout:
        told.append(line)
        started |= descendants(process.pid)
    _, progress = process.communicate(timeout=30)
    text = "".join(told)
    assert process.returncode == 0, text + progress
    assert len(CLOSING_LINE.findall(text)) == 2, text
    assert "Greedy" in text
    assert "Sampled" in text
    assert re.search(r"Done in \d+ s; everything is stopped\.\n$", text)
    assert len(started) >= 5
    assert still_alive(started, timeout_s=5) == {}
    assert list(tmp_path.iterdir()) == []
