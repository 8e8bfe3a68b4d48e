"""Workers on Ray: a placement group for each, an actor for each rank.

The host (`pools.WorkerHost`) of the worker pools. A placement group is asked for without waiting;
Ray grants it when its nodes have room, now or after more have come. Actors are named by import
path, so the control plane never imports a worker package.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from control_plane.cluster.group_process import GroupProcess
from control_plane.cluster.pools import NodeName, Reservation
from control_plane.cluster.ray_runtime import ActorOptions, RayProcess, bundle_of, launch_actor
from control_plane.cluster.scaling_policy import num_ranks, pool_settings
from control_plane.cluster.worker_actor import WorkerActor
from hocket import environment
from hocket.clock import new_epoch
from hocket.config import Config, PlacementSettings, worker_settings
from hocket.errors import ConfigError
from hocket.types import Role

_ENTRIES = {
    Role.PREFILL: "prefill_workers.server:WorkerProcess",
    Role.DECODE: "decode_workers.server:WorkerProcess",
}


class RayReservation:
    """The placement group of one worker, one bundle for each rank."""

    def __init__(self, placement: PlacementSettings, num_ranks: int) -> None:
        """Asks Ray for it; returns at once."""
        from ray.util.placement_group import placement_group

        self._bundle = bundle_of(placement)
        self._num_ranks = num_ranks
        self._labels = dict(placement.labels)
        self.group: Any = placement_group(
            bundles=[self._bundle] * num_ranks,
            # Without more, Ray packs bundles onto as few nodes as it can.
            topology_strategy={placement.together: "STRICT_PACK"} if placement.together else {},
            bundle_label_selector=[self._labels] * num_ranks,
        )

    def has_room(self) -> bool:
        return self._table().get("state") == "CREATED"

    def wanted(self) -> str:
        return wanted(1, self._num_ranks, self._bundle, self._labels)

    def nodes(self) -> tuple[NodeName, ...]:
        import ray

        known = {node["NodeID"]: node for node in ray.nodes()}
        ids = dict.fromkeys(self._table().get("bundles_to_node_id", {}).values())
        return tuple(
            NodeName(known[i]["NodeManagerHostname"], known[i]["NodeManagerAddress"])
            for i in ids
            if i in known
        )

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self.group)

    def _table(self) -> dict[str, Any]:
        from ray.util.placement_group import placement_group_table

        return placement_group_table(self.group)


class RayWorkers:
    """Makes the workers of both pools."""

    def __init__(self, config: Config, host: str, log_folder: Path | None) -> None:
        """`host`: what workers bind; empty: the address of their node. `log_folder`: for what UCX
        tells; None where workers do not share this machine."""
        self._config = config
        self._host = host
        self._log_folder = log_folder

    def reserve(self, role: Role) -> RayReservation:
        """Asks Ray for room for one more worker."""
        placement = pool_settings(self._config, role).placement
        return RayReservation(placement, num_ranks(self._config, role))

    def launch(self, role: Role, index: int, reservation: Reservation) -> GroupProcess:
        """Begins a new life of a worker: all ranks at once, under one epoch."""
        assert isinstance(reservation, RayReservation), reservation
        config, epoch = self._config, new_epoch()
        pool = pool_settings(config, role)
        threads = pool.threads or self._threads(pool.placement.num_cpus)
        variables = environment.worker_environment(
            config.transfer.tls, self._host, threads, self._log_folder
        )
        ranks: dict[str, RayProcess] = {}
        for rank in range(num_ranks(config, role)):
            settings = worker_settings(config, role, index, epoch=epoch, rank=rank)
            settings = replace(settings, threads=threads, host=self._host)
            options = ActorOptions(
                settings.worker_id,
                variables,
                group=reservation.group,
                bundle=rank,
                num_cpus=pool.placement.num_cpus,
                num_gpus=pool.placement.num_gpus,
                resources=pool.placement.resources,
            )
            arguments = (_ENTRIES[role], settings, config.redis)
            actor = launch_actor(WorkerActor, arguments, options)
            ranks[settings.worker_id] = RayProcess(settings.worker_id, actor)
        return GroupProcess(ranks)

    def can_ever_fit(self, role: Role, count: int) -> bool:
        """Whether Ray's nodes, were they empty, hold `count` workers. False is final on a local
        Ray, to which nothing is added."""
        import ray

        has = ray.cluster_resources()
        times = count * num_ranks(self._config, role)
        bundle = bundle_of(pool_settings(self._config, role).placement)
        return all(amount * times <= has.get(kind, 0.0) for kind, amount in bundle.items())

    def wanted(self, role: Role, count: int) -> str:
        """What `count` workers ask for, in words."""
        placement = pool_settings(self._config, role).placement
        ranks = num_ranks(self._config, role)
        return wanted(count, ranks, bundle_of(placement), placement.labels)

    def no_room(self, role: Role, count: int) -> ConfigError:
        """The error for `count` workers that Ray has no room for."""
        import ray

        has = ray.cluster_resources()
        bundle = bundle_of(pool_settings(self._config, role).placement)
        there = {kind: has.get(kind, 0.0) for kind in bundle}
        return ConfigError(
            f"{role.value}.placement: Ray has no room for {self.wanted(role, count)}; it has "
            f"{there} in all.",
            field=f"{role.value}.placement",
        )

    def _threads(self, cpus: float) -> int:
        """Compute threads of a worker that is not told."""
        config = self._config
        if config.cluster.ray_address:
            return max(1, int(cpus))
        ranks = sum(pool_settings(config, r).workers * num_ranks(config, r) for r in Role)
        return max(1, environment.num_cpus() // ranks)


def wanted(count: int, num_ranks: int, bundle: dict[str, float], labels: dict[str, str]) -> str:
    """What is asked of Ray, in words."""
    ranks = f" x {num_ranks} ranks" if num_ranks > 1 else ""
    return f"{count}{ranks} x {bundle} with labels {labels}"
