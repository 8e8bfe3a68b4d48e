"""Which workers a canary has passed: only these get requests.

`control_plane.canary` writes down here how its canaries ended, `pool.WorkerPool` puts what it reads
into the snapshots. A proof is of one life (epoch) of a worker; the next life needs its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hocket.types import Role, WorkerDescription

WAITS = "waits for its canary"


@dataclass(frozen=True, slots=True)
class _Proof:
    epoch: int
    kept_out: str


class Proofs:
    """What is known of the present lives of all workers."""

    def __init__(self, roles: Collection[Role] = tuple(Role)) -> None:
        """Workers of other roles are not asked anything, so nothing has to be proven of them."""
        self._roles = roles
        self._proofs: dict[str, _Proof] = {}

    def kept_out(self, worker: WorkerDescription) -> str:
        """Why this life gets no requests, to follow its name in a sentence; "" when it may."""
        if worker.role not in self._roles:
            return ""
        proof = self._proofs.get(worker.worker_id)
        return WAITS if proof is None or proof.epoch != worker.epoch else proof.kept_out

    def passed(self, worker: WorkerDescription) -> None:
        """A canary has gone all the way through this life."""
        self._note(worker, "")

    def failed(self, worker: WorkerDescription, why: str) -> None:
        """It stays out, for this reason."""
        self._note(worker, why)

    def keep_only(self, worker_ids: Iterable[str]) -> None:
        """Forgets all workers but these."""
        known = set(worker_ids)
        self._proofs = {name: p for name, p in self._proofs.items() if name in known}

    def _note(self, worker: WorkerDescription, kept_out: str) -> None:
        proof = self._proofs.get(worker.worker_id)
        # A canary through an earlier life may end after the later one has been proven.
        if proof is None or proof.epoch <= worker.epoch:
            self._proofs[worker.worker_id] = _Proof(worker.epoch, kept_out)
