"""The logprobs of a prompt's tokens as a client gets them: each position once, in order.

`request_run` gives what workers tell. They tell it in any pieces, and again from the start when
the request is placed again; the first token of a prompt has none.
"""

from __future__ import annotations

from hocket.types import PromptLogprobs, TokenLogprobs

# Per message: tens of kB where the likeliest tokens were asked for.
MAX_ENTRIES = 256


class PromptLogprobsInOrder:
    """Collects those of the positions from 1 to `last`; 0: none are wanted."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._next = 1
        self._waiting: dict[int, TokenLogprobs] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every position was added."""
        return self._next + len(self._waiting) > self._last

    def add(self, told: PromptLogprobs) -> None:
        """Takes what is new and wanted."""
        for position, entry in enumerate(told.logprobs, told.first_position):
            if self._next <= position <= self._last:
                self._waiting.setdefault(position, entry)

    def take(self) -> list[list[TokenLogprobs]]:
        """What follows what was taken before, without a gap, cut for messages."""
        entries: list[TokenLogprobs] = []
        while (entry := self._waiting.pop(self._next, None)) is not None:
            entries.append(entry)
            self._next += 1
        return [entries[i : i + MAX_ENTRIES] for i in range(0, len(entries), MAX_ENTRIES)]
