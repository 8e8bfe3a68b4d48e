"""Cleans up after a cluster whose `up` was itself killed, so that no process outlives it.

Ctrl-C and SIGTERM are handled in order by `cluster.py`; SIGKILL, or the kernel short of memory,
gives nobody a chance. So `up` starts this file as a process of its own, with nothing but the
standard library, in a session of its own that no terminal's signal reaches. It waits on a pipe
whose other end only `up` holds. When that end closes, for whatever reason, it kills what belongs
to the cluster and deletes its folder. After an orderly stop there is nothing left to do.

Belonging shows in /proc: a process was started with `MARK`=folder in its environment, which
children inherit; or, since some write their title over their environment, it works in the folder
(the store) or has a file in it open for writing (Ray's agents). Who only reads there is a guest.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "HOCKET_CLUSTER"
_TIMEOUT_S = 10.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Watchdog:
    """The watching process, as `up` holds it."""

    def __init__(self, folder: Path) -> None:
        """Starts it for the cluster in `folder`. Processes started with `MARK`=folder are its."""
        # Blocked signals stay blocked in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            # By path and isolated: neither the working folder nor the environment can break it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(folder), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Lets it do its work, and waits for it. Safe to call again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_TIMEOUT_S + 5)


def clean_up(folder: str, owner: int) -> None:
    """Kills what belongs to the cluster in `folder` until nothing is left, then deletes it.

    `owner` is the process that started it. After an orderly stop it lives on, and may still have
    one of Ray's logs open.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while (found := belonging(folder, owner)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def belonging(folder: str, owner: int) -> list[int]:
    """Living processes of the cluster in `folder`; this one and `owner` are not among them."""
    processes = {int(name) for name in os.listdir("/proc") if name.isdigit()}
    others = processes - {os.getpid(), owner}
    return [p for p in sorted(others) if _belongs(f"/proc/{p}", folder)]


def _belongs(process: str, folder: str) -> bool:
    try:
        with open(f"{process}/stat", "rb") as file:
            if file.read().rsplit(b")", 1)[1].split()[0] == b"Z":
                return False
        with open(f"{process}/environ", "rb") as file:
            if os.fsencode(f"{MARK}={folder}") in file.read().split(b"\0"):
                return True
        if _is_in(folder, f"{process}/cwd"):
            return True
        numbers = os.listdir(f"{process}/fd")
        return any(
            _is_in(folder, f"{process}/fd/{n}") and _is_written(f"{process}/fdinfo/{n}")
            for n in numbers
        )
    except OSError:
        # It ended meanwhile, or is another user's.
        return False


def _is_in(folder: str, link: str) -> bool:
    try:
        place = os.readlink(link)
    except FileNotFoundError:
        return False
    # What was deleted has " (deleted)" behind its name here.
    return f"{place}/".startswith((f"{folder}/", f"{folder} "))


def _is_written(info: str) -> bool:
    """Whether an open file is open for writing, from its /proc/<process>/fdinfo/<number>."""
    with open(info, encoding="ascii") as file:
        flags = next((line for line in file if line.startswith("flags:")), "flags: 0")
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


if __name__ == "__main__":
    sys.stdin.buffer.read()
    clean_up(sys.argv[1], int(sys.argv[2]))
