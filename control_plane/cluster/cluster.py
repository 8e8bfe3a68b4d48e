"""`hocket up`, without the terminal: everything is started in order, watched, and stopped.

Order: store (embedded Valkey unless `redis.url` is set), Ray, placement groups, the workers and
the gateway side by side. `start` returns when the gateway lists every worker, so that the first
request finds its pair. From then on a `Supervisor` thread replaces what dies. `stop` drains the
gateway first, then the workers, and ends every process that `start` began, in any state.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.cluster.embedded_store import EmbeddedStore
from control_plane.cluster.gateway_actor import GatewayActor
from control_plane.cluster.ray_runtime import (
    ActorOptions,
    RayProcess,
    RayRuntime,
    launch_actor,
    temporary_folder,
)
from control_plane.cluster.registry import Registry
from control_plane.cluster.supervisor import Place, Supervisor
from control_plane.cluster.worker_actor import WorkerActor
from hocket import environment
from hocket.clock import SystemClock, new_epoch
from hocket.config import Config, worker_settings
from hocket.errors import ConfigError, InternalError
from hocket.model.model_config import ModelConfig
from hocket.types import Role, WorkerDescription

GATEWAY = "gateway"
_ENTRIES = {
    Role.PREFILL: "prefill_workers.server:WorkerProcess",
    Role.DECODE: "decode_workers.server:WorkerProcess",
}
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Serving:
    """What listens where."""

    gateway_address: str
    redis_url: str
    workers: tuple[WorkerDescription, ...]


class Cluster:
    """All processes of one `up`. Use `start` once, then `stop`; `stop` is right at any time."""

    def __init__(
        self, config: Config, report: Callable[[str], None], *, verbose: bool = False
    ) -> None:
        """`report` is called with a few words on what is being waited for."""
        self._config = config
        self._report = report
        self._verbose = verbose
        self._store: EmbeddedStore | None = None
        self._folder: Path | None = None
        self._ray: RayRuntime | None = None
        self._supervisor: Supervisor | None = None
        self._gateway_port = config.gateway.port
        self._is_serving = False

    def start(self) -> Serving:
        """Starts everything; returns when requests can come.

        Raises:
            HocketError: something did not start; the message says what and why. Call `stop`.
        """
        self._check()
        config = self._config
        self._folder = temporary_folder()
        if not config.redis.url:
            self._report("starting the store")
            self._store = EmbeddedStore(self._folder)
            config = replace(config, redis=replace(config.redis, url=self._store.url))
            self._config = config
        self._report("starting Ray")
        self._ray = RayRuntime(config, verbose=self._verbose)
        self._supervisor = Supervisor(self._places(self._ray), SystemClock())
        workers = self._wait_until_serving(self._supervisor)
        self._supervisor.start()
        self._is_serving = True
        return Serving(f"{config.gateway.host}:{self._gateway_port}", config.redis.url, workers)

    def process_ids(self) -> dict[str, int]:
        """The process of each place that serves now."""
        import ray

        assert self._supervisor is not None
        running = self._supervisor.processes().items()
        return {
            name: ray.get(process.actor.process_id.remote(), timeout=5)
            for name, process in running
            if isinstance(process, RayProcess)
        }

    def restarts(self, name: str) -> int:
        """How often the process of a place was replaced."""
        assert self._supervisor is not None
        return self._supervisor.restarts(name)

    def stop(self) -> None:
        """Drains and ends everything. Safe to call again."""
        if self._supervisor is not None:
            self._supervisor.stop()
            if self._is_serving:
                self._report("draining")
                self._drain(self._supervisor)
            self._supervisor = None
        if self._ray is not None:
            self._report("stopping")
            self._ray.close()
            self._ray = None
        if self._store is not None:
            self._store.stop()
            self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _check(self) -> None:
        """Finds at once what would otherwise fail after half a minute."""
        config = self._config
        if not config.cluster.ray_address:
            ModelConfig.from_checkpoint(config.model.checkpoint())
        if not config.redis.url and not environment.is_loopback(self._host()):
            raise ConfigError(
                "redis.url is empty, but workers may run on other machines, which cannot reach "
                "an embedded store; set redis.url.",
                field="redis.url",
            )
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.gateway.host, config.gateway.port))
            except OSError as error:
                raise ConfigError(
                    f"gateway.host is {config.gateway.host!r} and gateway.port is "
                    f"{config.gateway.port}: {error.strerror or error}; is another gateway "
                    "running? Port 0 takes a free one.",
                    field="gateway.port",
                ) from error

    def _places(self, ray_runtime: RayRuntime) -> list[Place]:
        config = self._config
        places = [self._place(GATEWAY, self._launch_gateway)]
        for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            group = ray_runtime.reserve(role.value, pool, config.cluster.startup_timeout_s)
            for index in range(pool.workers):
                launch = self._worker_launcher(role, index, group)
                places.append(self._place(f"{role.value}-{index}", launch))
        return places

    def _place(self, name: str, launch: Callable[[], RayProcess]) -> Place:
        cluster = self._config.cluster
        return Place(name, launch, cluster.startup_timeout_s, cluster.stuck_s)

    def _launch_gateway(self) -> RayProcess:
        config = self._config
        # A gateway that is started again listens where its clients know it.
        gateway = replace(config.gateway, port=self._gateway_port)
        arguments = (replace(config, gateway=gateway),)
        options = ActorOptions(GATEWAY, environment={})
        return RayProcess(launch_actor(GatewayActor, arguments, options))

    def _worker_launcher(self, role: Role, index: int, group: Any) -> Callable[[], RayProcess]:
        config = self._config
        pool = config.prefill if role is Role.PREFILL else config.decode
        threads = pool.threads or self._threads(pool.placement.num_cpus)
        options = ActorOptions(
            f"{role.value}-{index}",
            environment.worker_environment(
                config.transfer.tls, self._host(), threads, self._log_folder()
            ),
            group=group,
            bundle=index,
            num_cpus=pool.placement.num_cpus,
            num_gpus=pool.placement.num_gpus,
            resources=pool.placement.resources,
        )

        def launch() -> RayProcess:
            settings = worker_settings(config, role, index, epoch=new_epoch())
            settings = replace(settings, threads=threads, host=self._host())
            arguments = (_ENTRIES[role], settings, config.redis)
            return RayProcess(launch_actor(WorkerActor, arguments, options))

        return launch

    def _host(self) -> str:
        """What workers bind; empty: the address of their node."""
        cluster = self._config.cluster
        return cluster.host or ("" if cluster.ray_address else "127.0.0.1")

    def _log_folder(self) -> Path | None:
        """Only this machine has our folder."""
        return None if self._config.cluster.ray_address else self._folder

    def _threads(self, cpus: float) -> int:
        """Compute threads of a worker that is not told."""
        config = self._config
        if config.cluster.ray_address:
            return max(1, int(cpus))
        return max(1, environment.num_cpus() // (config.prefill.workers + config.decode.workers))

    def _wait_until_serving(self, supervisor: Supervisor) -> tuple[WorkerDescription, ...]:
        """Launches all places and waits for the gateway to list every worker.

        The first process that fails ends the start: its reason is most likely everyone's.
        """
        config = self._config
        deadline = time.monotonic() + config.cluster.startup_timeout_s
        expected = config.prefill.workers + config.decode.workers
        registry = Registry(config.redis)
        try:
            while True:
                for failed in supervisor.tick():
                    raise InternalError(f"{failed.name} did not start: {failed.reason}")
                gateway = _result(supervisor, GATEWAY)
                if gateway is not None:
                    self._gateway_port = gateway
                serving = [n for n in self._names() if _result(supervisor, n) is not None]
                self._report(_waiting_for(self._names(), serving))
                if len(serving) == expected + 1 and self._gateway_lists(supervisor, expected):
                    return tuple(registry.workers())
                if time.monotonic() > deadline:
                    raise InternalError(
                        f"not serving after {config.cluster.startup_timeout_s:g} s "
                        f"(cluster.startup_timeout_s): {_waiting_for(self._names(), serving)}."
                    )
                time.sleep(_LOOK_S)
        finally:
            registry.close()

    def _names(self) -> list[str]:
        pools = ((Role.PREFILL, self._config.prefill), (Role.DECODE, self._config.decode))
        return [GATEWAY, *(f"{r.value}-{i}" for r, pool in pools for i in range(pool.workers))]

    @staticmethod
    def _gateway_lists(supervisor: Supervisor, expected: int) -> bool:
        """Ready means routable: asked of the gateway itself."""
        import ray

        process = supervisor.processes().get(GATEWAY)
        assert isinstance(process, RayProcess)
        return ray.get(process.actor.is_routable.remote(expected), timeout=10)

    def _drain(self, supervisor: Supervisor) -> None:
        """Stops the gateway, then all workers at once; kills what does not stop in time."""
        processes = supervisor.processes()
        gateway = processes.pop(GATEWAY, None)
        drain_s = self._config.cluster.drain_s
        if gateway is not None:
            _stop_together([gateway], drain_s)
        # Without the gateway nothing new comes and nothing is waited for.
        _stop_together(list(processes.values()), min(drain_s, 1.0))


def _stop_together(processes: list[Any], drain_s: float) -> None:
    import ray

    stops = [process.actor.stop.remote(drain_s) for process in processes]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=drain_s + 5)
    for process in processes:
        process.kill()


def _result(supervisor: Supervisor, name: str) -> Any:
    process = supervisor.processes().get(name)
    return process.result if isinstance(process, RayProcess) else None


def _waiting_for(names: list[str], serving: list[str]) -> str:
    missing = [name for name in names if name not in serving]
    return f"waiting for {', '.join(missing)}" if missing else "waiting for the router"
