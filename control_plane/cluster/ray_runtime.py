"""Ray, as far as Hocket uses it: start or join a cluster, place processes, watch them.

Locally, Ray runs on loopback with its own short temporary folder, without dashboard and usage
statistics, and everything it started ends with it. `RayProcess` is one actor seen by the
supervisor; `ray_workers.py` makes workers of them. Ray reads its environment when it is imported,
so imports stand inside functions here.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.cluster.scaling_policy import most_workers, num_ranks
from control_plane.cluster.supervisor import PROCESS_DIED, Health
from hocket import environment
from hocket.config import Config, PlacementSettings
from hocket.errors import ConfigError, HocketError, InternalError
from hocket.types import Role

_log = logging.getLogger(__name__)

_GATEWAY_CPUS = 0.1
_VITAL_PARTS = ("raylet", "gcs_server")
# Socket paths end at 107 characters; our folder adds 12 and Ray 65 (with a process id of 7 digits).
_LONGEST_TEMP_PATH = 30
# Ray's smallest; nothing of ours goes through its object store.
_OBJECT_STORE_BYTES = 80 * 2**20


def temporary_folder() -> Path:
    """A new folder whose path is short enough for Ray's sockets."""
    usual = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="hk-", dir=usual if len(usual) <= _LONGEST_TEMP_PATH else "/tmp")
    )


class RayRuntime:
    """A connection to Ray."""

    def __init__(self, config: Config, folder: Path, *, verbose: bool) -> None:
        """Starts a local Ray that keeps its files in `folder`, or joins the one at
        `cluster.ray_address`.

        Raises:
            ConfigError: labels are asked of a local Ray, or the address does not answer.
            InternalError: a local Ray did not start.
        """
        environment.prepare_ray()
        import ray

        address = config.cluster.ray_address
        common: dict[str, Any] = {
            "log_to_driver": verbose,
            "logging_level": logging.INFO if verbose else logging.ERROR,
            "namespace": config.redis.prefix,
        }
        if address:
            try:
                ray.init(address=address, **common)
            except ConnectionError as error:
                raise ConfigError(
                    f"cluster.ray_address is {address!r}: {error}", field="cluster.ray_address"
                ) from error
            return
        _refuse_local_labels(config)
        cpus, resources = _local_resources(config)
        try:
            # "local": never one that happens to run here, whatever the environment says.
            ray.init(
                address="local",
                num_cpus=cpus,
                resources=resources,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
                **common,
            )
        except BaseException as error:
            # Also when a signal interrupts it half-way.
            self.close()
            if not isinstance(error, Exception):
                raise
            # Ray gives itself half a minute and then raises a plain Exception.
            text = f"Ray did not start ({error}); is this machine overloaded? Start again."
            raise InternalError(text) from error

    def dead_parts(self) -> list[str]:
        """Processes of a local Ray without which it cannot go on, and that have died: "raylet",
        "gcs_server". They are not started again; a cluster that was joined has others who care."""
        from ray._private import worker

        node: Any = worker._global_node
        if node is None:
            return []
        return [kind for kind, _ in node.dead_processes() if kind in _VITAL_PARTS]

    def close(self) -> None:
        """Leaves Ray; a local one ends with all its processes. Safe to call again."""
        import ray

        ray.shutdown()


def bundle_of(placement: PlacementSettings) -> dict[str, float]:
    """What one worker takes from Ray's books. Never empty: Ray refuses an empty bundle."""
    bundle = {"CPU": placement.num_cpus, "GPU": placement.num_gpus, **placement.resources}
    return {name: amount for name, amount in bundle.items() if amount > 0} or {"CPU": 0.001}


def _local_resources(config: Config) -> tuple[int, dict[str, float]]:
    """A local Ray is given whatever CPUs and custom resources the pools ask of it when they are
    as large as they may become."""
    cpus, resources = float(_GATEWAY_CPUS), dict[str, float]()
    for role, pool in ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode)):
        processes = most_workers(config, role) * num_ranks(config, role)
        for name, amount in bundle_of(pool.placement).items():
            if name == "CPU":
                cpus += amount * processes
            elif name != "GPU":
                resources[name] = resources.get(name, 0.0) + amount * processes
    return max(environment.num_cpus(), math.ceil(cpus)), resources


def _refuse_local_labels(config: Config) -> None:
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if pool.placement.labels:
            raise ConfigError(
                f"{name}.placement.labels is {pool.placement.labels}, but a local Ray has one "
                "node without labels; set cluster.ray_address or leave the labels out.",
                field=f"{name}.placement.labels",
            )


@dataclass(frozen=True, slots=True)
class ActorOptions:
    """Where and with which environment an actor runs. `group` None: on this very machine."""

    name: str
    environment: Mapping[str, str]
    group: Any = None
    bundle: int = 0
    num_cpus: float = _GATEWAY_CPUS
    num_gpus: float = 0.0
    resources: Mapping[str, float] | None = None


def launch_actor(kind: type[Any], arguments: tuple[Any, ...], options: ActorOptions) -> Any:
    """Creates the actor; its methods may run at once in several threads."""
    import ray
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )

    if options.group is None:
        here = ray.get_runtime_context().get_node_id()
        where: Any = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
    else:
        where = PlacementGroupSchedulingStrategy(
            placement_group=options.group,
            placement_group_bundle_index=options.bundle,
        )
    actor_class: Any = ray.remote(kind)
    return actor_class.options(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        resources=dict(options.resources or {}),
        max_restarts=0,
        max_concurrency=8,
        scheduling_strategy=where,
        runtime_env={"env_vars": dict(options.environment)},
    ).remote(*arguments)


class RayProcess:
    """One life of an actor that has `start`, `pulse`, `wait_until_closed` and `stop`; workers have
    `drain` too."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor
        self._started = actor.start.remote()
        self._closed = actor.wait_until_closed.remote()
        self._pulse: Any = None
        self._drain: Any = None
        self._has_drained = False
        self._stop: Any = None
        self._result: Any = None
        self._fault = ""

    def look(self) -> Health:
        import ray

        if self._fault:
            return Health.DEAD
        if _is_ready(self._closed):
            return self._dead("it ended", self._closed)
        if self._result is None:
            if not _is_ready(self._started):
                return Health.STARTING
            try:
                self._result = ray.get(self._started)
            except Exception as error:
                return self._dead(_cause(error), None)
            return Health.SERVING
        if self._pulse is None:
            self._pulse = self.actor.pulse.remote()
        if not _is_ready(self._pulse):
            return Health.SILENT
        pulse, self._pulse = self._pulse, None
        try:
            is_alive = ray.get(pulse)
        except Exception as error:
            return self._dead(_cause(error), None)
        return Health.SERVING if is_alive else self._dead("its engine has ended", None)

    @property
    def actor(self) -> Any:
        """The Ray actor that it is."""
        return self._actor

    @property
    def result(self) -> Any:
        """What `start` returned; None while it has not."""
        return self._result

    def why(self) -> str:
        return self._fault

    def kill(self) -> None:
        import ray

        ray.kill(self.actor)

    def begin_drain(self, announce_s: float, drain_s: float) -> None:
        self._has_drained = False
        self._drain = self.actor.drain.remote(announce_s, drain_s)

    def is_drained(self) -> bool:
        if self._drain is not None and _is_ready(self._drain):
            drain, self._drain = self._drain, None
            self._has_drained = True
            self._tell_drain(drain)
        return self._has_drained

    def begin_stop(self) -> None:
        self._stop = self.actor.stop.remote()

    def has_stopped(self) -> bool:
        return self._stop is not None and _is_ready(self._stop)

    def _tell_drain(self, drain: Any) -> None:
        """Logs what a drain had to leave undone."""
        import ray

        try:
            failed = ray.get(drain)
        except Exception as error:
            _log.warning("%s could not be drained: %s", self._name, _cause(error))
            return
        if failed:
            _log.warning("%s: %d requests were there for too long, they fail", self._name, failed)

    def _dead(self, fault: str, ended: Any) -> Health:
        import ray

        if ended is not None:
            try:
                ray.get(ended)
            except Exception as error:
                fault = _cause(error)
        self._fault = fault
        return Health.DEAD


def _is_ready(reference: Any) -> bool:
    import ray

    ready, _ = ray.wait([reference], timeout=0)
    return bool(ready)


def _cause(error: Exception) -> str:
    """One line: our own error as it was raised in the actor, or what Ray knows."""
    from ray.exceptions import ActorDiedError

    cause = getattr(error, "cause", None) or error
    if isinstance(cause, HocketError):
        return str(cause)
    if isinstance(cause, ActorDiedError):
        return PROCESS_DIED
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0]}"
