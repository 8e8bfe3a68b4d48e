"""The words between an export table and its surroundings: commands in, messages out.

`server.py` turns what happens on the Export streams into commands for the engine thread, which
hands them to the table (`kv_export.py`), and sends the table's messages. The decode twin is
`decode_workers/import_stream.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.rpc import worker_pb2 as worker
from hocket.scheduling.export_words import ExportLimits
from hocket.types import Fingerprint


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """Who exports, and the limits. `max_unread_share` is a share of the pool's blocks.
    `has_checksums`: every announced block comes with its checksum."""

    worker_id: str
    worker_epoch: int
    address: str
    fingerprint: Fingerprint
    num_slots: int
    progress_timeout_s: float
    open_timeout_s: float
    max_unread_share: float
    has_checksums: bool = False

    def limits(self) -> ExportLimits:
        """What the ownership machine goes by."""
        return ExportLimits(
            num_slots=self.num_slots,
            progress_timeout_s=self.progress_timeout_s,
            open_timeout_s=self.open_timeout_s,
            max_unread_share=self.max_unread_share,
        )


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """An update came up an Export stream. The server numbers its streams; numbers never repeat."""

    stream: int
    update: worker.ExportUpdate


@dataclass(frozen=True, slots=True)
class StreamGone:
    """An Export stream ended or broke; the reader can't be told anything any more."""

    stream: int


ExportCommand = UpdateArrived | StreamGone


@dataclass(frozen=True, slots=True)
class SendEvent:
    """Send this down the stream."""

    stream: int
    event: worker.ExportEvent


@dataclass(frozen=True, slots=True)
class EndStream:
    """Nothing more will be sent on this stream: end it."""

    stream: int


ExportMessage = SendEvent | EndStream
