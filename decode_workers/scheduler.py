"""Decides what a decode worker does next: who gets blocks and a seat, who advances, who gives way.

The engine tells what happened (a request came, its KV arrived, its prompt was computed) and asks
what to do. Pure: state and time in, decisions out; no torch, no I/O, no clock. A request lives in
one place at a time, and holds blocks and a seat of the batch in all but the first:

    submit -> waiting --admit--> importing ----join----> running --remove--> gone
               ^ ^  |                | recompute           | |
               | |  |                v                     | |
               | +--|----------------+                     | |
               |    +--admit--> prefilling --computed------+ |   its prompt is computed here
               |                     |                       |
               +---------------------+-----------------------+   preempt

Cancel, deadline and failure remove it from any of them. Every queue is in order of arrival.
Admission is first come, first served; it reserves the prompt and a share of the output budget, and
running requests grow from there. When blocks run out, the latest arrival gives its own back to
an earlier one that needs them (`victim_for`), and waits at its place in the queue to be computed
again from prompt and output. So the oldest request that runs never gives way and ends, whatever
the pool's size; then the next one is the oldest. An import never gives way, because READs are
under way into its blocks; it ends by itself. A request that waits holds nothing here, and prefill
never waits for a block of ours: no circle. Its prefill twin is `prefill_workers/scheduler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hocket.errors import InvalidRequest, Overloaded, WorkerUnavailable
from hocket.scheduling.chunk_planner import PlannedChunk, PromptProgress, plan_chunks
from hocket.scheduling.deadlines import Deadlines
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Leg, RequestKey, StartRequest


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """`max_batch`: requests that hold a seat at once. `max_waiting`: requests that may wait.
    `chunk_tokens`: prompt tokens per step where decode computes a prompt itself.
    `draft_tokens`: most drafts per request and step.
    `reserve_output_share`: of the output budget that a request gets blocks for at its start; with
    1, nobody ever gives way."""

    max_batch: int
    max_waiting: int
    chunk_tokens: int
    draft_tokens: int
    reserve_output_share: float = 1.0


@dataclass(frozen=True, slots=True)
class PlannedDecode:
    """One running request's part in the next decode step."""

    key: RequestKey
    num_drafts: int


@dataclass(slots=True)
class DecodeCounters:
    """Since the start of the worker, for metrics."""

    preemptions: int = 0


class DecodeScheduler:
    """The queues of one decode worker. Times are the engine's seconds."""

    def __init__(self, limits: RequestLimits, policy: DecodePolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.counters = DecodeCounters()
        self.is_draining = False
        self._waiting: dict[RequestKey, StartRequest] = {}
        self._importing: dict[RequestKey, StartRequest] = {}
        self._prefilling: dict[RequestKey, StartRequest] = {}
        self._running: dict[RequestKey, StartRequest] = {}
        self._computed_tokens: dict[RequestKey, int] = {}
        self._num_submitted = 0
        self._arrivals: dict[RequestKey, int] = {}
        self._recomputed: set[RequestKey] = set()
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
        self._num_submitted += 1
        self._arrivals[request.key] = self._num_submitted
        self._waiting[request.key] = request
        self._deadlines.add(request.key, now + request.deadline_s)

    # Who gets a seat, and who gives it back.

    def next_waiting(self) -> StartRequest | None:
        """The oldest request that waits, if a seat is free; to be admitted if its blocks are."""
        if self.num_seated >= self.policy.max_batch:
            return None
        waiting = self._waiting.values()
        return next((request for request in waiting if request.key not in self._held), None)

    def hold(self, key: RequestKey) -> None:
        """The waiting request cannot be admitted yet; those behind it may pass."""
        self._held.add(key)

    def release(self, key: RequestKey) -> None:
        """It can be admitted from now on."""
        self._held.discard(key)

    def blocks_to_admit(self, request: StartRequest) -> int:
        """Blocks that a request must have to start: for its prompt and a share of its output, at
        least what its first decode step may write."""
        max_tokens = request.stopping.max_tokens
        share = math.ceil(max_tokens * self.policy.reserve_output_share)
        one_step = 1 + self._draft_tokens(request)
        return self.limits.blocks_for_output(request, min(max_tokens, max(share, one_step)))

    def admit(self, key: RequestKey, cached_tokens: int = 0) -> bool:
        """The request's blocks are reserved. True: import its KV; False: compute it here, all but
        the `cached_tokens` that are here already."""
        request = self._waiting.pop(key)
        if request.leg is Leg.DECODE:
            self._importing[key] = request
            return True
        assert cached_tokens < len(request.token_ids), (key, cached_tokens)
        self._prefilling[key] = request
        self._computed_tokens[key] = cached_tokens
        return False

    def recompute(self, key: RequestKey) -> None:
        """The hand-off failed, and its blocks, if it had any, are given back: the request is to be
        computed here when its turn comes."""
        self._recomputed.add(key)
        request = self._importing.pop(key, None) or self._waiting[key]
        self._wait_again(replace(request, leg=Leg.WHOLE, export=None))

    def victim_for(self, key: RequestKey) -> RequestKey | None:
        """Who gives its blocks back so that `key` can take its step: the latest of those that came
        later. None: there is nobody, and `key` sits the step out."""
        latest = max((*self._prefilling, *self._running), key=self._arrival)
        return latest if latest != key else None

    def preempt(self, key: RequestKey, output: Sequence[int]) -> None:
        """The request gave its blocks back. What it has put out is now the end of its prompt, as
        after a migration, and comes off its budget; its deadline stays."""
        request = self._running.pop(key, None) or self._prefilling.pop(key)
        self._computed_tokens.pop(key, None)
        self.counters.preemptions += 1
        self._wait_again(
            replace(
                request,
                token_ids=(*request.token_ids, *output),
                stopping=request.stopping.after(len(output)),
                leg=Leg.WHOLE,
                export=None,
                generated_tokens=request.generated_tokens + len(output),
            )
        )

    def is_recomputed(self, key: RequestKey) -> bool:
        """Whether its hand-off failed."""
        return key in self._recomputed

    # Who advances.

    def join(self, key: RequestKey) -> None:
        """The request's KV arrived: it takes part in decode steps."""
        self._running[key] = self._importing.pop(key)

    def plan_chunks(self) -> list[PlannedChunk]:
        """The prompt chunks of the next step, at most one per request that is computed here."""
        progress = [
            PromptProgress(key, self._computed_tokens[key], len(self._prefilling[key].token_ids))
            for key in sorted(self._prefilling, key=self._arrival)
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
        """The requests of the next decode step, oldest first, and the drafts each may spend."""
        keys = sorted(self._running, key=self._arrival)
        return [PlannedDecode(key, self._draft_tokens(self._running[key])) for key in keys]

    def remove(self, key: RequestKey) -> bool:
        """Forgets a request wherever it is; False when it is not here."""
        self._deadlines.discard(key)
        self._computed_tokens.pop(key, None)
        self._arrivals.pop(key, None)
        self._recomputed.discard(key)
        self._held.discard(key)
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
        return key in self._arrivals

    def is_running(self, key: RequestKey) -> bool:
        return key in self._running

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
        waiting: Iterable[StartRequest] = (
            request for request in self._waiting.values() if request.leg is Leg.WHOLE
        )
        tokens = sum(len(r.token_ids) for r in (*waiting, *self._prefilling.values()))
        return tokens - sum(self._computed_tokens.values())

    def _wait_again(self, request: StartRequest) -> None:
        """Into the queue at its place by arrival: before all that came later."""
        self._waiting[request.key] = request
        self._waiting = {
            key: self._waiting[key] for key in sorted(self._waiting, key=self._arrival)
        }

    def _arrival(self, key: RequestKey) -> int:
        return self._arrivals[key]

    def _draft_tokens(self, request: StartRequest) -> int:
        asked = request.max_draft_tokens
        most = self.policy.draft_tokens
        return most if asked is None else min(asked, most)
