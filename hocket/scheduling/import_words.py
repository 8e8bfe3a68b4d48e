"""What `import_ownership` is told to go by, and what it says.

Its words are for the exporter and for the transfer, in order; `decode_workers/kv_import.py` turns
them into messages and READs. The prefill twin is `export_words.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hocket.errors import HocketError
from hocket.telemetry import GAUGE
from hocket.types import RequestKey


class TargetBlocks(Protocol):
    """What an import needs of a block pool."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    def free(self, blocks: Sequence[int]) -> None: ...
    def quarantine(self, blocks: Sequence[int]) -> None: ...
    def release_quarantined(self, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """Above `max_quarantine_share` of the pool's blocks in quarantine, or when a block stays there
    for `quarantine_timeout_s`, the import agent is rebuilt. `max_read_attempts` counts the first.
    """

    progress_timeout_s: float
    read_timeout_s: float
    max_quarantine_share: float
    quarantine_timeout_s: float
    max_read_attempts: int


class ReadEnd(Enum):
    """How a READ ended; no byte of it lands any more. FENCED: its agent was destroyed."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"
    FENCED = "fenced"


class CloseReason(Enum):
    """Why a reader lets go of an export."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Ask for the export. While the stream is open and moving, prefill keeps the blocks."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class PostRead:
    """READ `remote_blocks[i]` of the exporter's into `local_blocks[i]`; tell `read_ended` under
    this number. `checksums`: one per block, or none."""

    number: int
    key: RequestKey
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Positions first_block.. of the prompt are needed no longer. `read_s`: how long their READ
    took; None when nothing was read, because this worker had them."""

    key: RequestKey
    first_block: int
    num_blocks: int
    read_s: float | None


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Nothing new; keeps the exporter's deadline away."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class CloseLease:
    """The peer learns at once why; nothing follows."""

    key: RequestKey
    reason: CloseReason


@dataclass(frozen=True, slots=True)
class RebuildAgent:
    """Destroy the import agent, and all READs with it, and build a new one."""


ImportWord = OpenLease | PostRead | Acknowledge | KeepAlive | CloseLease | RebuildAgent


@dataclass(frozen=True, slots=True)
class Received:
    """All blocks are read, fenced and covered; they are the caller's again."""

    key: RequestKey
    num_read_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NotReceived:
    """The hand-off failed. Its blocks are no longer the caller's: free, or in quarantine."""

    key: RequestKey
    error: HocketError


@dataclass(slots=True)
class ImportCounters:
    """Since the start of the worker, for metrics; gauges are as the last `tick` left them.

    `bytes` and `read_seconds` are of published READs: the latter sums over READs, from post to
    fence, as `tick` saw them. `fences_tripped` are those of `fences_checked` that failed.
    `blocks_skipped`: not read, because this worker's prefix cache had them.
    """

    begun: int = 0
    imported: int = 0
    failed: int = 0
    cancelled: int = 0
    reads: int = 0
    reads_failed: int = 0
    reads_corrupt: int = 0
    reads_timed_out: int = 0
    reads_retried: int = 0
    reads_abandoned: int = 0
    fences_checked: int = 0
    fences_tripped: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    blocks_skipped: int = 0
    quarantined_blocks: int = 0
    rebuilds: int = 0
    reads_in_flight: int = field(default=0, metadata=GAUGE)
    blocks_in_quarantine: int = field(default=0, metadata=GAUGE)
