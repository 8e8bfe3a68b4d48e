"""What `test_hand_off_machine.py` keeps of each prompt, and of each stream between the tables."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hocket.rpc import worker_pb2 as worker
from hocket.types import ExportHandle, RequestKey


@dataclass
class Request:
    """A prompt as its two engines know it. While it is `is_importing`, `kept` are decode's blocks
    that held the start of the prompt before, and `blocks` those that the import has. `lost` are
    positions whose announcement did not arrive."""

    key: RequestKey
    handle: ExportHandle
    num_computed: int = 0
    is_finished: bool = False
    was_opened: bool = False
    is_importing: bool = False
    kept: list[int] = field(default_factory=list[int])
    blocks: list[int] = field(default_factory=list[int])
    has_failed_fence: bool = False
    lost: set[int] = field(default_factory=set[int])

    @property
    def has_room(self) -> bool:
        return bool(self.kept or self.blocks)


@dataclass
class Stream:
    """One Export stream: what is on its way. None, always last, tells a side that it is gone."""

    number: int
    key: RequestKey
    going_up: deque[worker.ExportUpdate | None]
    going_down: deque[worker.ExportEvent | None] = field(default_factory=deque)
    last_up: worker.ExportUpdate | None = None
    last_down: worker.ExportEvent | None = None
    is_known_above: bool = True
    is_known_below: bool = True
    is_closed_by_decode: bool = False

    @property
    def is_whole(self) -> bool:
        return None not in self.going_up and None not in self.going_down

    def end(self) -> None:
        """What was on its way is lost; both sides will hear of it."""
        self.going_up = deque([None] if self.is_known_above else [])
        self.going_down = deque([None] if self.is_known_below else [])
