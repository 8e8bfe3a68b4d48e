"""`hocket up`, without the terminal: everything is started in order, watched, and stopped.

Order: Ray, placement groups, then store (embedded Valkey unless `redis.url` is set), workers and
gateway side by side. `start` returns when the gateway lists every worker, so that the first
request finds its pair. From then on a `Supervisor` thread replaces what dies. `stop` drains the
gateway first, then the workers, and ends every process that `start` began, in any state; what it
cannot end any more, because it was killed itself, the `Watchdog` does.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.cluster.embedded_store import StoreProcess, store_url
from control_plane.cluster.gateway_actor import GatewayActor, GatewayPorts
from control_plane.cluster.ray_runtime import (
    ActorOptions,
    RayProcess,
    RayRuntime,
    launch_actor,
    temporary_folder,
)
from control_plane.cluster.registry import Registry, check_redis
from control_plane.cluster.supervisor import Place, Process, Supervisor
from control_plane.cluster.watchdog import MARK, Watchdog
from control_plane.cluster.worker_actor import WorkerActor
from control_plane.tokenizer import ModelTokenizer
from hocket import environment
from hocket.clock import SystemClock, new_epoch
from hocket.config import Config, worker_settings
from hocket.errors import ConfigError, InternalError
from hocket.model.model_config import ModelConfig
from hocket.types import Role, WorkerDescription

GATEWAY = "gateway"
STORE = "store"
_ENTRIES = {
    Role.PREFILL: "prefill_workers.server:WorkerProcess",
    Role.DECODE: "decode_workers.server:WorkerProcess",
}
_LOOK_S = 0.05
_LOCAL_WORKERS_PER_CPU = 8


@dataclass(frozen=True, slots=True)
class Serving:
    """What listens where. `http_address` is empty when there is no HTTP door, `metrics_address`,
    the gateway's, when there are no metrics."""

    gateway_address: str
    http_address: str
    metrics_address: str
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
        self._watchdog: Watchdog | None = None
        self._folder: Path | None = None
        self._ray: RayRuntime | None = None
        self._supervisor: Supervisor | None = None
        self._ports = GatewayPorts(
            config.gateway.port, config.gateway.http_port, config.telemetry.metrics_port
        )
        self._has_own_store = not config.redis.url
        self._is_serving = False

    def start(self) -> Serving:
        """Starts everything; returns when requests can come.

        Raises:
            HocketError: something did not start; the message says what and why. Call `stop`.
        """
        self._check()
        folder = self._folder = temporary_folder()
        self._watchdog = Watchdog(folder)
        environment.set_variables({MARK: str(folder)})
        if self._has_own_store:
            settings = replace(self._config.redis, url=store_url(folder))
            self._config = replace(self._config, redis=settings)
        config = self._config
        self._report("starting Ray")
        self._ray = RayRuntime(config, folder, verbose=self._verbose)
        self._supervisor = Supervisor(self._places(self._ray), SystemClock())
        workers = self._wait_until_serving(self._supervisor)
        self._supervisor.start()
        self._is_serving = True
        host, ports = config.gateway.host, self._ports
        return Serving(
            gateway_address=f"{host}:{ports.grpc}",
            http_address=f"{host}:{ports.http}" if ports.http >= 0 else "",
            metrics_address=(
                f"{config.telemetry.metrics_host or host}:{ports.metrics}"
                if ports.metrics >= 0
                else ""
            ),
            redis_url=config.redis.url,
            workers=workers,
        )

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

    def check_alive(self) -> None:
        """Raises InternalError when the cluster cannot mend itself any more. Call it now and then
        while it serves: the workers may go on for a while, but none can be replaced."""
        assert self._ray is not None
        if dead := self._ray.dead_parts():
            raise InternalError(f"Ray has died ({', '.join(dead)}); start again.")

    def stop(self) -> None:
        """Drains and ends everything. Safe to call again."""
        store: Process | None = None
        if self._supervisor is not None:
            self._supervisor.stop()
            store = self._supervisor.processes().get(STORE)
            if self._is_serving:
                self._report("draining")
                self._drain(self._supervisor)
            self._supervisor = None
        if self._ray is not None:
            self._report("stopping")
            self._ray.close()
            self._ray = None
        if store is not None:
            store.kill()
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
            environment.unset_variables([MARK])

    def _check(self) -> None:
        """Finds at once what would otherwise fail after half a minute."""
        config = self._config
        if not config.cluster.ray_address:
            _check_workers(config)
            folder = config.model.checkpoint()
            ModelConfig.from_checkpoint(folder)
            ModelTokenizer(folder)
        if config.redis.url:
            check_redis(config.redis)
        if not config.redis.url and not environment.is_loopback(self._host()):
            raise ConfigError(
                "redis.url is empty, but workers may run on other machines, which cannot reach "
                "an embedded store; set redis.url.",
                field="redis.url",
            )
        _check_port(config.gateway.host, "gateway.port", config.gateway.port)
        if config.gateway.http_port >= 0:
            _check_port(config.gateway.host, "gateway.http_port", config.gateway.http_port)
        telemetry = config.telemetry
        if telemetry.metrics_port >= 0:
            host = telemetry.metrics_host or config.gateway.host
            _check_port(host, "telemetry.metrics_port", telemetry.metrics_port)

    def _places(self, ray_runtime: RayRuntime) -> list[Place]:
        config = self._config
        places = [self._place(STORE, self._launch_store)] if self._has_own_store else []
        places.append(self._place(GATEWAY, self._launch_gateway))
        for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
            timeout_s = config.cluster.startup_timeout_s
            group = ray_runtime.reserve(role.value, pool, timeout_s, self._report)
            for index in range(pool.workers):
                launch = self._worker_launcher(role, index, group)
                places.append(self._place(f"{role.value}-{index}", launch))
        return places

    def _place(self, name: str, launch: Callable[[], Process]) -> Place:
        cluster = self._config.cluster
        return Place(name, launch, cluster.startup_timeout_s, cluster.stuck_s)

    def _launch_store(self) -> StoreProcess:
        assert self._folder is not None
        return StoreProcess(self._folder)

    def _launch_gateway(self) -> RayProcess:
        config = self._config
        # A gateway that is started again listens where its clients know it.
        ports = self._ports
        gateway = replace(config.gateway, port=ports.grpc, http_port=ports.http)
        telemetry = replace(config.telemetry, metrics_port=ports.metrics)
        arguments = (replace(config, gateway=gateway, telemetry=telemetry),)
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
                    self._ports = gateway
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
        processes.pop(STORE, None)
        gateway = processes.pop(GATEWAY, None)
        drain_s = self._config.cluster.drain_s
        if gateway is not None:
            _stop_together([gateway], drain_s)
        # Without the gateway nothing new comes and nothing is waited for.
        _stop_together(list(processes.values()), min(drain_s, 1.0))


def _check_workers(config: Config) -> None:
    """Raises ConfigError for a slip that would bury this machine under processes."""
    num_workers = config.prefill.workers + config.decode.workers
    most = _LOCAL_WORKERS_PER_CPU * environment.num_cpus()
    if num_workers > most:
        raise ConfigError(
            f"prefill.workers + decode.workers is {num_workers}; a local Ray starts at most {most} "
            f"on {environment.num_cpus()} cores. Join a cluster with cluster.ray_address.",
            field="prefill.workers",
        )


def _check_port(host: str, field: str, port: int) -> None:
    """Raises ConfigError when nobody could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{field} is {port}, to listen on {host!r}: {error.strerror or error}; is another "
                "gateway running? Port 0 takes a free one.",
                field=field,
            ) from error


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
