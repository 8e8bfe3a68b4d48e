"""The two legs of one request: prefill on one worker, decode on another, and what they say.

`request_flow` starts and ends them here. Each leg is started at most once and ended exactly once;
its place in the router's books is given back with it. All events of both legs arrive in one queue
in the order in which they came in.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from control_plane.router.pool import Entry, WorkerPool, WorkerSession
from control_plane.router.snapshot import Books, Need, Placement
from control_plane.turns import Turns
from hocket.types import (
    Event,
    ExportHandle,
    Failed,
    Finished,
    Joined,
    Leg,
    StartRequest,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class LegEvent:
    """An event and the leg that it came from."""

    leg: Leg
    event: Event


class Legs:
    """The legs of one request; use as a context manager, which ends what still runs."""

    def __init__(
        self, pool: WorkerPool, turns: Turns, placement: Placement, need: Need, deadline_s: float
    ) -> None:
        """`deadline_s` is a reading of the running loop's clock."""
        self.placement = placement
        self._pool = pool
        self._need = need
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        # Taken now: a worker may leave the pool while the request runs.
        self._sessions: dict[Leg, WorkerSession] = {
            Leg.PREFILL: pool.session(placement.prefill.worker_id),
            Leg.DECODE: pool.session(placement.decode.worker_id),
        }
        self._turns = turns
        self._inbox: list[LegEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._running: dict[Leg, StartRequest] = {}
        self._entries: dict[Leg, Entry] = {}
        self._started_s: dict[Leg, float] = {}
        self._prefill: StartRequest | None = None
        self._has_joined = False

    def __enter__(self) -> Legs:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def has_joined(self) -> bool:
        """Whether decode has the prompt's KV: prefill is not needed any more."""
        return self._has_joined

    def is_running(self, leg: Leg) -> bool:
        """Whether the leg was started and has not ended."""
        return leg in self._running

    def was_started(self, leg: Leg) -> bool:
        """Whether the leg was ever started."""
        return leg in self._started_s

    def running_s(self, leg: Leg) -> float:
        """Seconds since the leg was started; a whole request's prefill is its decode leg."""
        leg = Leg.DECODE if self.placement.is_whole else leg
        return self._loop.time() - self._started_s[leg]

    def start(self, request: StartRequest) -> None:
        """Sends the prompt to the prefill worker, or to the one that does it all; that one's events
        are the decode leg's. Both workers have the request in their books from here on, so that
        decode is not forgotten, nor chosen by everyone, while prefill computes."""
        prefill, decode, need = self.placement.prefill, self.placement.decode, self._need
        is_whole = self.placement.is_whole
        to_compute = max(1, need.prompt_tokens - self.placement.promised_tokens)
        prompt = Books(requests=int(not is_whole), prompts=1, prompt_tokens=to_compute)
        output = Books(requests=1, blocks=need.all_blocks(decode.block_tokens))
        self._entries = {
            Leg.PREFILL: self._pool.book(prefill.worker_id, prompt),
            Leg.DECODE: self._pool.book(decode.worker_id, output),
        }
        if is_whole:
            self._start(replace(request, leg=Leg.WHOLE), Leg.DECODE)
        else:
            self._prefill = request
            self._start(request, Leg.PREFILL)

    def start_decode(self, export: ExportHandle) -> None:
        """Starts decode on what prefill has begun to export."""
        assert self._prefill is not None
        self._start(replace(self._prefill, leg=Leg.DECODE, export=export), Leg.DECODE)

    async def events(self) -> list[LegEvent]:
        """All events that are there when it is this request's turn, at least one."""
        self._waiter = self._loop.create_future()
        if self._inbox:
            self._turns.wake(self._waiter)
        await self._waiter
        self._waiter = None
        events, self._inbox = self._inbox, []
        for item in events:
            self._note(item)
        return events

    def end(self) -> None:
        """Cancels what still runs, and an export that nobody will read. Idempotent."""
        prefill, is_exported = self._prefill, not self._has_joined
        if prefill is not None and is_exported and not self.is_running(Leg.PREFILL):
            self._sessions[Leg.PREFILL].cancel(prefill.key)
        for leg, request in list(self._running.items()):
            self._sessions[leg].cancel(request.key)
            self._ended(leg)
        for leg in list(self._entries):
            self._release(leg)
        self._prefill = None

    def _start(self, request: StartRequest, leg: Leg) -> None:
        assert not self.was_started(leg), f"{leg} of {request.key} was started twice"
        self._running[leg] = request
        self._started_s[leg] = self._loop.time()
        left_s = max(0.0, self._deadline_s - self._loop.time())
        self._sessions[leg].start(
            replace(request, deadline_s=left_s),
            lambda event: self._take(leg, event),
        )

    def _take(self, leg: Leg, event: Event) -> None:
        self._inbox.append(LegEvent(leg, event))
        if self._waiter is not None and len(self._inbox) == 1:
            self._turns.wake(self._waiter)

    def _note(self, item: LegEvent) -> None:
        if isinstance(item.event, Joined):
            self._has_joined = True
        elif isinstance(item.event, Tokens):
            self._note_tokens(item.leg)
        elif isinstance(item.event, Finished | Failed):
            self._ended(item.leg)

    def _note_tokens(self, leg: Leg) -> None:
        """The first tokens of who reads the prompt mean that it is computed."""
        reads = Leg.DECODE if self.placement.is_whole else Leg.PREFILL
        if leg is reads and Leg.PREFILL in self._entries:
            self._release(Leg.PREFILL)
            self._pool.note_computed(self.placement.prefill, self._need.prefix)

    def _ended(self, leg: Leg) -> None:
        self._running.pop(leg, None)
        self._release(leg)

    def _release(self, leg: Leg) -> None:
        entry = self._entries.pop(leg, None)
        if entry is not None:
            self._pool.release(entry)
