"""`python -m prefill_workers --config hocket.toml`: one prefill worker as a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hocket.config import WorkerSettings
from hocket.execution.worker_main import run_worker
from hocket.execution.worker_process import HostedWorker
from hocket.types import Role


def _import_worker() -> Callable[[WorkerSettings], HostedWorker]:
    """Imports torch, which must see the environment that was set before."""
    from prefill_workers.server import WorkerProcess

    return WorkerProcess


if __name__ == "__main__":
    sys.exit(run_worker(Role.PREFILL, _import_worker))
