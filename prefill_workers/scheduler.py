"""Decides what a prefill worker does next: who is admitted, whose prompt advances by how much.

The engine tells what happened (a request came, was admitted, a chunk was computed) and asks what
to do. Pure: state and time in, decisions out; no torch, no I/O, no clock. A request lives in one
place at a time:

    submit -> waiting --admit--> running --(prompt computed)--> gone: its blocks are the
                 |                  |                            export table's from here on
                 +----- remove -----+   cancel, deadline, failure

Admission is first come, first served, and all or nothing: a prompt starts only when all of its
blocks could be reserved. Its decode twin is `decode_workers/scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import InvalidRequest, Overloaded, WorkerUnavailable
from hocket.scheduling.chunk_planner import PlannedChunk, PromptProgress, plan_chunks
from hocket.scheduling.deadlines import Deadlines
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Leg, RequestKey, StartRequest


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """`chunk_tokens`: prompt tokens per step. `max_batch`: prompts that run at once.
    `max_waiting`: requests that may wait for admission."""

    chunk_tokens: int
    max_batch: int
    max_waiting: int


class PrefillScheduler:
    """The queues of one prefill worker. Times are the engine's seconds."""

    def __init__(self, limits: RequestLimits, policy: PrefillPolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.is_draining = False
        self._waiting: dict[RequestKey, StartRequest] = {}
        self._running: dict[RequestKey, StartRequest] = {}
        self._computed_tokens: dict[RequestKey, int] = {}
        self._held: set[RequestKey] = set()
        self._deadlines = Deadlines()

    def submit(self, request: StartRequest, now: float) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it can never be served here, or the key is in use.
            Overloaded: the queue is full.
            WorkerUnavailable: the worker drains.
        """
        if self.is_draining:
            raise WorkerUnavailable("This prefill worker drains; use another one.")
        if request.leg is not Leg.PREFILL:
            raise InvalidRequest("leg", request.leg.value, "'prefill' on a prefill worker")
        if request.key in self:
            raise InvalidRequest("key", str(request.key), "new: this attempt is already here")
        self.limits.check(request)
        if len(self._waiting) >= self.policy.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests wait on this prefill worker, "
                "its limit (prefill.max_waiting); retry.",
                waiting=len(self._waiting),
            )
        self._waiting[request.key] = request
        self._deadlines.add(request.key, now + request.deadline_s)

    def next_waiting(self) -> StartRequest | None:
        """The request to admit next, if its blocks can be reserved; None: nobody may start."""
        if len(self._running) >= self.policy.max_batch:
            return None
        waiting = self._waiting.values()
        return next((request for request in waiting if request.key not in self._held), None)

    def hold(self, key: RequestKey) -> None:
        """The waiting request cannot be admitted yet; those behind it may pass."""
        self._held.add(key)

    def release(self, key: RequestKey) -> None:
        """It can be admitted from now on."""
        self._held.discard(key)

    def admit(self, key: RequestKey, cached_tokens: int = 0) -> None:
        """The request's blocks are reserved: its prompt may advance, from `cached_tokens` on."""
        self._running[key] = self._waiting.pop(key)
        self._computed_tokens[key] = cached_tokens

    def plan_chunks(self) -> list[PlannedChunk]:
        """The chunks of the next step, at most one per running prompt."""
        progress = [
            PromptProgress(key, self._computed_tokens[key], len(request.token_ids))
            for key, request in self._running.items()
        ]
        return plan_chunks(progress, self.policy.chunk_tokens, self.limits.block_tokens)

    def computed(self, chunk: PlannedChunk) -> None:
        """A planned chunk was computed. A request whose prompt is whole leaves the scheduler."""
        self._computed_tokens[chunk.key] += chunk.num_tokens
        if self._computed_tokens[chunk.key] == len(self._running[chunk.key].token_ids):
            self.remove(chunk.key)

    def remove(self, key: RequestKey) -> bool:
        """Forgets a request wherever it is; False when it is not here."""
        self._deadlines.discard(key)
        self._held.discard(key)
        self._computed_tokens.pop(key, None)
        waiting, running = self._waiting.pop(key, None), self._running.pop(key, None)
        return waiting is not None or running is not None

    def take_expired(self, now: float) -> list[RequestKey]:
        """Requests whose deadline passed; the caller removes them."""
        return self._deadlines.take_expired(now)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def keys(self) -> list[RequestKey]:
        return [*self._running, *self._waiting]

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens admitted or waiting, not yet computed."""
        requests = [*self._waiting.values(), *self._running.values()]
        return sum(len(r.token_ids) for r in requests) - sum(self._computed_tokens.values())
