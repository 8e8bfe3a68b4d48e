"""What `export_ownership` is told to go by, and what it says.

Its words are for readers, in order; `prefill_workers/kv_export.py` turns them into messages. The
decode twin is `import_words.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import HocketError
from hocket.types import RequestKey


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """`max_unread_share` is a share of the pool's blocks."""

    num_slots: int
    progress_timeout_s: float
    open_timeout_s: float
    max_unread_share: float


@dataclass(frozen=True, slots=True)
class Opened:
    """The reader's stream is accepted."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The reader may READ these blocks: positions first_block.. of the prompt."""

    stream: int
    first_block: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """The prompt is computed, all of it was announced: the bundle's turn, always last."""

    stream: int
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing new; keeps the reader's deadline away."""

    stream: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing follows on this stream. `error` None: the reader knows, it has all of it."""

    stream: int
    error: HocketError | None


ExportWord = Opened | Ready | Whole | Alive | Ended


@dataclass(frozen=True, slots=True)
class ExportLost:
    """The export ended while its prompt was still being computed: the engine should abort it."""

    key: RequestKey
    error: HocketError


@dataclass(slots=True)
class ExportCounters:
    """Since the start of the worker, for metrics."""

    begun: int = 0
    opened: int = 0
    completed: int = 0
    aborted: int = 0
    expired_unopened: int = 0
    expired_stalled: int = 0
    peers_gone: int = 0
    rejected_opens: int = 0
