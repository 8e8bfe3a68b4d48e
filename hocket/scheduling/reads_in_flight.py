"""READs that have not ended, and what they may still write into; a part of `import_ownership`.

A READ is live, or abandoned once its import has ended. None can be stopped, so the targets of an
abandoned one are in quarantine until it ended by itself, or until the import agent was rebuilt,
which ends all of them: when too many blocks are in quarantine, or one is there for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hocket.scheduling.import_words import (
    ImportCounters,
    ImportLimits,
    ImportWord,
    PostRead,
    RebuildAgent,
    TargetBlocks,
)
from hocket.types import RequestKey


@dataclass(slots=True)
class Read:
    """One READ, of neighbouring positions of a prompt. When `is_abandoned`, its import is gone and
    `local_blocks` are in quarantine since `deadline`."""

    key: RequestKey
    first_block: int
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    checksums: tuple[int, ...]
    posted: float = 0.0
    deadline: float = 0.0
    attempt: int = 1
    moves: int = 0
    is_abandoned: bool = False


class ReadsInFlight:
    """All READs of one decode worker, by number."""

    def __init__(
        self,
        pool: TargetBlocks,
        limits: ImportLimits,
        counters: ImportCounters,
        say: Callable[[ImportWord], None],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._counters = counters
        self._say = say
        self._reads: dict[int, Read] = {}
        self._num_reads = 0
        self._being_fenced: set[int] = set()

    def __len__(self) -> int:
        return len(self._reads)

    def numbers(self) -> list[int]:
        return list(self._reads)

    def post(self, read: Read, now: float) -> int:
        """Sends the READ off, for the first time or again; returns its new number."""
        read.posted = now
        read.moves = 0
        read.deadline = now + self._limits.read_timeout_s
        self._num_reads += 1
        number = self._num_reads
        self._reads[number] = read
        self._counters.reads += 1
        post = PostRead(number, read.key, read.remote_blocks, read.local_blocks, read.checksums)
        self._say(post)
        return number

    def moved(self, number: int, moves: int, now: float) -> None:
        """As `ImportOwnership.read_moved`."""
        read = self._reads[number]
        if moves > read.moves and not read.is_abandoned:
            read.moves = moves
            read.deadline = now + self._limits.read_timeout_s

    def end(self, number: int) -> Read | None:
        """The READ writes nowhere any more; None when nobody waited for it: its blocks are free."""
        read = self._reads.pop(number)
        self._being_fenced.discard(number)
        if not read.is_abandoned:
            return read
        self._pool.release_quarantined(read.local_blocks)
        return None

    def abandon(self, numbers: Iterable[int], now: float) -> set[int]:
        """Nobody waits for these any more; their targets, which are returned, go to quarantine."""
        blocks: set[int] = set()
        for number in numbers:
            read = self._reads[number]
            read.is_abandoned = True
            read.deadline = now
            blocks.update(read.local_blocks)
            self._counters.reads_abandoned += 1
        self._pool.quarantine(sorted(blocks))
        self._counters.quarantined_blocks += len(blocks)
        return blocks

    def overdue(self, now: float) -> list[Read]:
        """Live READs of which nothing has landed for too long."""
        return [r for r in self._reads.values() if not r.is_abandoned and now >= r.deadline]

    def next_due(self, now: float) -> list[float]:
        """When something has to be looked at, in any order."""
        due = [read.deadline for read in self._reads.values() if not read.is_abandoned]
        # The blocks of an abandoned READ are missing until then, but nobody waits for them.
        return due + ([now + self._limits.progress_timeout_s / 3] if self._reads else [])

    def rebuild_if_needed(self, now: float) -> None:
        """Ends abandoned READs by force. One rebuild at a time: it ends all that are there."""
        if self._being_fenced or not self._pool.num_quarantined:
            return
        abandoned = {number: read for number, read in self._reads.items() if read.is_abandoned}
        assert abandoned, f"{self._pool.num_quarantined} blocks in quarantine, and no READ"
        limit = self._limits.max_quarantine_share * self._pool.num_blocks
        oldest = min(read.deadline for read in abandoned.values())
        is_overdue = now - oldest >= self._limits.quarantine_timeout_s
        if self._pool.num_quarantined > limit or is_overdue:
            self._counters.rebuilds += 1
            self._being_fenced = set(abandoned)
            self._say(RebuildAgent())
