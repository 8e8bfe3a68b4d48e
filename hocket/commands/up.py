"""`hocket up`: starts a cluster in the foreground and ends it on Ctrl-C or SIGTERM.

`running_cluster` is the whole life cycle as a context, for the demo and for tests: whatever
happens inside, nothing it started is left behind.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from types import FrameType

from rich.console import Console
from rich.table import Table

from control_plane.cluster.cluster import Cluster, Serving
from hocket.config import Config, load_config
from hocket.errors import HocketError
from hocket.logs import also_in_file

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Of the table of what listens where, in characters: the least its last column gets, and a gap.
_LAST_COLUMN, _GAP = 22, 2


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


class Signals:
    """Ctrl-C, SIGTERM and a closed terminal: raised as `Interrupted` in the main thread, at once.

    And remembered: code that a signal lands in may swallow the exception or make another of it.
    """

    def __init__(self) -> None:
        self._name = ""

    def install(self) -> None:
        """Takes the signals, also when somebody else has taken them meanwhile: Ray does."""
        for number in _ENDING:
            signal.signal(number, self._take)

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self._name:
            raise Interrupted(self._name)

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._name = signal.Signals(number).name
        self.check()


@contextmanager
def interruptible() -> Iterator[Signals]:
    """Within it signals are taken. However it ends, if one came it ends with `Interrupted`."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    signals = Signals()
    try:
        signals.install()
        yield signals
    except BaseException as error:
        signals.check()
        # Ray's own handler, which is there for some seconds of the start, makes this of it.
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            raise Interrupted(signal.SIGTERM.name) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    signals.check()


@contextmanager
def running_cluster(
    config: Config, progress: Progress, signals: Signals, *, verbose: bool = False
) -> Iterator[tuple[Cluster, Serving]]:
    """A cluster that serves; drained and stopped at the end, whatever the end is."""
    is_stopping = False

    def report(text: str) -> None:
        if not is_stopping:
            signals.install()
            signals.check()
            progress(text)
            return
        # Nobody may be left to read it; rich makes a SystemExit of that.
        with suppress(OSError, SystemExit):
            progress(text)

    cluster = Cluster(config, report, verbose=verbose)
    try:
        serving = cluster.start()
        signals.install()
        progress.done()
        yield cluster, serving
    finally:
        # Further signals must not cut the stop short: they would leave processes behind.
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        is_stopping = True
        cluster.stop()
        progress.done()


def show_serving(console: Console, config: Config, serving: Serving) -> None:
    """Prints what listens where. Addresses and folders, which are copied, are never folded: where
    the terminal is too narrow for them, lines are too long."""
    table = _serving_table(config, serving)
    *firm, _ = table.columns
    needed = _LAST_COLUMN
    for column in firm:
        column.no_wrap = True
        needed += max(len(str(cell)) for cell in column.cells) + _GAP
    if needed > console.width:
        table.width = needed
    console.print(table, crop=False)


def _serving_table(config: Config, serving: Serving) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("what", "address", "holds"):
        table.add_column(column, overflow="fold")
    table.add_row("gateway", serving.gateway_address, f"gRPC, model {config.model.name}")
    if serving.http_address:
        table.add_row("", f"http://{serving.http_address}/v1", "OpenAI HTTP, the same model")
    if serving.admin_address:
        table.add_row("", serving.admin_address, "gRPC for hocket status, hocket scale")
    for worker in serving.workers:
        tokens = worker.num_blocks * worker.block_tokens
        drafts = f", {worker.max_draft_tokens} drafts" if worker.role.value == "decode" else ""
        if worker.synthetic_acceptance > 0:
            drafts += f", SYNTHETIC acceptance {worker.synthetic_acceptance:.2f}"
        table.add_row(worker.worker_id, worker.address, f"{tokens:,} tokens of KV{drafts}")
    table.add_row("store", serving.redis_url, "worker registry")
    pages = {"gateway": serving.metrics_address}
    pages |= {worker.worker_id: worker.metrics_address for worker in serving.workers}
    for name, address in pages.items():
        if address:
            table.add_row("metrics", f"http://{address}/metrics", f"Prometheus, {name}")
    if serving.log_folder:
        table.add_row("logs", serving.log_folder, "JSON lines, a file per process")
    return table


def log_settings(folder: str) -> list[str]:
    """The override that `--log-dir` stands for; none when it is not given."""
    return [f"telemetry.log_folder={json.dumps(folder)}"] if folder else []


def called_as(program: str, *, is_on_path: bool) -> str:
    """What to type before a subcommand, for whoever called the console script as `program`."""
    if is_on_path:
        return "hocket"
    if program.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m hocket.cli"
    return shlex.quote(program)


def run(path: Path | None, overrides: Sequence[str], *, verbose: bool) -> int:
    """The command; returns its exit code."""
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(format="%(message)s")
    try:
        config = load_config(path, overrides)
        logging.getLogger("control_plane").setLevel(config.telemetry.log_level.upper())
        with (
            interruptible() as signals,
            running_cluster(config, Progress(console), signals, verbose=verbose) as (
                cluster,
                serving,
            ),
            also_in_file("up", serving.log_folder),
        ):
            show_serving(console, config, serving)
            program = called_as(sys.argv[0], is_on_path=which("hocket") is not None)
            console.print(
                f'\nServing. Try: {program} generate "Return the" --address '
                f"{serving.gateway_address}\nCtrl-C ends it.",
                soft_wrap=True,
                markup=False,
            )
            while True:
                signals.check()
                cluster.check_alive()
                time.sleep(1.0)
    except Interrupted:
        console.print("Stopped.")
    except HocketError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
