"""What the router decides on: workers as values, the need of a request, the choice.

`pool.WorkerPool` makes the snapshots, `route.choose_pair` turns them into a `Placement`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.types import Fingerprint, Load, WorkerDescription


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a pair of workers, in tokens. `avoid`: names of workers, and of whole
    groups, that have failed it already. `fingerprint`: that its workers must have; None: any."""

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None

    def prompt_blocks(self, block_tokens: int) -> int:
        """Blocks that hold the prompt."""
        return -(-self.prompt_tokens // block_tokens)

    def all_blocks(self, block_tokens: int) -> int:
        """Blocks that hold prompt and output."""
        return -(-(self.prompt_tokens + self.max_tokens) // block_tokens)


@dataclass(frozen=True, slots=True)
class Books:
    """What this gateway has in flight on a worker: known at once, while a reported load is old."""

    requests: int = 0
    prompt_tokens: int = 0
    blocks: int = 0

    def plus(self, requests: int, prompt_tokens: int, blocks: int) -> Books:
        """The books after an entry, or after its return with negative numbers."""
        books = Books(
            self.requests + requests, self.prompt_tokens + prompt_tokens, self.blocks + blocks
        )
        assert min(books.requests, books.prompt_tokens, books.blocks) >= 0, books
        return books


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as of now. `load` is the latest that it reported. `is_listed`: the directory still
    names it."""

    worker: WorkerDescription
    load: Load
    is_connected: bool
    is_listed: bool = True
    books: Books = field(default_factory=Books)

    @property
    def name(self) -> str:
        return self.worker.worker_id


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair that serves a request; their fingerprints are equal. In aggregated serving both are
    one decode worker."""

    prefill: WorkerDescription
    decode: WorkerDescription

    @property
    def is_whole(self) -> bool:
        """Whether one worker does all of it."""
        return self.prefill is self.decode
