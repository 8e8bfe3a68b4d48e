"""`python -m prefill_workers` and `python -m decode_workers`: one worker as a process of its own.

The supervised way to run workers is `hocket up`; this one is for debugging, for other supervisors
and for tests. It takes the same TOML file, prints one line when the worker serves, drains on
SIGTERM and SIGINT, and ends with 70 when the engine failed.

The environment is set before torch is imported, so a worker's server is handed over as a function
that imports it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hocket import environment
from hocket.clock import new_epoch
from hocket.config import Config, WorkerSettings, load_config, worker_settings
from hocket.errors import ConfigError, HocketError
from hocket.execution.worker_process import HostedWorker
from hocket.logs import configure_logging
from hocket.types import Role


def run_worker(
    role: Role, import_worker: Callable[[], Callable[[WorkerSettings], HostedWorker]]
) -> int:
    """Parses the command line, runs one worker until a signal, returns the exit status."""
    arguments = _parser(role).parse_args()
    try:
        config = load_config(arguments.config, arguments.set)
        settings = _settings(config, role, arguments)
        telemetry = settings.telemetry
        configure_logging(telemetry.log_level, settings.worker_id, folder=telemetry.log_folder)
        with tempfile.TemporaryDirectory(prefix="hocket-") as log_folder:
            environment.set_variables(
                environment.worker_environment(
                    settings.transfer.tls, settings.host, settings.threads, Path(log_folder)
                )
            )
            environment.use_device_of(settings.host, settings.transfer.tls)
            _run(import_worker()(settings), config.cluster.drain_s)
    except HocketError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _settings(config: Config, role: Role, arguments: argparse.Namespace) -> WorkerSettings:
    """Raises ConfigError when the ranks of a group could not find each other."""
    rank, epoch = arguments.rank, arguments.epoch or new_epoch()
    settings = worker_settings(config, role, arguments.index, epoch=epoch, rank=rank)
    size = 1 if settings.group is None else settings.group.size
    if not 0 <= rank < size:
        raise ConfigError(f"--rank is {rank}; this worker has ranks 0 to {size - 1}.")
    if settings.group is not None and not (config.redis.url and arguments.epoch):
        raise ConfigError(
            f"decode.group_size is {size}: its ranks meet in Redis, so give all of them the same "
            "redis.url and the same --epoch, one that this group never had before."
        )
    return replace(settings, port=arguments.port)


def _run(worker: HostedWorker, drain_s: float) -> None:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    description = worker.start()
    name = description.worker_id
    print(f"{name} serves {description.model} at {description.address}", flush=True)
    stopping.wait()
    failed = worker.drain(drain_s)
    worker.stop()
    print(f"{name} stopped; {failed} requests were cut short", flush=True)


def _parser(role: Role) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {role.value}_workers", description=f"Runs one {role.value} worker."
    )
    parser.add_argument("--config", help="TOML file; without it, all defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key"
    )
    parser.add_argument("--index", type=int, default=0, help="which worker of its pool (0)")
    parser.add_argument("--rank", type=int, default=0, help="which rank of a decode group (0)")
    parser.add_argument("--epoch", type=int, default=0, help="of this life; 0 takes a new one")
    parser.add_argument("--port", type=int, default=0, help="to listen on; 0 takes a free one")
    return parser
