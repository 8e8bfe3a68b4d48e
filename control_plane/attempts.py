"""Where a request is placed, and where again when a worker refused or lost it.

`request_flow` places every request through `Attempts`. What is left of it another pair of workers
can do, with the output so far as part of the prompt: same seed, and from batch-invariant workers
the same tokens. The worker that failed gets no second chance, its group neither when it is gone; a
failed hand-off may be either side's fault.
"""

from __future__ import annotations

from dataclasses import replace

from control_plane.router.pool import WorkerPool
from control_plane.router.snapshot import Need, Placement
from hocket.errors import HandOffFailed, HocketError, Overloaded
from hocket.types import Leg, WorkerDescription

# In a row, without a step of decode. The first token of an attempt does not count as one: whoever
# kills workers or finds them full would get that from prefill alone, again and again.
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
        self._whole = self.need = need
        # When the present attempt began.
        self._num_emitted = 0
        self._tries = 1
        self.number = 0
        self.placement = pool.place(need)

    def next(self, failed: LegFailed, *, num_emitted: int) -> None:
        """Places what is left after so many tokens of output, on other workers; once there are any,
        of the same fingerprint.

        Raises the failed worker's error when it would be the same elsewhere, when nobody else can
        take the request, and after MAX_ATTEMPTS without a step.
        """
        avoid = self.need.avoid
        if num_emitted > self._num_emitted + 1:
            # Who failed it before may be alive again by now.
            self._tries, avoid = 1, frozenset[str]()
        self._num_emitted = num_emitted
        if failed.error.is_retryable and self._tries < MAX_ATTEMPTS:
            for names in suspects(self.placement, failed):
                need = replace(
                    self._whole,
                    prompt_tokens=self._whole.prompt_tokens + num_emitted,
                    max_tokens=self._whole.max_tokens - num_emitted,
                    avoid=avoid | names,
                    fingerprint=self.placement.prefill.fingerprint if num_emitted else None,
                )
                try:
                    self.placement = self._pool.place(need)
                except HocketError:
                    continue
                self.need = need
                self.number += 1
                self._tries += 1
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
