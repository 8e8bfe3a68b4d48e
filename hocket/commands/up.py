"""`hocket up`: starts a cluster in the foreground and ends it on Ctrl-C or SIGTERM.

`running_cluster` is the whole life cycle as a context, for the demo and for tests: whatever
happens inside, nothing it started is left behind.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from control_plane.cluster import supervisor
from control_plane.cluster.cluster import Cluster, Serving
from hocket.config import Config, load_config
from hocket.errors import HocketError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked to end; not an `Exception`, so that nothing on the way handles it."""


class Progress:
    """What is being waited for: a spinner on a terminal, a line per change elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._started = time.monotonic()
        self._last = ""

    def __call__(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        if self._status is None:
            self._console.print(f"[dim]{time.monotonic() - self._started:5.1f} s[/] {text}")
            return
        self._status.update(text)
        self._status.start()

    def done(self) -> None:
        """Clears the spinner, so that other output can follow."""
        if self._status is not None:
            self._status.stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    raise Interrupted(signal.Signals(number).name)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, Ctrl-C, SIGTERM and a closed terminal raise `Interrupted` in the main thread."""
    before = {number: signal.signal(number, _interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running_cluster(
    config: Config, progress: Progress, *, verbose: bool = False
) -> Iterator[tuple[Cluster, Serving]]:
    """A cluster that serves; drained and stopped at the end, whatever the end is."""
    cluster = Cluster(config, progress, verbose=verbose)
    try:
        serving = cluster.start()
        # Ray installs a handler for SIGTERM of its own.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
        progress.done()
        yield cluster, serving
    finally:
        # Further signals must not cut the stop short: they would leave processes behind.
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        cluster.stop()
        progress.done()


def serving_table(config: Config, serving: Serving) -> Table:
    """What listens where."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "address", "holds"):
        table.add_column(column)
    table.add_row("gateway", serving.gateway_address, f"model {config.model.name}")
    for worker in serving.workers:
        tokens = worker.num_blocks * worker.block_tokens
        drafts = f", {worker.max_draft_tokens} drafts" if worker.role.value == "decode" else ""
        table.add_row(worker.worker_id, worker.address, f"{tokens:,} tokens of KV{drafts}")
    table.add_row("store", serving.redis_url, "worker registry")
    return table


def run(path: Path | None, overrides: Sequence[str], *, verbose: bool) -> int:
    """The command; returns its exit code."""
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(format="%(message)s")
    logging.getLogger(supervisor.__name__).setLevel(logging.INFO)
    try:
        config = load_config(path, overrides)
        with interruptible(), running_cluster(config, Progress(console), verbose=verbose) as up:
            _, serving = up
            console.print(serving_table(config, serving))
            console.print(
                f'\nServing. Try: hocket generate "Return the" --address {serving.gateway_address}'
                "\nCtrl-C ends it."
            )
            threading.Event().wait()
    except Interrupted:
        console.print("Stopped.")
    except HocketError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
