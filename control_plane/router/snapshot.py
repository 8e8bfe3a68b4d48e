"""What the router decides on: workers as values, the need of a request, the choice.

`pool.WorkerPool` makes the snapshots, `route.choose_pair` turns them into a `Placement`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.router.prefixes import NO_PREFIX, PromptPrefix
from hocket.types import Fingerprint, Load, WorkerDescription


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a pair of workers, in tokens. `avoid`: names of workers, and of whole
    groups, that have failed it already. `fingerprint`: that its workers must have; None: any.
    `prefix`: the beginning of the prompt, to be found in a worker's cache."""

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None
    prefix: PromptPrefix = field(default=NO_PREFIX, compare=False)

    def prompt_blocks(self, block_tokens: int) -> int:
        """Blocks that hold the prompt."""
        return -(-self.prompt_tokens // block_tokens)

    def all_blocks(self, block_tokens: int) -> int:
        """Blocks that hold prompt and output."""
        return -(-(self.prompt_tokens + self.max_tokens) // block_tokens)


@dataclass(frozen=True, slots=True)
class Books:
    """What this gateway has in flight on a worker: known at once, while a reported load is old.

    `prompts` are those that are not computed yet, `prompt_tokens` what of them is not cached.
    `blocks` are decode's, for prompt and output.
    """

    requests: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    blocks: int = 0

    def plus(self, other: Books) -> Books:
        """The books after an entry."""
        return Books(
            self.requests + other.requests,
            self.prompts + other.prompts,
            self.prompt_tokens + other.prompt_tokens,
            self.blocks + other.blocks,
        )

    def minus(self, other: Books) -> Books:
        """The books after an entry's return."""
        books = Books(
            self.requests - other.requests,
            self.prompts - other.prompts,
            self.prompt_tokens - other.prompt_tokens,
            self.blocks - other.blocks,
        )
        assert min(books.requests, books.prompts, books.prompt_tokens, books.blocks) >= 0, books
        return books


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as of now. `load` is the latest that it reported. `is_listed`: the directory still
    names it. `kept_out`: why it gets no requests yet (`router.proofs`), "" when it does.
    `cached_tokens`: of the prompt in question, those that it should have in its prefix cache."""

    worker: WorkerDescription
    load: Load
    is_connected: bool
    is_listed: bool = True
    kept_out: str = ""
    cached_tokens: int = 0
    books: Books = field(default_factory=Books)

    @property
    def name(self) -> str:
        return self.worker.worker_id


@dataclass(frozen=True, slots=True)
class Placement:
    """The pair that serves a request; their fingerprints are equal. In aggregated serving both are
    one decode worker. `promised_tokens`: of the prompt, those that who reads it should have cached.
    """

    prefill: WorkerDescription
    decode: WorkerDescription
    promised_tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether one worker does all of it."""
        return self.prefill is self.decode
