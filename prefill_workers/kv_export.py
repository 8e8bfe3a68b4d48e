"""Exported prompts: who may read which block until when. The prefill half of a hand-off.

The engine begins an export when it admits a request, announces blocks as they are computed and
finishes with the bundle. A decode worker reads the blocks and acknowledges them on its Export
stream, which `server.py` only carries. Next in the story: `decode_workers/kv_import.py`.

An export holds each of its blocks twice: for the computation, which reads earlier blocks until the
prompt is whole, and for the reader. So a block is free when both holds are gone.

    state      reader            ends by                                    deadline
    WAITING    none yet          open -> OPEN; abort, deadline -> gone      open_timeout after the
                                                                            last chunk
    OPEN       has the stream    close, abort, peer gone, deadline -> gone  progress_timeout after
                                                                            the last update
    ABANDONED  gone              finish or abort by the engine -> gone      the engine's next step

"gone" passes through ABANDONED when the prompt is still being computed; `tick` then names the
request, so that the engine stops. Leaving WAITING or OPEN bumps the slot's epoch before anything
is freed. Nothing here reads a clock; deadlines fire from `tick`, not from traffic.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

from hocket.errors import Cancelled, FingerprintMismatch, HandOffFailed, HocketError
from hocket.kv.block_pool import BlockPool
from hocket.kv.transfer import KVExporter
from hocket.kv.wire import error_to_event, pool_to_message
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import (
    bundle_to_message,
    fingerprint_from_message,
    handle_from_message,
    key_from_message,
)
from hocket.types import Bundle, ExportHandle, RequestKey
from prefill_workers.export_stream import (
    EndStream,
    ExportCommand,
    ExportCounters,
    ExportLost,
    ExportMessage,
    ExportSettings,
    SendEvent,
    StreamGone,
    UpdateArrived,
)

_REMEMBERED_EXPORTS = 4096


class _State(Enum):
    WAITING = "waiting"
    OPEN = "open"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class _Export:
    """One exported prompt. Blocks [0, num_ready) were announced; `unread` still has the rest of
    what the reader holds: positions in the prompt -> blocks."""

    handle: ExportHandle
    blocks: list[int]
    deadline: float
    state: _State = _State.WAITING
    is_computing: bool = True
    num_ready: int = 0
    unread: dict[int, int] = field(default_factory=dict[int, int])
    bundle: Bundle | None = None
    stream: int | None = None
    last_sent: float = 0.0


class ExportTable:
    """All exports of one prefill worker. Every method is called by the engine thread."""

    def __init__(self, pool: BlockPool, exporter: KVExporter, settings: ExportSettings) -> None:
        self.settings = settings
        self.counters = ExportCounters()
        self._pool = pool
        self._exporter = exporter
        self._free_slots = deque(range(settings.num_slots))
        self._exports: dict[RequestKey, _Export] = {}
        self._streams: dict[int, RequestKey] = {}
        # Opened streams whose export ended; the server still has to say that they are gone.
        self._ended_streams: set[int] = set()
        self._ended: OrderedDict[RequestKey, str] = OrderedDict()
        self._lost: list[ExportLost] = []
        self._messages: list[ExportMessage] = []

    # For the engine: the request's own progress.

    @property
    def unread_blocks(self) -> int:
        """Blocks of finished prompts that nobody has read yet."""
        return sum(len(e.unread) for e in self._exports.values() if not e.is_computing)

    @property
    def is_idle(self) -> bool:
        return not self._exports and not self._messages

    def keys(self) -> list[RequestKey]:
        return list(self._exports)

    def can_begin(self, num_blocks: int) -> bool:
        """Whether `begin` would find blocks and a slot, and unread prompts are within their share.

        A prompt that could never fit is refused elsewhere, before it waits here.
        """
        limit = self.settings.max_unread_share * self._pool.num_blocks
        has_room = num_blocks <= self._pool.num_free and bool(self._free_slots)
        return has_room and self.unread_blocks <= limit

    def begin(self, key: RequestKey, num_blocks: int, now: float) -> ExportHandle:
        """Reserves the whole prompt's blocks and a slot; the handle is what decode opens.

        Raises:
            OutOfBlocks: `can_begin` was not asked.
        """
        assert key not in self._exports, f"{key} is exported already"
        assert self._free_slots, "no free export slot"
        blocks = self._pool.allocate(num_blocks)
        self._pool.pin(blocks)
        slot = self._free_slots.popleft()
        handle = ExportHandle(
            worker_id=self.settings.worker_id,
            worker_epoch=self.settings.worker_epoch,
            address=self.settings.address,
            slot=slot,
            slot_epoch=self._exporter.slot_epoch(slot),
            fingerprint=self.settings.fingerprint,
            num_blocks=num_blocks,
        )
        export = _Export(handle, blocks, deadline=now + self.settings.open_timeout_s)
        export.unread = dict(enumerate(blocks))
        self._exports[key] = export
        self._ended.pop(key, None)
        self.counters.begun += 1
        return handle

    def blocks(self, key: RequestKey) -> list[int]:
        """The prompt's blocks, in order."""
        return list(self._exports[key].blocks)

    def chunk_ready(self, key: RequestKey, first_block: int, num_blocks: int, now: float) -> None:
        """The device has finished writing these blocks (positions in the prompt), in order."""
        export = self._exports[key]
        assert export.is_computing, f"{key} is finished"
        assert first_block == export.num_ready, (first_block, export.num_ready)
        assert first_block + num_blocks <= len(export.blocks), (first_block, num_blocks)
        export.num_ready += num_blocks
        if export.state is _State.OPEN:
            self._send_chunk(export, first_block, now)
        elif export.state is _State.WAITING:
            export.deadline = now + self.settings.open_timeout_s

    def finish(self, key: RequestKey, bundle: Bundle, now: float) -> None:
        """The prompt is whole: its computation's hold ends; the reader gets the bundle, last."""
        export = self._exports[key]
        assert export.is_computing, f"{key} is finished already"
        assert export.num_ready == len(export.blocks), (export.num_ready, len(export.blocks))
        export.is_computing = False
        export.bundle = bundle
        self._pool.free(export.blocks)
        if export.state is _State.ABANDONED:
            del self._exports[key]
        elif export.state is _State.OPEN:
            self._send_bundle(export, bundle, now)
        else:
            export.deadline = now + self.settings.open_timeout_s

    def abort(self, key: RequestKey, error: HocketError, now: float) -> None:
        """The request failed or was cancelled, and nothing computes it any more. One that is not
        here is no error: whatever ended it has freed it."""
        export = self._exports.get(key)
        if export is None:
            return
        if export.state is not _State.ABANDONED:
            self.counters.aborted += 1
            self._end(key, error, now)
        if export.is_computing:
            export.is_computing = False
            self._pool.free(export.blocks)
            del self._exports[key]
        self._lost = [lost for lost in self._lost if lost.key != key]

    def tick(self, now: float) -> list[ExportLost]:
        """Fires deadlines and keeps streams alive. Names, once each, the exports that ended under
        a computation; the engine aborts those requests."""
        for key, export in list(self._exports.items()):
            if export.state is not _State.ABANDONED and now >= export.deadline:
                self._expire(key, export, now)
            elif (
                export.state is _State.OPEN
                and now - export.last_sent >= self.settings.progress_timeout_s / 3
            ):
                self._send(export, worker.ExportEvent(progress=worker.Progress()), now)
        lost, self._lost = self._lost, []
        return lost

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens."""
        due = [
            min(e.deadline, e.last_sent + self.settings.progress_timeout_s / 3)
            if e.state is _State.OPEN
            else e.deadline
            for e in self._exports.values()
            if e.state is not _State.ABANDONED
        ]
        return max(0.0, min(due) - now) if due else None

    # For the server: what comes and goes on the streams.

    def take(self, command: ExportCommand, now: float) -> None:
        """Takes what came on a stream. The server reports every stream's end, also of those that
        this table ended. A stream that names what is not its own is answered and ended, and
        touches nobody's blocks."""
        match command:
            case StreamGone(stream):
                self._stream_gone(stream, now)
            case UpdateArrived(stream, update):
                try:
                    self._update(stream, update, now)
                except HocketError as error:
                    self._refuse(stream, error, now)

    def take_messages(self) -> list[ExportMessage]:
        """What is to be sent since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def _refuse(self, stream: int, error: HocketError, now: float) -> None:
        """Ends a stream that asked for what it may not have, and the export that it reads."""
        if stream in self._streams:
            self._end(self._streams[stream], error, now)
        else:
            self._messages += [SendEvent(stream, error_to_event(error)), EndStream(stream)]
            self._ended_streams.add(stream)

    def _stream_gone(self, stream: int, now: float) -> None:
        self._ended_streams.discard(stream)
        key = self._streams.get(stream)
        if key is not None:
            self.counters.peers_gone += 1
            self._end(key, HandOffFailed(f"The reader of {key} is gone."), now)
            self._ended_streams.discard(stream)

    def _update(self, stream: int, update: worker.ExportUpdate, now: float) -> None:
        kind = update.WhichOneof("update")
        if kind == "open":
            self._open(stream, update.open, now)
            return
        if stream in self._ended_streams:
            # The export ended while this was on its way: everything is freed already.
            return
        key = self._streams.get(stream)
        if key is None:
            raise HandOffFailed(f"{kind} on a stream that opened no export; nothing was released.")
        export = self._exports[key]
        export.deadline = now + self.settings.progress_timeout_s
        if kind == "acknowledge":
            self._acknowledge(export, update.acknowledge)
        elif kind == "close":
            self._close(key, export, update.close, now)

    def _open(self, stream: int, opening: worker.OpenExport, now: float) -> None:
        key = key_from_message(opening.key)
        try:
            export = self._find(key, opening)
        except HocketError:
            self.counters.rejected_opens += 1
            raise
        self.counters.opened += 1
        self._streams[stream] = key
        export.stream = stream
        export.state = _State.OPEN
        export.deadline = now + self.settings.progress_timeout_s
        self._free_unread(export, 0, opening.first_block)
        self._send(
            export, worker.ExportEvent(opened=pool_to_message(self._exporter.describe())), now
        )
        if export.num_ready > opening.first_block:
            self._send_chunk(export, opening.first_block, now)
        if export.bundle is not None:
            self._send_bundle(export, export.bundle, now)

    def _find(self, key: RequestKey, opening: worker.OpenExport) -> _Export:
        """The export that an Open names. Raises when it names another life, slot or layout."""
        handle = handle_from_message(opening.export)
        settings = self.settings
        if (handle.worker_id, handle.worker_epoch) != (settings.worker_id, settings.worker_epoch):
            raise HandOffFailed(
                f"{key} was exported by {handle.worker_id} in epoch {handle.worker_epoch}; this is "
                f"{settings.worker_id} in epoch {settings.worker_epoch}. Start the request again."
            )
        export = self._exports.get(key)
        if export is None or export.state is _State.ABANDONED:
            why = self._ended.get(key, "it was never begun")
            raise HandOffFailed(f"{key} is not exported here: {why}", request=key)
        if handle != export.handle:
            raise HandOffFailed(
                f"{key} is exported in slot {export.handle.slot} with epoch "
                f"{export.handle.slot_epoch}, not in slot {handle.slot} with {handle.slot_epoch}."
            )
        if export.state is _State.OPEN:
            raise HandOffFailed(f"{key} is being read already.", request=key)
        difference = settings.fingerprint.difference(fingerprint_from_message(opening.fingerprint))
        if difference:
            raise FingerprintMismatch(f"{key} can't be read by {opening.worker_id}: {difference}.")
        if opening.first_block > len(export.blocks):
            raise HandOffFailed(f"{key} has {len(export.blocks)} blocks, not {opening.first_block}")
        return export

    def _acknowledge(self, export: _Export, ack: worker.AcknowledgeBlocks) -> None:
        end = ack.first_block + ack.num_blocks
        if end > export.num_ready:
            raise HandOffFailed(f"Blocks up to {end} acknowledged, {export.num_ready} announced.")
        self._free_unread(export, ack.first_block, end)

    def _close(
        self, key: RequestKey, export: _Export, close: worker.CloseExport, now: float
    ) -> None:
        if close.reason == worker.CloseExport.REASON_DONE and not export.is_computing:
            self.counters.completed += 1
            self._end(key, None, now)
        else:
            self.counters.aborted += 1
            self._end(key, Cancelled(f"The reader of {key} closed the hand-off."), now)

    def _expire(self, key: RequestKey, export: _Export, now: float) -> None:
        if export.state is _State.OPEN:
            self.counters.expired_stalled += 1
            timeout_s = self.settings.progress_timeout_s
            error = HandOffFailed(f"The reader of {key} did not move for {timeout_s:g} s.")
        else:
            self.counters.expired_unopened += 1
            timeout_s = self.settings.open_timeout_s
            error = HandOffFailed(f"Nobody opened the export of {key} within {timeout_s:g} s.")
        self._end(key, error, now)

    def _end(self, key: RequestKey, error: HocketError | None, now: float) -> None:
        """Ends the reader's side. The epoch comes first: from here on a READ fails its fence."""
        export = self._exports[key]
        slot = export.handle.slot
        self._exporter.bump_slot_epoch(slot)
        self._free_slots.append(slot)
        self._free_unread(export, 0, len(export.blocks))
        export.state = _State.ABANDONED
        self._remember(key, "it was read." if error is None else str(error))
        if export.stream is not None:
            if error is not None:
                self._send(export, error_to_event(error), now)
            self._messages.append(EndStream(export.stream))
            self._ended_streams.add(export.stream)
            del self._streams[export.stream]
        if not export.is_computing:
            del self._exports[key]
        elif error is not None:
            self._lost.append(ExportLost(key, error))

    def _free_unread(self, export: _Export, first: int, end: int) -> None:
        """Ends the reader's hold on these positions; those that ended before are left alone."""
        blocks = [export.unread.pop(i) for i in range(first, end) if i in export.unread]
        self._pool.free(blocks)

    def _remember(self, key: RequestKey, why: str) -> None:
        self._ended[key] = why
        if len(self._ended) > _REMEMBERED_EXPORTS:
            self._ended.popitem(last=False)

    def _send_chunk(self, export: _Export, first_block: int, now: float) -> None:
        blocks = export.blocks[first_block : export.num_ready]
        chunk = worker.ChunkReady(first_block=first_block, blocks=blocks)
        self._send(export, worker.ExportEvent(chunk=chunk), now)

    def _send_bundle(self, export: _Export, bundle: Bundle, now: float) -> None:
        self._send(export, worker.ExportEvent(bundle=bundle_to_message(bundle)), now)

    def _send(self, export: _Export, event: worker.ExportEvent, now: float) -> None:
        assert export.stream is not None
        export.last_sent = now
        self._messages.append(SendEvent(export.stream, event))
