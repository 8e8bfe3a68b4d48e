"""From launched to serving: everything is brought up, and what is waited for is told.

`Cluster.start` has made the places and asked for the workers' room; here both are ticked until the
gateway lists every worker and canaries have passed them, so that the first request finds its pair.
The first process that fails for a reason ends it: that is most likely everyone's. One that dies
without a word, as on a machine or in a Ray that is overloaded, is started again, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from control_plane.cluster.pools import WorkerPools
from control_plane.cluster.ray_workers import RayWorkers
from control_plane.cluster.scaling_policy import num_ranks, pool_settings
from control_plane.cluster.supervisor import PROCESS_DIED, Supervisor
from hocket.config import Config
from hocket.errors import InternalError
from hocket.types import Role

GATEWAY = "gateway"
MAX_RESTARTS = 1
_LOOK_S = 0.05
# A local Ray grants what it has within this time, and never grows.
_LOCAL_ROOM_S = 2.0


class StartUp:
    """One start of a cluster."""

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        pools: WorkerPools,
        host: RayWorkers,
        report: Callable[[str], None],
        unroutable: Callable[[int], str],
    ) -> None:
        """`report` is told what is waited for; what it raises, on a signal, ends the wait.
        `unroutable`: asks the gateway why requests cannot reach so many workers, "" if they can."""
        self._config = config
        self._supervisor = supervisor
        self._pools = pools
        self._host = host
        self._report = report
        self._unroutable = unroutable
        self._sizes = {role: pool_settings(config, role).workers for role in Role}
        self._ranks = sum(n * num_ranks(config, role) for role, n in self._sizes.items())

    def wait(self) -> None:
        """Returns when requests can come.

        Raises:
            ConfigError: Ray has no room for a pool.
            InternalError: a process failed, or the time is over.
        """
        began = time.monotonic()
        limit_s = self._config.cluster.startup_timeout_s
        names = [GATEWAY, *(f"{r.value}-{i}" for r, n in self._sizes.items() for i in range(n))]
        while True:
            for failed in self._supervisor.tick():
                restarts = self._supervisor.restarts(failed.name)
                if failed.reason.endswith(PROCESS_DIED) and restarts <= MAX_RESTARTS:
                    self._report(f"starting {failed.name} again: {failed.reason}")
                    continue
                raise InternalError(f"{failed.name} did not start: {failed.reason}")
            self._pools.tick()
            waited_s = time.monotonic() - began
            serving = [name for role in Role for name in self._pools.ready(role)]
            serving += [GATEWAY] if self._supervisor.is_serving(GATEWAY) else []
            missing = [name for name in names if name not in serving]
            fault = "" if missing else self._unroutable(self._ranks)
            waiting = _waiting_for(missing, fault)
            if not self._waits_for_room(waited_s):
                self._report(waiting)
            if not missing and not fault:
                return
            if waited_s > limit_s:
                raise InternalError(
                    f"not serving after {limit_s:g} s (cluster.startup_timeout_s): {waiting}."
                )
            time.sleep(_LOOK_S)

    def _waits_for_room(self, waited_s: float) -> bool:
        """Whether Ray still looks for room; says so. Raises ConfigError when it will not find it:
        the time is over, or it is a local one, which never grows."""
        is_waiting = False
        for role, count in self._sizes.items():
            if not self._pools.without_room(role):
                continue
            cluster, host = self._config.cluster, self._host
            is_local = not cluster.ray_address
            is_final = is_local and waited_s > _LOCAL_ROOM_S and not host.can_ever_fit(role, count)
            if is_final or waited_s > cluster.startup_timeout_s:
                raise host.no_room(role, count)
            self._report(f"waiting for room in Ray for {role.value}: {host.wanted(role, count)}")
            is_waiting = True
        return is_waiting


def _waiting_for(missing: list[str], fault: str) -> str:
    if missing:
        return f"waiting for {', '.join(missing)}"
    return f"waiting for the router: {fault}" if fault else "waiting for the router"
