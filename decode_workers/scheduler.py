"""Decides what a decode worker does next: who gets blocks and a seat, who advances by how much.

The engine tells what happened (a request came, its KV arrived, its prompt was computed) and asks
what to do. Pure: state and time in, decisions out; no torch, no I/O, no clock. A request lives in
one place at a time, and holds blocks and a seat of the batch in all but the first:

    submit -> waiting --admit--> importing --join--> running --remove--> gone
                 ^  |                |                  ^
                 |  |        (import failed:            |
                 |  |         recompute here)           |
                 +--|----------------+                  |
                    +--admit--> prefilling -----join----+   the whole request is done here

Cancel, deadline and failure remove it from any of them. Admission is first come, first served and
reserves prompt and output in full, so that no running request ever has to give blocks back. A
request that waits holds nothing here, and prefill never waits for a block of ours: no circle.
Its prefill twin is `prefill_workers/scheduler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import InvalidRequest, Overloaded, WorkerUnavailable
from hocket.scheduling.chunk_planner import PlannedChunk, PromptProgress, plan_chunks
from hocket.scheduling.deadlines import Deadlines
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Leg, RequestKey, StartRequest


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """`max_batch`: requests that hold a seat at once. `max_waiting`: requests that may wait.
    `chunk_tokens`: prompt tokens per step where decode computes a prompt itself.
    `draft_tokens`: most drafts per request and step."""

    max_batch: int
    max_waiting: int
    chunk_tokens: int
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedDecode:
    """One running request's part in the next decode step."""

    key: RequestKey
    num_drafts: int


class DecodeScheduler:
    """The queues of one decode worker. Times are the engine's seconds."""

    def __init__(self, limits: RequestLimits, policy: DecodePolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.is_draining = False
        self._waiting: dict[RequestKey, StartRequest] = {}
        self._importing: dict[RequestKey, StartRequest] = {}
        self._prefilling: dict[RequestKey, StartRequest] = {}
        self._running: dict[RequestKey, StartRequest] = {}
        self._computed_tokens: dict[RequestKey, int] = {}
        self._must_recompute: set[RequestKey] = set()
        self._deadlines = Deadlines()

    def submit(self, request: StartRequest, now: float) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it can never be served here, or the key is in use.
            Overloaded: the queue is full.
            WorkerUnavailable: the worker drains.
        """
        if self.is_draining:
            raise WorkerUnavailable("This decode worker drains; use another one.")
        if request.leg is Leg.PREFILL:
            raise InvalidRequest("leg", "prefill", "'decode' or 'whole' on a decode worker")
        if (request.leg is Leg.DECODE) != (request.export is not None):
            raise InvalidRequest("export", request.export, "set on the decode leg, and only there")
        if request.key in self:
            raise InvalidRequest("key", str(request.key), "new: this attempt is already here")
        self.limits.check(request)
        if len(self._waiting) >= self.policy.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests wait on this decode worker, "
                "its limit (decode.max_waiting); retry.",
                waiting=len(self._waiting),
            )
        self._waiting[request.key] = request
        self._deadlines.add(request.key, now + request.deadline_s)

    def next_waiting(self, free_blocks: int) -> StartRequest | None:
        """The request to admit now: the oldest, if a seat and all of its blocks are free."""
        oldest = next(iter(self._waiting.values()), None)
        if oldest is None or self.num_seated >= self.policy.max_batch:
            return None
        return oldest if self.limits.blocks_needed(oldest) <= free_blocks else None

    def admit(self, key: RequestKey) -> bool:
        """The request's blocks are reserved. True: import its KV; False: compute it here."""
        request = self._waiting.pop(key)
        if request.leg is Leg.DECODE and key not in self._must_recompute:
            self._importing[key] = request
            return True
        self._prefilling[key] = request
        self._computed_tokens[key] = 0
        return False

    def recompute(self, key: RequestKey) -> None:
        """The import failed and the blocks are given back: first in the queue again, to be
        computed here."""
        request = self._importing.pop(key)
        self._must_recompute.add(key)
        self._waiting = {key: request, **self._waiting}

    def is_recomputed(self, key: RequestKey) -> bool:
        return key in self._must_recompute

    def join(self, key: RequestKey) -> None:
        """The request's KV arrived: it takes part in decode steps."""
        self._running[key] = self._importing.pop(key)

    def plan_chunks(self) -> list[PlannedChunk]:
        """The prompt chunks of the next step, at most one per request that is computed here."""
        progress = [
            PromptProgress(key, self._computed_tokens[key], len(request.token_ids))
            for key, request in self._prefilling.items()
        ]
        return plan_chunks(progress, self.policy.chunk_tokens, self.limits.block_tokens)

    def computed(self, chunk: PlannedChunk) -> None:
        """A planned chunk was computed. A request whose prompt is whole starts to run."""
        self._computed_tokens[chunk.key] += chunk.num_tokens
        request = self._prefilling[chunk.key]
        if self._computed_tokens[chunk.key] == len(request.token_ids):
            del self._computed_tokens[chunk.key]
            self._running[chunk.key] = self._prefilling.pop(chunk.key)

    def plan_decode(self) -> list[PlannedDecode]:
        """The requests of the next decode step and the drafts each may spend."""
        return [PlannedDecode(k, self._draft_tokens(r)) for k, r in self._running.items()]

    def remove(self, key: RequestKey) -> bool:
        """Forgets a request wherever it is; False when it is not here."""
        self._deadlines.discard(key)
        self._computed_tokens.pop(key, None)
        self._must_recompute.discard(key)
        places = (self._waiting, self._importing, self._prefilling, self._running)
        return any(place.pop(key, None) is not None for place in places)

    def take_expired(self, now: float) -> list[RequestKey]:
        """Requests whose deadline passed; the caller removes them."""
        return self._deadlines.take_expired(now)

    def next_deadline(self) -> float | None:
        return self._deadlines.next()

    def keys(self) -> list[RequestKey]:
        return [*self._running, *self._prefilling, *self._importing, *self._waiting]

    def __contains__(self, key: RequestKey) -> bool:
        places = (self._waiting, self._importing, self._prefilling, self._running)
        return any(key in place for place in places)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_seated(self) -> int:
        """Requests that hold blocks: importing, computing their prompt, or running."""
        return len(self._importing) + len(self._prefilling) + len(self._running)

    @property
    def queued_prompt_tokens(self) -> int:
        """Prompt tokens to be computed here, not yet computed."""
        waiting = [r for r in self._waiting.values() if self._is_computed_here(r)]
        tokens = sum(len(r.token_ids) for r in (*waiting, *self._prefilling.values()))
        return tokens - sum(self._computed_tokens.values())

    def _is_computed_here(self, request: StartRequest) -> bool:
        return request.leg is Leg.WHOLE or request.key in self._must_recompute

    def _draft_tokens(self, request: StartRequest) -> int:
        asked = request.max_draft_tokens
        most = self.policy.draft_tokens
        return most if asked is None else min(asked, most)
