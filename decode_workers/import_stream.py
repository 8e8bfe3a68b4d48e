"""The words between an import table and its surroundings: commands in, messages out, outcomes.

`server.py` opens an Export stream on a prefill worker for each import, turns what comes down it
into commands for the engine thread, which hands them to the table (`kv_import.py`), and sends the
table's messages. The prefill twin is `prefill_workers/export_stream.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import HocketError
from hocket.rpc import worker_pb2 as worker
from hocket.scheduling.import_words import ImportLimits
from hocket.types import Bundle, Fingerprint, RequestKey


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """Who imports, and the limits.

    `max_quarantine_share` is a share of the pool's blocks; above it, or when a block stays in
    quarantine for `quarantine_timeout_s`, the import agent is rebuilt. `max_read_attempts` counts
    the first one.
    """

    worker_id: str
    worker_epoch: int
    fingerprint: Fingerprint
    progress_timeout_s: float
    read_timeout_s: float
    max_quarantine_share: float
    quarantine_timeout_s: float = 30.0
    max_read_attempts: int = 2

    def limits(self) -> ImportLimits:
        """What the ownership machine goes by."""
        return ImportLimits(
            progress_timeout_s=self.progress_timeout_s,
            read_timeout_s=self.read_timeout_s,
            max_quarantine_share=self.max_quarantine_share,
            quarantine_timeout_s=self.quarantine_timeout_s,
            max_read_attempts=self.max_read_attempts,
        )


@dataclass(frozen=True, slots=True)
class EventArrived:
    """An event came down the stream of this import."""

    key: RequestKey
    event: worker.ExportEvent


@dataclass(frozen=True, slots=True)
class StreamGone:
    """The stream of this import could not be opened, broke, or was ended by the peer."""

    key: RequestKey
    error: HocketError


@dataclass(frozen=True, slots=True)
class ReadsEnded:
    """Some READs ended: a reason to wake up. The next `tick` sees which."""


ImportCommand = EventArrived | StreamGone | ReadsEnded


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open an Export stream to `address` (host:port) and send `update` on it."""

    key: RequestKey
    address: str
    update: worker.ExportUpdate


@dataclass(frozen=True, slots=True)
class SendUpdate:
    """Send this up the stream."""

    key: RequestKey
    update: worker.ExportUpdate


@dataclass(frozen=True, slots=True)
class EndStream:
    """Nothing more will be sent on this stream: half-close it, and let go of it."""

    key: RequestKey


ImportMessage = OpenStream | SendUpdate | EndStream


@dataclass(frozen=True, slots=True)
class Imported:
    """All blocks are read, fenced and covered; they belong to the engine again."""

    key: RequestKey
    bundle: Bundle
    num_bytes: int
    transport: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """The hand-off failed. Its blocks are no longer the engine's: free, or in quarantine."""

    key: RequestKey
    error: HocketError
