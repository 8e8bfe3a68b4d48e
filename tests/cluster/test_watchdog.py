"""What belongs to a cluster whose `up` was killed is found, ended and deleted, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cluster.watchdog import MARK, Watchdog, belonging

BELONGING = ("marked", "stopped", "inside", "writing")
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cluster"
    made.mkdir()
    return made


@pytest.fixture
def processes(folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two that inherit the mark, one of them stopped; one that works in the folder, one that writes
    into it; and three others."""
    marked = {**os.environ, MARK: str(folder)}
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    made = {
        "marked": subprocess.Popen(SLEEP, env=marked, start_new_session=True),
        "stopped": subprocess.Popen([sys.executable, "-c", stopped], env=marked),
        "inside": subprocess.Popen(SLEEP, cwd=folder),
        "writing": subprocess.Popen(SLEEP, stdout=(folder / "log").open("w")),
        "reading": subprocess.Popen(SLEEP, stdin=(folder / "log").open()),
        "another's": subprocess.Popen(SLEEP, env={**os.environ, MARK: f"{folder}-2"}),
        "stranger": subprocess.Popen(SLEEP),
    }
    yield made
    for process in made.values():
        process.kill()
        process.wait()


def test_only_what_carries_the_mark_or_works_in_the_folder_belongs(
    folder: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    expected = {processes[name].pid for name in BELONGING}
    _until(lambda: set(belonging(str(folder), os.getpid())) == expected)


def test_it_ends_what_belongs_and_deletes_the_folder(
    folder: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    watchdog = Watchdog(folder)
    _until(lambda: len(belonging(str(folder), os.getpid())) == len(BELONGING))
    watchdog.close()
    ended = {name for name, process in processes.items() if process.poll() is not None}
    assert ended == set(BELONGING)
    assert not folder.exists()
    watchdog.close()


def test_it_spares_the_process_that_started_it(folder: Path) -> None:
    with (folder / "driver.log").open("w"):
        watchdog = Watchdog(folder)
        watchdog.close()
    assert not folder.exists()


def test_it_does_its_work_when_its_parent_is_killed(folder: Path) -> None:
    parent = (
        "import os, subprocess, sys, time; from pathlib import Path\n"
        "from control_plane.cluster.watchdog import MARK, Watchdog\n"
        "folder = Path(sys.argv[1]); watchdog = Watchdog(folder); os.environ[MARK] = str(folder)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, watchdog._process.pid, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, watchdog = map(int, process.stdout.readline().split())
        # No signal of a terminal's ends the watchdog itself.
        os.kill(watchdog, signal.SIGINT)
        process.kill()
    _until(lambda: not any(Path(f"/proc/{p}").exists() for p in (child, watchdog)))
    assert not folder.exists()


def _until(is_so: object) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline, "not within 10 s"
        time.sleep(0.05)
