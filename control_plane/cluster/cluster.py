"""`hocket up`, without the terminal: everything is started in order, watched, and stopped.

Order: Ray, then store (embedded Valkey unless `redis.url` is set), gateway and workers side by
side. `start` returns when the gateway has sent a canary through every worker, so that the first
request finds its pair.
From then on one thread looks after them (the `Supervisor` replaces what dies, the `WorkerPools`
start and drain), and another runs the scaling loop. `stop` drains the gateway first, then the
workers, and ends every process that `start` began, in any state; what it cannot end any more,
because it was killed itself, the `Watchdog` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.autoscaler.observations import Missing
from control_plane.autoscaler.windows import GatewayCounts
from control_plane.cluster.departures import DepartureTimes
from control_plane.cluster.embedded_store import StoreProcess, store_url
from control_plane.cluster.gateway_actor import GatewayActor, GatewayPorts
from control_plane.cluster.group_process import GroupProcess
from control_plane.cluster.pools import PoolTimes, WorkerPools
from control_plane.cluster.ray_runtime import (
    ActorOptions,
    RayProcess,
    RayRuntime,
    launch_actor,
    temporary_folder,
)
from control_plane.cluster.ray_workers import RayWorkers
from control_plane.cluster.readings import ClusterObservations
from control_plane.cluster.registry import Registry
from control_plane.cluster.repeating import Repeating
from control_plane.cluster.scaling_loop import ScalingLoop, ScalingPlan
from control_plane.cluster.scaling_policy import limits_of, pool_settings, targets_of
from control_plane.cluster.scaling_store import ScalingStore
from control_plane.cluster.shut_down import stop_workers
from control_plane.cluster.sizes import Sizes, sizes_of
from control_plane.cluster.start_checks import check_before_start
from control_plane.cluster.start_up import GATEWAY, StartUp
from control_plane.cluster.supervisor import Place, Process, Supervisor
from control_plane.cluster.watchdog import MARK, Watchdog
from hocket import environment
from hocket.clock import SystemClock
from hocket.config import Config
from hocket.errors import InternalError
from hocket.types import Role, WorkerDescription

STORE = "store"
# Between looks while it serves, and between turns of the scaling loop.
_KEEP_S = 0.2
_SCALE_S = 0.5
# The workers' drain when everything stops: without the gateway nothing new comes, and nobody
# waits for an answer.
_LAST_DRAIN_S = 1.0
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What listens where. `http_address` and `admin_address` are empty when these doors are closed,
    `metrics_address`, the gateway's, when there are no metrics. `log_folder`: where the log files
    of this machine's processes are; empty when they have none."""

    gateway_address: str
    http_address: str
    admin_address: str
    metrics_address: str
    redis_url: str
    log_folder: str
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
        self._pools: WorkerPools | None = None
        self._sizes: Sizes | None = None
        self._threads: list[Repeating] = []
        self._store: ScalingStore | None = None
        self._registry: Registry | None = None
        self._clock = SystemClock()
        gateway, metrics_port = config.gateway, config.telemetry.metrics_port
        self._ports = GatewayPorts(
            gateway.port, gateway.http_port, metrics_port, gateway.admin_port
        )
        self._has_own_store = not config.redis.url
        self._is_serving = False

    def start(self) -> Serving:
        """Starts everything; returns when requests can come.

        Raises:
            HocketError: something did not start; the message says what and why. Call `stop`.
        """
        check_before_start(self._config, self._host())
        sizes = self._sizes = sizes_of(self._config)
        self._config = sizes.at_start(self._config)
        folder = self._folder = temporary_folder()
        self._watchdog = Watchdog(folder)
        environment.set_variables({MARK: str(folder)})
        self._config = with_log_folder(self._config, folder)
        if self._has_own_store:
            settings = replace(self._config.redis, url=store_url(folder))
            self._config = replace(self._config, redis=settings)
        config = self._config
        self._report("starting Ray")
        self._ray = RayRuntime(config, folder, verbose=self._verbose)
        supervisor = self._supervisor = Supervisor(self._places(), self._clock)
        host = RayWorkers(config, self._host(), self._ucx_folder())
        pools = self._pools = WorkerPools(host, supervisor, self._times(), self._clock)
        for role in Role:
            pools.start(role, pool_settings(config, role).workers)
        StartUp(config, supervisor, pools, host, self._report, self._unroutable).wait()
        gateway = supervisor.processes()[GATEWAY]
        assert isinstance(gateway, RayProcess)
        self._ports = gateway.result
        self._keep(supervisor, pools, sizes)
        self._is_serving = True
        address, ports = config.gateway.host, self._ports
        return Serving(
            gateway_address=f"{address}:{ports.grpc}",
            http_address=f"{address}:{ports.http}" if ports.http >= 0 else "",
            admin_address=(
                f"{config.gateway.admin_host}:{ports.admin}" if ports.admin >= 0 else ""
            ),
            metrics_address=(
                f"{config.telemetry.metrics_host or address}:{ports.metrics}"
                if ports.metrics >= 0
                else ""
            ),
            redis_url=config.redis.url,
            log_folder=config.telemetry.log_folder,
            workers=self._registered(),
        )

    def process_ids(self) -> dict[str, int]:
        """The process of each place that serves now; of a group, of each rank."""
        import ray

        assert self._supervisor is not None
        actors: dict[str, Any] = {}
        for name, process in self._supervisor.processes().items():
            if isinstance(process, GroupProcess):
                actors |= {rank: one.actor for rank, one in process.ranks.items()}
            elif isinstance(process, RayProcess):
                actors[name] = process.actor
        return {n: ray.get(actor.process_id.remote(), timeout=5) for n, actor in actors.items()}

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
        for thread in reversed(self._threads):
            thread.stop()
        self._threads.clear()
        if self._sizes is not None:
            self._sizes.close()
        if self._supervisor is not None:
            store = self._supervisor.processes().get(STORE)
            if self._is_serving:
                self._report("draining")
                self._drain(self._supervisor)
            self._supervisor = None
        for connection in (self._store, self._registry):
            if connection is not None:
                connection.close()
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

    def _places(self) -> list[Place]:
        """All but the workers."""
        places = [self._place(STORE, self._launch_store)] if self._has_own_store else []
        return [*places, self._place(GATEWAY, self._launch_gateway)]

    def _times(self) -> PoolTimes:
        config = self._config
        # Gateways hear at once that a worker drains; one that missed it looks every `renew_s`.
        announce_s = 2 * config.redis.renew_s
        leaving = DepartureTimes(announce_s, config.autoscaler.drain_s, config.cluster.stuck_s)
        return PoolTimes(config.cluster.startup_timeout_s, leaving)

    def _keep(self, supervisor: Supervisor, pools: WorkerPools, sizes: Sizes) -> None:
        """Has everything looked after from here on."""
        config, executor = self._config, sizes.executor(pools)
        store = self._store = ScalingStore(config.redis)
        registry = self._registry = Registry(config.redis)
        scale = config.autoscaler
        plan = ScalingPlan(scale.enabled, scale.interval_s, targets_of(config), limits_of(config))
        source = ClusterObservations(
            executor.workers, pools.ready, registry, self._gateway_counts, self._clock
        )
        loop = ScalingLoop(executor, source, store, plan, self._clock)

        def look() -> None:
            supervisor.tick()
            pools.tick()

        self._threads = [
            Repeating("supervisor", _KEEP_S, look),
            Repeating("scaling", _SCALE_S, loop.turn),
        ]
        for thread in self._threads:
            thread.start()

    def _registered(self) -> tuple[WorkerDescription, ...]:
        assert self._registry is not None
        return tuple(self._registry.workers())

    def _unroutable(self, num_workers: int) -> str:
        """Ready means routable, which the gateway knows; see `GatewayActor.unroutable`."""
        import ray

        assert self._supervisor is not None
        gateway = self._supervisor.processes()[GATEWAY]
        assert isinstance(gateway, RayProcess)
        return ray.get(gateway.actor.unroutable.remote(num_workers), timeout=2 * _ANSWER_S)

    def _gateway_counts(self) -> GatewayCounts | Missing:
        import ray
        from ray.exceptions import RayError

        assert self._supervisor is not None
        process = self._supervisor.processes().get(GATEWAY)
        if not isinstance(process, RayProcess) or process.result is None:
            return Missing("the gateway starts")
        try:
            return ray.get(process.actor.counts.remote(), timeout=_ANSWER_S)
        except RayError as error:
            return Missing(f"the gateway does not answer: {type(error).__name__}")

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
        gateway = replace(
            config.gateway, port=ports.grpc, http_port=ports.http, admin_port=ports.admin
        )
        telemetry = replace(config.telemetry, metrics_port=ports.metrics)
        arguments = (replace(config, gateway=gateway, telemetry=telemetry),)
        options = ActorOptions(GATEWAY, environment={})
        return RayProcess(GATEWAY, launch_actor(GatewayActor, arguments, options))

    def _host(self) -> str:
        """What workers bind; empty: the address of their node."""
        cluster = self._config.cluster
        return cluster.host or ("" if cluster.ray_address else "127.0.0.1")

    def _ucx_folder(self) -> Path | None:
        """Where workers leave what UCX tells; only this machine has our folder."""
        return None if self._config.cluster.ray_address else self._folder

    def _drain(self, supervisor: Supervisor) -> None:
        """Stops the gateway, then all workers at once; kills what does not stop in time."""
        import ray

        assert self._pools is not None
        drain_s = self._config.cluster.drain_s
        gateway = supervisor.processes().get(GATEWAY)
        if isinstance(gateway, RayProcess):
            ray.wait([gateway.actor.stop.remote(drain_s)], timeout=drain_s + _ANSWER_S)
            gateway.kill()
        stop_workers(self._pools.processes().values(), min(drain_s, _LAST_DRAIN_S))


def with_log_folder(config: Config, folder: Path) -> Config:
    """The configuration with `telemetry.log_folder` made absolute; left out, it is in the local
    cluster's own `folder`, which ends with it."""
    named = config.telemetry.log_folder
    if not named and config.cluster.ray_address:
        return config
    absolute = Path(named).expanduser().absolute() if named else folder / "logs"
    return replace(config, telemetry=replace(config.telemetry, log_folder=str(absolute)))
