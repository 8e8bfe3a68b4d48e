"""Readiness is routability: a worker gets requests once a canary has passed it.

`Readiness` looks at the workers of the pool and sends a canary (`control_plane.canary`) through
each new one, or new life of one: prefill together with a decode worker that it can pair with, a
proven one if there is any; in aggregated serving decode alone. How it ended is kept in
`router.proofs`, which the router's filters read. One that fails is tried again after a pause,
longer each time, with another partner if there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.canary import Canary, CanaryFailed, canary_need
from control_plane.legs import Legs
from control_plane.router import filters
from control_plane.router.pool import WorkerPool
from control_plane.router.proofs import WAITS, Proofs
from control_plane.router.route import difference
from control_plane.router.snapshot import Need, Placement, WorkerSnapshot
from control_plane.turns import Turns
from hocket.telemetry import RoutingMetrics
from hocket.types import Role, WorkerDescription

logger = logging.getLogger(__name__)

_REACHABLE = (
    filters.is_listed,
    filters.is_connected,
    filters.is_not_draining,
    filters.speaks_our_protocol,
)
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class CanaryTimes:
    """timeout_s: for a canary from start to end. look_s: between looks while a worker is not
    proven. pause_s, most_pause_s: before a failed worker is tried again, doubled each time."""

    timeout_s: float = 10.0
    look_s: float = 0.02
    pause_s: float = 0.25
    most_pause_s: float = 5.0


@dataclass(slots=True)
class _Trial:
    """What a life of a worker has been through."""

    epoch: int
    failures: int = 0
    due_s: float = 0.0
    is_on_the_way: bool = False
    told: str = ""


_Subject = tuple[WorkerDescription, _Trial]
"""A worker that a canary is to prove."""


class Readiness:
    """Sends the canaries of one gateway. Lives on its event loop."""

    def __init__(
        self,
        pool: WorkerPool,
        proofs: Proofs,
        metrics: RoutingMetrics,
        *,
        is_aggregated: bool,
        vocabulary_size: int,
        times: CanaryTimes | None = None,
    ) -> None:
        self._pool = pool
        self._proofs = proofs
        self._metrics = metrics
        self._is_aggregated = is_aggregated
        self._vocabulary_size = vocabulary_size
        self._times = times or CanaryTimes()
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._loop)
        self._trials: dict[str, _Trial] = {}
        self._flights: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    def changed(self) -> None:
        """The directory has altered; call it after the pool's own `refresh`."""
        self._news.set()

    async def run(self) -> None:
        """Sends canaries until cancelled; those on the way are then given up."""
        try:
            while True:
                self._news.clear()
                is_done = self.look()
                if is_done:
                    await self._news.wait()
                else:
                    await asyncio.sleep(self._times.look_s)
        finally:
            for flight in self._flights:
                flight.cancel()
            await asyncio.gather(*self._flights, return_exceptions=True)

    def look(self) -> bool:
        """Sends canaries to whom they are due; True when every listed worker is proven."""
        listed = [s for s in self._pool.snapshots() if s.is_listed]
        self._forget_all_but(listed)
        unproven = [s for s in listed if s.kept_out]
        for role in Role:
            number = sum(s.worker.role is role for s in unproven)
            self._metrics.kept_out.labels(role.value).set(number)
        reachable, _ = filters.split(listed, _REACHABLE, Need(1, 1))
        for subject in reachable:
            trial = self._trial(subject.worker)
            is_due = trial.due_s <= self._loop.time() and not trial.is_on_the_way
            if subject.kept_out and is_due:
                self._try(subject, trial, reachable)
        return not unproven

    def _try(
        self, subject: WorkerSnapshot, trial: _Trial, reachable: Sequence[WorkerSnapshot]
    ) -> None:
        """Sends a canary through a worker, if there is a partner for it."""
        if self._is_aggregated:
            self._send(Placement(subject.worker, subject.worker))
            return
        role = _OTHER[subject.worker.role]
        others = [s for s in reachable if s.worker.role is role]
        partners = [s for s in others if not difference(subject.worker, s.worker)]
        proven = [s for s in partners if not s.kept_out]
        free = [s for s in partners if not self._trial(s.worker).is_on_the_way]
        if candidates := proven or free:
            # Another one each time: it may be the partner that is broken.
            partner = candidates[trial.failures % len(candidates)].worker
            if role is Role.PREFILL:
                self._send(Placement(partner, subject.worker))
            else:
                self._send(Placement(subject.worker, partner))
        elif not others:
            self._proofs.failed(subject.worker, f"{WAITS}: no {role.value} worker is there yet")
        elif not partners:
            example = others[0].worker
            why = f"differs from {example.worker_id} in {difference(subject.worker, example)}"
            why = f"can pair with no {role.value} worker: it {why}"
            self._keep_out(subject.worker, trial, why)

    def _send(self, placement: Placement) -> None:
        """Sends it now; how it ends is noted later."""
        deadline_s = self._loop.time() + self._times.timeout_s
        need = canary_need(placement)
        canary = Canary(
            Legs(self._pool, self._turns, placement, need, deadline_s),
            need,
            vocabulary_size=self._vocabulary_size,
            timeout_s=self._times.timeout_s,
        )
        pair = (placement.decode,) if placement.is_whole else (placement.prefill, placement.decode)
        subjects = [(w, self._trial(w)) for w in pair if self._proofs.kept_out(w)]
        for _, trial in subjects:
            trial.is_on_the_way = True
        flight = asyncio.create_task(self._follow(canary, subjects))
        self._flights.add(flight)
        flight.add_done_callback(self._flights.discard)

    async def _follow(self, canary: Canary, subjects: Sequence[_Subject]) -> None:
        began_s = self._loop.time()
        try:
            await canary.arrive()
        except CanaryFailed as failed:
            self._metrics.canaries.labels("failed").inc()
            for worker, trial in subjects:
                self._fail(worker, trial, str(failed))
        else:
            self._metrics.canaries.labels("passed").inc()
            for worker, _ in subjects:
                self._proofs.passed(worker)
            names = ", ".join(worker.worker_id for worker, _ in subjects)
            logger.info("a canary passed %s in %.3f s", names, self._loop.time() - began_s)
        finally:
            for _, trial in subjects:
                trial.is_on_the_way = False

    def _fail(self, worker: WorkerDescription, trial: _Trial, why: str) -> None:
        pause_s = min(self._times.pause_s * 2**trial.failures, self._times.most_pause_s)
        trial.failures += 1
        trial.due_s = self._loop.time() + pause_s
        self._keep_out(worker, trial, f"failed its canary: {why}")

    def _keep_out(self, worker: WorkerDescription, trial: _Trial, why: str) -> None:
        """Notes why, and warns: once, and again when the reason is another."""
        self._proofs.failed(worker, why)
        if trial.told != why:
            trial.told = why
            logger.warning("%s gets no requests: it %s", worker.worker_id, why)

    def _trial(self, worker: WorkerDescription) -> _Trial:
        trial = self._trials.get(worker.worker_id)
        if trial is None or trial.epoch != worker.epoch:
            trial = self._trials[worker.worker_id] = _Trial(worker.epoch)
        return trial

    def _forget_all_but(self, listed: Sequence[WorkerSnapshot]) -> None:
        names = {snapshot.name for snapshot in listed}
        self._proofs.keep_only(names)
        self._trials = {name: trial for name, trial in self._trials.items() if name in names}
