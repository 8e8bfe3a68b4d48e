"""Exported prompts on the wire: prefill's half of a hand-off, between its machine and its peers.

The engine begins an export when it admits a request, announces blocks as they are computed and
finishes with the bundle. A decode worker reads the blocks and acknowledges them on its Export
stream, which `server.py` only carries. What may happen when, and who holds which block, is
`hocket.scheduling.export_ownership`'s; here its words become messages, and messages its calls. Next
in the story: `decode_workers/kv_import.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hocket.errors import FingerprintMismatch, HandOffFailed, HocketError
from hocket.kv.transfer import KVExporter
from hocket.kv.wire import error_to_event, pool_to_message
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import (
    bundle_to_message,
    fingerprint_from_message,
    handle_from_message,
    key_from_message,
)
from hocket.scheduling.export_ownership import ExportedBlocks, ExportOwnership
from hocket.scheduling.export_words import (
    Alive,
    Ended,
    ExportCounters,
    ExportLost,
    ExportWord,
    Opened,
    Ready,
    Whole,
)
from hocket.types import Bundle, ExportHandle, RequestKey
from prefill_workers.export_stream import (
    EndStream,
    ExportCommand,
    ExportMessage,
    ExportSettings,
    SendEvent,
    StreamGone,
    UpdateArrived,
)


class ExportTable:
    """All exports of one prefill worker. Every method is called by the engine thread."""

    def __init__(
        self, pool: ExportedBlocks, exporter: KVExporter, settings: ExportSettings
    ) -> None:
        self.settings = settings
        self._exporter = exporter
        self._owned = ExportOwnership(pool, exporter, settings.limits())
        # Of finished prompts that may still have to be told.
        self._bundles: dict[RequestKey, Bundle] = {}

    # For the engine: the request's own progress.

    @property
    def counters(self) -> ExportCounters:
        return self._owned.counters

    @property
    def unread_blocks(self) -> int:
        """Blocks of finished prompts that nobody has read yet."""
        return self._owned.unread_blocks

    @property
    def is_idle(self) -> bool:
        return self._owned.is_idle

    def keys(self) -> list[RequestKey]:
        return self._owned.keys()

    def can_begin(self, num_new_blocks: int) -> bool:
        """Whether `begin` would find a slot, the pool has so many blocks free, and unread prompts
        are within their share. A prompt that could never fit is refused before it waits here."""
        return self._owned.can_begin(num_new_blocks)

    def begin(
        self, key: RequestKey, blocks: Sequence[int], now: float, num_ready: int = 0
    ) -> ExportHandle:
        """Exports a prompt whose blocks the caller holds; that hold is the table's from here on.
        The first `num_ready` blocks are computed already. The handle is what decode opens."""
        settings = self.settings
        slot, slot_epoch = self._owned.begin(key, blocks, now, num_ready)
        return ExportHandle(
            worker_id=settings.worker_id,
            worker_epoch=settings.worker_epoch,
            address=settings.address,
            slot=slot,
            slot_epoch=slot_epoch,
            fingerprint=settings.fingerprint,
            num_blocks=len(blocks),
        )

    def blocks(self, key: RequestKey) -> list[int]:
        """The prompt's blocks, in order."""
        return self._owned.blocks(key)

    def chunk_ready(self, key: RequestKey, first_block: int, num_blocks: int, now: float) -> None:
        """The device has finished writing these blocks (positions in the prompt), in order."""
        self._owned.chunk_ready(key, first_block, num_blocks, now)

    def finish(self, key: RequestKey, bundle: Bundle, now: float) -> None:
        """The prompt is whole: its computation's hold ends; the reader gets the bundle, last."""
        self._bundles[key] = bundle
        self._owned.finish(key, now)

    def abort(self, key: RequestKey, error: HocketError, now: float) -> None:
        """The request failed or was cancelled, and nothing computes it any more. One that is not
        here is no error: whatever ended it has freed it."""
        self._owned.abort(key, error, now)

    def tick(self, now: float) -> list[ExportLost]:
        """Fires deadlines and keeps streams alive. Names, once each, the exports that ended under
        a computation; the engine aborts those requests."""
        return self._owned.tick(now)

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens."""
        return self._owned.next_tick_s(now)

    # For the server: what comes and goes on the streams.

    def take(self, command: ExportCommand, now: float) -> None:
        """Takes what came on a stream. The server reports every stream's end, also of those that
        this table ended. A stream that names what is not its own is answered and ended, and
        touches nobody's blocks."""
        match command:
            case StreamGone(stream):
                self._owned.peer_gone(stream, now)
            case UpdateArrived(stream, update):
                try:
                    self._update(stream, update, now)
                except HocketError as error:
                    self._owned.refuse(stream, error, now)

    def take_messages(self) -> list[ExportMessage]:
        """What is to be sent since the last call, in order."""
        messages: list[ExportMessage] = []
        for word in self._owned.take_words():
            messages += self._messages(word)
        for key in self._bundles.keys() - self._owned.keys():
            del self._bundles[key]
        return messages

    def _update(self, stream: int, update: worker.ExportUpdate, now: float) -> None:
        match update.WhichOneof("update"):
            case "open":
                self._open(stream, update.open, now)
            case "acknowledge":
                ack = update.acknowledge
                self._owned.acknowledge(stream, ack.first_block, ack.num_blocks, now)
            case "close":
                reason = update.close.reason
                is_done = reason == worker.CloseExport.REASON_DONE
                is_cancelled = reason == worker.CloseExport.REASON_CANCELLED
                self._owned.close(stream, is_done, now, is_cancelled=is_cancelled)
            case _:
                # Progress, or a word of a newer protocol: the peer is alive.
                self._owned.progress(stream, now)

    def _open(self, stream: int, opening: worker.OpenExport, now: float) -> None:
        """Raises when the Open names another life, slot or layout."""
        key = key_from_message(opening.key)
        handle = handle_from_message(opening.export)
        try:
            self._check_life(key, handle)
            self._check_layout(key, opening)
        except HocketError:
            self.counters.rejected_opens += 1
            raise
        self._owned.open(stream, key, handle.slot, handle.slot_epoch, opening.first_block, now)

    def _check_life(self, key: RequestKey, handle: ExportHandle) -> None:
        settings = self.settings
        if (handle.worker_id, handle.worker_epoch) != (settings.worker_id, settings.worker_epoch):
            raise HandOffFailed(
                f"{key} was exported by {handle.worker_id} in epoch {handle.worker_epoch}; this is "
                f"{settings.worker_id} in epoch {settings.worker_epoch}. Start the request again."
            )

    def _check_layout(self, key: RequestKey, opening: worker.OpenExport) -> None:
        theirs = fingerprint_from_message(opening.fingerprint)
        if difference := self.settings.fingerprint.difference(theirs):
            raise FingerprintMismatch(f"{key} can't be read by {opening.worker_id}: {difference}.")

    def _messages(self, word: ExportWord) -> list[ExportMessage]:
        match word:
            case Opened(stream):
                opened = pool_to_message(self._exporter.describe())
                return [SendEvent(stream, worker.ExportEvent(opened=opened))]
            case Ready(stream, first_block, blocks):
                sums = self._exporter.checksums(blocks) if self.settings.has_checksums else ()
                chunk = worker.ChunkReady(first_block=first_block, blocks=blocks, checksums=sums)
                return [SendEvent(stream, worker.ExportEvent(chunk=chunk))]
            case Whole(stream, key):
                bundle = bundle_to_message(self._bundles[key])
                return [SendEvent(stream, worker.ExportEvent(bundle=bundle))]
            case Alive(stream):
                return [SendEvent(stream, worker.ExportEvent(progress=worker.Progress()))]
            case Ended(stream, error):
                why = [] if error is None else [SendEvent(stream, error_to_event(error))]
                return [*why, EndStream(stream)]
