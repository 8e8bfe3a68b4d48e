"""Where a request is placed, and where again when a worker refused or lost it.

`request_flow` places every request through `Attempts`. As long as decode has not joined, another
pair of workers can do all of it once more: same seed, same tokens, and what the client has already
seen is told apart by its index. The worker that failed gets no second chance, its group neither
when it is gone; a failed hand-off may be either side's fault.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.router.pool import WorkerPool
from control_plane.router.snapshot import Need, Placement
from hocket.errors import HandOffFailed, HocketError, Overloaded
from hocket.types import Leg, WorkerDescription

MAX_ATTEMPTS = 4


class LegFailed(Exception):
    """A worker ended its leg before its time; `error` is what it said."""

    def __init__(self, leg: Leg, error: HocketError) -> None:
        super().__init__(f"{leg.value}: {error}")
        self.leg = leg
        self.error = error


class Attempts:
    """The placements of one request, one after the other; `number` counts from 0."""

    def __init__(self, pool: WorkerPool, need: Need) -> None:
        """Places the first. Raises WorkerUnavailable or InvalidRequest; see `router.route`."""
        self._pool = pool
        self.need = need
        self.number = 0
        self.placement = pool.place(need)

    def next(self, failed: LegFailed, *, must_agree: bool) -> None:
        """Places the next, on other workers; `must_agree`: of the same fingerprint, because the
        output has begun. Raises the failed worker's error when it would be the
        same elsewhere, when nobody else can take the request, and after MAX_ATTEMPTS."""
        if failed.error.is_retryable and self.number + 1 < MAX_ATTEMPTS:
            fingerprint = self.placement.prefill.fingerprint if must_agree else None
            for names in suspects(self.placement, failed):
                avoid = self.need.avoid | names
                need = replace(self.need, avoid=avoid, fingerprint=fingerprint)
                try:
                    self.placement = self._pool.place(need)
                except HocketError:
                    continue
                self.need = need
                self.number += 1
                return
        raise failed.error


def suspects(placement: Placement, failed: LegFailed) -> tuple[frozenset[str], ...]:
    """Whom to avoid, as names of workers or groups; the first choice is the safest."""
    prefill, decode = placement.prefill, placement.decode
    if isinstance(failed.error, HandOffFailed):
        both = frozenset({prefill.worker_id, decode.worker_id})
        return both, frozenset({prefill.worker_id}), frozenset({decode.worker_id})
    worker = prefill if failed.leg is Leg.PREFILL else decode
    return (frozenset({_lost_with(worker, failed.error)}),)


def _lost_with(worker: WorkerDescription, error: HocketError) -> str:
    """A full queue is one worker's; who drains or dies does so with its whole group."""
    return worker.worker_id if isinstance(error, Overloaded) else worker.group or worker.worker_id
