"""What a worker remembers of one gateway's Session, on whatever stream it is served.

`hocket.rpc.session.SessionServer` keeps one per gateway. Commands are counted as they are taken;
events wait here until they leave in a batch, and batches until they are acknowledged.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass, field

from hocket.rpc import worker_pb2 as worker
from hocket.types import RequestKey


@dataclass(slots=True)
class PartialStart:
    """A Start whose pieces are still coming."""

    start: worker.Start
    token_ids: array[int]


@dataclass(slots=True, eq=False)
class SessionState:
    """One gateway's session. `unsent`: in no batch yet. `kept`: batches that were sent and are not
    acknowledged; `again`: those of them that this stream must still repeat."""

    session_id: str
    gateway_id: str = ""
    received_commands: int = 0
    last_batch: int = 0
    unsent: list[worker.Event] = field(default_factory=list[worker.Event])
    kept: deque[worker.SessionEvents] = field(default_factory=deque[worker.SessionEvents])
    again: deque[worker.SessionEvents] = field(default_factory=deque[worker.SessionEvents])
    num_kept_events: int = 0
    crowded_until_s: float = 0.0
    keys: set[RequestKey] = field(default_factory=set[RequestKey])
    partial: dict[RequestKey, PartialStart] = field(default_factory=dict[RequestKey, PartialStart])
    has_unsent: asyncio.Event = field(default_factory=asyncio.Event)
    # The stream that serves the session now; a later one takes it over.
    stream: object | None = None
    expiry: asyncio.TimerHandle | None = None
    is_expired: bool = False

    @property
    def num_behind(self) -> int:
        """Events that the gateway has not acknowledged."""
        return self.num_kept_events + len(self.unsent)

    def acknowledge(self, batch: int) -> None:
        while self.kept and self.kept[0].sequence <= batch:
            self.num_kept_events -= len(self.kept.popleft().events)

    def keep(self, batch: worker.SessionEvents) -> None:
        self.kept.append(batch)
        self.num_kept_events += len(batch.events)
