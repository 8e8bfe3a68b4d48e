"""What runs inside a worker's Ray actor: the worker, its lease in the registry, and its pulse.

The control plane never imports a worker package: it names the class as "module:name" and this
actor, in a process of its own, imports it. Ray carries starting, pulse and stopping only; requests
go to the worker's own gRPC server. Next: `control_plane.cluster.supervisor` watches the actor.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, cast

from control_plane.cluster.registry import Registration
from hocket import environment
from hocket.config import RedisSettings, WorkerSettings
from hocket.logs import configure_logging
from hocket.types import WorkerDescription

# Redis gets this long to take in that a worker drains; without it gateways cannot know.
_ANNOUNCE_S = 5.0


class WorkerProcess(Protocol):
    """What `prefill_workers.server` and `decode_workers.server` offer under this name."""

    def __init__(self, settings: WorkerSettings) -> None: ...

    def start(self) -> WorkerDescription:
        """Loads the model and serves; returns when requests can come."""
        ...

    def describe(self) -> WorkerDescription:
        """The worker as it is now, with its load."""
        ...

    def is_alive(self) -> bool:
        """Whether the engine still runs."""
        ...

    def drain(self, deadline_s: float) -> int:
        """Takes nothing new and finishes what is there; returns how many requests it failed."""
        ...

    def stop(self) -> None: ...


def import_entry(entry: str) -> type[WorkerProcess]:
    """The class that "module:name" names."""
    module, _, name = entry.partition(":")
    return cast("type[WorkerProcess]", getattr(importlib.import_module(module), name))


class WorkerActor:
    """One worker in its own process. Ray calls its methods from several threads."""

    def __init__(self, entry: str, settings: WorkerSettings, redis: RedisSettings) -> None:
        """An empty `settings.host` stands for the address of the node that this runs on."""
        telemetry = settings.telemetry
        configure_logging(telemetry.log_level, settings.worker_id, folder=telemetry.log_folder)
        if not settings.host:
            settings = replace(settings, host=_node_address())
        self._closed = threading.Event()
        # On other machines than `up`'s there is no folder of the cluster.
        self._folder: TemporaryDirectory[str] | None = None
        if not environment.ucx_log_file():
            self._folder = TemporaryDirectory(prefix="hocket-")
            environment.log_ucx_to(Path(self._folder.name))
        environment.use_device_of(settings.host, settings.transfer.tls)
        self._worker = import_entry(entry)(settings)
        # Guards both: who leaves before it is registered never is.
        self._lock = threading.Lock()
        self._is_leaving = False
        self._is_registered = False
        self._registration = Registration(redis, self._describe, _end_process)

    def start(self) -> WorkerDescription:
        """Starts the worker and registers it; returns when it serves."""
        description = self._worker.start()
        with self._lock:
            if not self._is_leaving:
                self._registration.start()
                self._is_registered = True
        return description

    def pulse(self) -> bool:
        """Whether the engine runs."""
        return self._worker.is_alive()

    def wait_until_closed(self) -> None:
        """Returns after `stop`; a caller that gets an error instead knows the process died."""
        self._closed.wait()

    def process_id(self) -> int:
        return os.getpid()

    def drain(self, announce_s: float, drain_s: float) -> int:
        """Has the registry say that it drains, gives gateways `announce_s` to see it, then takes
        nothing new and finishes what is there; returns how many requests `drain_s` was too short
        for. Until it is stopped it answers, and stays registered as draining.

        One that still starts has nothing to finish, and is never registered."""
        with self._lock:
            self._is_leaving = True
            if not self._is_registered:
                return 0
        self._registration.renew_now(_ANNOUNCE_S)
        self._closed.wait(announce_s)
        return self._worker.drain(drain_s)

    def stop(self) -> None:
        """Unregisters and stops; what is still there fails."""
        self._registration.stop()
        self._worker.stop()
        if self._folder is not None:
            self._folder.cleanup()
        self._closed.set()

    def _describe(self) -> WorkerDescription:
        worker = self._worker.describe()
        return replace(worker, is_draining=worker.is_draining or self._is_leaving)


def _node_address() -> str:
    import ray.util

    return ray.util.get_node_ip_address()


def _end_process() -> None:
    """A later life serves under this name: this one must not, whatever it is doing."""
    os.kill(os.getpid(), signal.SIGKILL)
