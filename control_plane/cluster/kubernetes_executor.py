"""The autoscaler's hands on Kubernetes: worker groups of the RayCluster beside the worker pools.

`resize` grows by raising replicas, then starting workers, which wait for the new pods; it shrinks
by draining workers. `tick`, every few seconds, brings both sides together, whatever happened in
between (a restart, a lost answer, an operator's edit):

    replicas are not what we wrote   an operator's: the pool follows, the size is reported as such
    workers too few or too many      started, or drained
    replicas beyond the need         given back once they are empty, in one patch that names them

A pod is only ever named when no worker is on it, so nothing has to be remembered about drained
ones. Only the holder of the Lease acts; others look on and say whose it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.autoscaler.observations import PoolWorkers
from control_plane.cluster.kubernetes_lease import KubernetesLease
from control_plane.cluster.kubernetes_plan import (
    Needs,
    occupied_pods,
    replicas_for,
    spare_pods,
    workers_per_replica,
)
from control_plane.cluster.kubernetes_replicas import RayClusterReplicas, WorkerGroup
from control_plane.cluster.pools import Drained, NodeName
from hocket.errors import ApiUnavailable, HocketError, ResizeRefused
from hocket.types import Role

_log = logging.getLogger(__name__)


class Pools(Protocol):
    """What is needed of `WorkerPools`."""

    def workers(self, role: Role) -> PoolWorkers: ...

    def nodes(self, role: Role) -> Mapping[str, Sequence[NodeName]]: ...

    def start(self, role: Role, count: int) -> None: ...

    def drain(self, role: Role, count: int) -> None: ...

    def take_drained(self, role: Role) -> list[Drained]: ...

    def notes(self) -> tuple[str, ...]: ...


@dataclass(slots=True)
class _Written:
    """What we wrote of one pool.

    own: workers, by the autoscaler. wanted: workers, by it or by an operator through us.
    replicas: to hold them. attempted: replicas of the newest patch, if its answer was lost: should
    they turn up, they are ours.
    """

    own: int
    wanted: int
    replicas: int
    attempted: int | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A pool at the last look. `size`: workers asked for. `is_ours`: the replicas are the ones
    that we wrote."""

    group: WorkerGroup
    per_replica: int
    size: int
    written_size: int
    is_ours: bool


class KubernetesExecutor:
    """A `PoolExecutor`. `resize`, `release` and `tick` may be called from different threads;
    `workers` never waits for any of them."""

    def __init__(
        self,
        pools: Pools,
        replicas: RayClusterReplicas,
        lease: KubernetesLease,
        needs: Mapping[Role, Needs],
        found: Mapping[str, WorkerGroup],
    ) -> None:
        """`needs`: of a worker of each pool. `found`: the groups as they were last seen; their
        sizes count as written. Raises ConfigError when one has no room for a worker."""
        self._pools = pools
        self._replicas = replicas
        self._lease = lease
        self._needs = dict(needs)
        self._lock = threading.Lock()
        self._said = ""
        self._leads = False
        self._written: dict[Role, _Written] = {}
        self._seen: dict[Role, _Seen] = {}
        self._take(found)

    def workers(self, role: Role) -> PoolWorkers:
        seen = self._seen[role]
        return replace(self._pools.workers(role), size=seen.size, written_size=seen.written_size)

    def resize(self, role: Role, size: int) -> None:
        with self._lock:
            self._move(role, size, is_own=True)

    def edit(self, role: Role, size: int) -> None:
        with self._lock:
            self._move(role, size, is_own=False)

    def release(self, role: Role) -> None:
        with self._lock:
            seen = self._seen[role]
            self._written[role] = _Written(seen.size, seen.size, seen.group.replicas)
            self._show(role, seen.group, seen.per_replica)

    def notes(self) -> tuple[str, ...]:
        own = (f"Kubernetes: {self._said}",) if self._said else ()
        return (*own, *self._pools.notes())

    def tick(self) -> None:
        """One look, and what follows from it. Outages are logged once, and waited for."""
        with self._lock:
            try:
                self._lease.renew()
                self._take(self._replicas.read(*(role.value for role in self._needs)))
                for role, seen in self._seen.items():
                    for gone in self._pools.take_drained(role):
                        _log.info("%s has left %s", gone.name, [n.hostname for n in gone.nodes])
                    if self._leads:
                        self._match(role, seen)
                        self._let_off(role, seen)
                        self._give_back(role, self._seen[role])
                words = f"sizes are {self._lease.holder or 'nobody'}'s to change"
                self._say("" if self._leads else words)
            except HocketError as error:
                self._say(str(error))

    def close(self) -> None:
        """Lets another launcher take over at once."""
        with self._lock:
            try:
                self._lease.release()
            except HocketError as error:
                _log.info("the lease was not released, it runs out: %s", error)

    def _take(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Takes note of what is there, and over what turns out to be ours.

        Who does not lead, or did not at the last look, takes over everything: what is there is
        what the leader wrote.
        """
        leads = self._lease.is_held()
        if not (leads and self._leads):
            self._written.clear()
        self._leads = leads
        for role, needs in self._needs.items():
            group = groups[role.value]
            per_replica = workers_per_replica(group, needs)
            found = group.size * per_replica
            written = self._written.setdefault(role, _Written(found, found, group.replicas))
            # An edit to the very size that we wrote is none.
            if written.attempted == group.replicas or written.wanted == found:
                written.replicas, written.attempted = group.replicas, None
            self._show(role, group, per_replica)

    def _show(self, role: Role, group: WorkerGroup, per_replica: int) -> None:
        """What `workers` tells from now on."""
        written, most = self._written[role], group.size * per_replica
        is_ours = group.replicas == written.replicas
        # Fewer than wanted where the limits were lowered meanwhile.
        size = min(written.wanted, most) if is_ours else most
        self._seen[role] = _Seen(group, per_replica, size, written.own, is_ours)

    def _move(self, role: Role, size: int, *, is_own: bool) -> None:
        """Raises replicas where that takes any, then starts or drains workers."""
        if not (self._leads and self._lease.is_held()):
            holder = self._lease.holder or "nobody"
            raise ResizeRefused(f"sizes are {holder}'s to change, who holds the lease.")
        seen, written = self._seen[role], self._written[role]
        group, per_replica = seen.group, seen.per_replica
        # More would wait for pods that KubeRay never makes.
        size = min(size, group.clamped(group.max_replicas) * per_replica)
        # Draining workers keep their room until they are gone.
        draining = self._pools.workers(role).draining
        needed = group.clamped(replicas_for(size + draining, per_replica))
        replicas = max(needed, group.size)
        if replicas != group.replicas:
            let_off = list(group.condemned.values())[: replicas - group.size]
            pods = [pod for replica in let_off for pod in replica]
            self._write(role, replicas, expected=group.replicas, staying=pods)
        written.own = size if is_own else written.own
        written.wanted, written.replicas = size, replicas
        self._show(role, replace(group, replicas=replicas), per_replica)
        self._match(role, self._seen[role])

    def _match(self, role: Role, seen: _Seen) -> None:
        """As many workers as the size says."""
        have = self._pools.workers(role)
        if have.size < seen.size:
            self._pools.start(role, seen.size - have.size)
        elif have.size > seen.size and (seen.is_ours or have.ready <= seen.size):
            # KubeRay takes pods of its choice when an operator lowers replicas: their workers are
            # the ones too many, not others that serve.
            self._pools.drain(role, have.size - seen.size)

    def _let_off(self, role: Role, seen: _Seen) -> None:
        """Takes back the names of pods that KubeRay has not come to, and Ray has placed a worker
        on. They count again: replicas must not be fewer, or KubeRay takes any."""
        group = seen.group
        if not group.condemned:
            return
        occupied = occupied_pods(group, self._pools.nodes(role).values())
        let_off = [pods for pods in group.condemned.values() if occupied.intersection(pods)]
        if not let_off:
            return
        replicas = group.replicas
        if seen.is_ours:
            replicas = max(replicas, group.clamped(group.num_staying + len(let_off)))
        pods = [pod for replica in let_off for pod in replica]
        self._write(role, replicas, expected=group.replicas, staying=pods)
        if seen.is_ours:
            self._written[role].replicas = replicas
        self._show(role, replace(group, replicas=replicas), seen.per_replica)

    def _give_back(self, role: Role, seen: _Seen) -> None:
        """Lowers replicas by those that are not needed and empty by now."""
        if not seen.is_ours:
            return
        group = seen.group
        have = self._pools.workers(role)
        needed = group.clamped(
            replicas_for(max(seen.size, have.size) + have.draining, seen.per_replica)
        )
        spare = group.size - needed
        pods = spare_pods(group, self._pools.nodes(role).values(), spare) if spare > 0 else ()
        if pods:
            wanted = group.size - len(pods) // group.pods_per_replica
            _log.info("%s: %d → %d replicas, %s go", group.name, group.replicas, wanted, pods)
            self._write(role, wanted, expected=group.replicas, leaving=pods)
            self._written[role].replicas = wanted
            self._show(role, replace(group, replicas=wanted), seen.per_replica)

    def _write(
        self,
        role: Role,
        replicas: int,
        *,
        expected: int,
        leaving: Sequence[str] = (),
        staying: Sequence[str] = (),
    ) -> None:
        written = self._written[role]
        written.attempted = replicas
        try:
            self._replicas.resize(
                role.value, replicas, expected=expected, leaving=leaving, staying=staying
            )
        except ApiUnavailable:
            # Perhaps it was carried out: the next look will tell.
            raise
        except HocketError:
            written.attempted = None
            raise
        written.attempted = None

    def _say(self, words: str) -> None:
        """Logs what stands in the way, once, and that it is over."""
        if words != self._said:
            _log.warning("Kubernetes: %s", words or "sizes are ours to change again")
            self._said = words
