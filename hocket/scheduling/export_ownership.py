"""Who may read which exported block until when: prefill's half of a hand-off, as a pure machine.

`prefill_workers/kv_export.py` puts the wire and the transfer around it. Every export holds each of
its blocks twice: for the computation, which reads earlier blocks until the prompt is whole, and for
the reader. So an export lets go of a block when both holds are gone; others may hold it too.

    state      reader            ends by                                    deadline
    WAITING    none yet          open -> OPEN; abort, deadline -> gone      open_timeout after the
                                                                            last chunk
    OPEN       has the stream    close, abort, peer gone, deadline -> gone  progress_timeout after
                                                                            the last update
    ABANDONED  gone              finish or abort by the engine -> gone      the engine's next step

"gone" passes through ABANDONED when the prompt is still being computed; `tick` then names the
request, so that the engine stops. Leaving WAITING or OPEN bumps the slot's epoch before any block
is freed. Every ending may come again, and late: it finds nothing and does nothing. No clock, no
I/O: deadlines fire from `tick`, not from traffic.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hocket.errors import Cancelled, HandOffFailed, HocketError
from hocket.scheduling.export_words import (
    Alive,
    Ended,
    ExportCounters,
    ExportLimits,
    ExportLost,
    ExportWord,
    Opened,
    Ready,
    Whole,
)
from hocket.types import RequestKey

_REMEMBERED_EXPORTS = 4096


class ExportState(Enum):
    WAITING = "waiting"
    OPEN = "open"
    ABANDONED = "abandoned"


class ExportedBlocks(Protocol):
    """What an export needs of a block pool."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    def pin(self, blocks: Sequence[int]) -> None: ...
    def free(self, blocks: Sequence[int]) -> None: ...


class SlotEpochs(Protocol):
    """The epoch words that readers see, one per export slot."""

    def slot_epoch(self, slot: int) -> int: ...
    def bump_slot_epoch(self, slot: int) -> int: ...


@dataclass(slots=True)
class _Export:
    """One exported prompt. Blocks [0, num_ready) were announced; `unread` still has the rest of
    what the reader holds: positions in the prompt -> blocks."""

    slot: int
    slot_epoch: int
    blocks: list[int]
    deadline: float
    num_ready: int
    unread: dict[int, int]
    state: ExportState = ExportState.WAITING
    is_computing: bool = True
    stream: int | None = None
    last_sent: float = 0.0


@dataclass(slots=True)
class _Streams:
    """Whose stream is which. `ended`: those that we ended and whose peer has not gone yet."""

    keys: dict[int, RequestKey] = field(default_factory=dict[int, RequestKey])
    ended: set[int] = field(default_factory=set[int])


class ExportOwnership:
    """All exports of one prefill worker."""

    def __init__(self, pool: ExportedBlocks, epochs: SlotEpochs, limits: ExportLimits) -> None:
        self.limits = limits
        self.counters = ExportCounters()
        self._pool = pool
        self._epochs = epochs
        self._free_slots = deque(range(limits.num_slots))
        self._exports: dict[RequestKey, _Export] = {}
        self._streams = _Streams()
        self._past: OrderedDict[RequestKey, str] = OrderedDict()
        self._lost: list[ExportLost] = []
        self._words: list[ExportWord] = []

    # The request's own progress, told by the engine.

    @property
    def unread_blocks(self) -> int:
        """Blocks of finished prompts, each counted once, that a reader has not read yet."""
        finished = (e for e in self._exports.values() if not e.is_computing)
        return len({block for export in finished for block in export.unread.values()})

    @property
    def is_idle(self) -> bool:
        return not self._exports and not self._words

    def keys(self) -> list[RequestKey]:
        return list(self._exports)

    def blocks(self, key: RequestKey) -> list[int]:
        """The prompt's blocks, in order."""
        return list(self._exports[key].blocks)

    def can_begin(self, num_new_blocks: int) -> bool:
        """Whether there are blocks and a slot, and unread prompts are within their share."""
        limit = self.limits.max_unread_share * self._pool.num_blocks
        has_room = num_new_blocks <= self._pool.num_free and bool(self._free_slots)
        return has_room and self.unread_blocks <= limit

    def begin(
        self, key: RequestKey, blocks: Sequence[int], now: float, num_ready: int = 0
    ) -> tuple[int, int]:
        """Takes over the caller's hold on the whole prompt's blocks, the first `num_ready` of them
        computed; returns the export's slot and its epoch."""
        assert key not in self._exports, f"{key} is exported already"
        assert self._free_slots, "no free export slot"
        assert 0 <= num_ready <= len(blocks), (num_ready, len(blocks))
        self._pool.pin(blocks)
        slot = self._free_slots.popleft()
        epoch = self._epochs.slot_epoch(slot)
        deadline = now + self.limits.open_timeout_s
        unread = dict(enumerate(blocks))
        self._exports[key] = _Export(slot, epoch, list(blocks), deadline, num_ready, unread)
        self._past.pop(key, None)
        self.counters.begun += 1
        return slot, epoch

    def chunk_ready(self, key: RequestKey, first_block: int, num_blocks: int, now: float) -> None:
        """The device has finished writing these blocks (positions in the prompt), in order."""
        export = self._exports[key]
        assert export.is_computing, f"{key} is finished"
        assert first_block == export.num_ready, (first_block, export.num_ready)
        assert first_block + num_blocks <= len(export.blocks), (first_block, num_blocks)
        export.num_ready += num_blocks
        if export.stream is not None:
            self._say_ready(export, export.stream, first_block, now)
        elif export.state is ExportState.WAITING:
            export.deadline = now + self.limits.open_timeout_s

    def finish(self, key: RequestKey, now: float) -> None:
        """The prompt is whole: its computation's hold ends; the reader is told last of all."""
        export = self._exports[key]
        assert export.is_computing, f"{key} is finished already"
        assert export.num_ready == len(export.blocks), (export.num_ready, len(export.blocks))
        export.is_computing = False
        self._pool.free(export.blocks)
        if export.state is ExportState.ABANDONED:
            del self._exports[key]
        elif export.stream is not None:
            self._say(export, Whole(export.stream, key), now)
        else:
            export.deadline = now + self.limits.open_timeout_s

    def abort(self, key: RequestKey, error: HocketError, now: float) -> None:
        """The request failed or was cancelled, and nothing computes it any more. One that is not
        here is no error: whatever ended it has freed it."""
        export = self._exports.get(key)
        if export is None:
            return
        if export.state is not ExportState.ABANDONED:
            self.counters.aborted += 1
            self._end(key, error, now)
        if export.is_computing:
            export.is_computing = False
            self._pool.free(export.blocks)
            del self._exports[key]
        self._lost = [lost for lost in self._lost if lost.key != key]

    # What comes up the streams. Each raises `HandOffFailed` for what is not the stream's to ask;
    # then nothing was changed, and `refuse` ends the stream.

    def open(
        self, stream: int, key: RequestKey, slot: int, slot_epoch: int, first_block: int, now: float
    ) -> None:
        """A reader asks for the export; its first `first_block` blocks it will not read."""
        try:
            self._check_is_new(stream, key)
            export = self._find(key, slot, slot_epoch, first_block)
        except HocketError:
            self.counters.rejected_opens += 1
            raise
        self.counters.opened += 1
        self._streams.keys[stream] = key
        export.stream = stream
        export.state = ExportState.OPEN
        export.deadline = now + self.limits.progress_timeout_s
        self._free_unread(export, 0, first_block)
        self._say(export, Opened(stream), now)
        if export.num_ready > first_block:
            self._say_ready(export, stream, first_block, now)
        if not export.is_computing:
            self._say(export, Whole(stream, key), now)

    def acknowledge(self, stream: int, first_block: int, num_blocks: int, now: float) -> None:
        """The reader needs these blocks no longer."""
        if (export := self._moved(stream, now)) is None:
            return
        end = first_block + num_blocks
        if end > export.num_ready:
            raise HandOffFailed(f"Blocks up to {end} acknowledged, {export.num_ready} announced.")
        self._free_unread(export, first_block, end)

    def progress(self, stream: int, now: float) -> None:
        """The reader is alive."""
        self._moved(stream, now)

    def close(self, stream: int, is_done: bool, now: float, *, is_cancelled: bool = False) -> None:
        """The reader has all of it, or gives it up: because the request was cancelled there, or
        because the hand-off failed, which the reader may still make good."""
        if (export := self._moved(stream, now)) is None:
            return
        key = self._streams.keys[stream]
        if is_done and not export.is_computing:
            self.counters.completed += 1
            self._end(key, None, now)
            return
        self.counters.aborted += 1
        error: HocketError = HandOffFailed(f"The reader of {key} gave the hand-off up.")
        if is_cancelled:
            error = Cancelled(f"The reader of {key} cancelled it.")
        self._end(key, error, now)

    def refuse(self, stream: int, error: HocketError, now: float) -> None:
        """Ends a stream that asked for what it may not have, and the export that it reads."""
        if stream in self._streams.keys:
            self._end(self._streams.keys[stream], error, now)
        else:
            self._words.append(Ended(stream, error))
            self._streams.ended.add(stream)

    def peer_gone(self, stream: int, now: float) -> None:
        """The stream is over, whoever ended it: nothing can be told on it any more."""
        self._streams.ended.discard(stream)
        key = self._streams.keys.get(stream)
        if key is not None:
            self.counters.peers_gone += 1
            self._end(key, HandOffFailed(f"The reader of {key} is gone."), now)
            self._streams.ended.discard(stream)

    # Time.

    def tick(self, now: float) -> list[ExportLost]:
        """Fires deadlines and keeps streams alive. Names, once each, the exports that ended under
        a computation; the engine aborts those requests."""
        for key, export in list(self._exports.items()):
            if export.state is not ExportState.ABANDONED and now >= export.deadline:
                self._expire(key, export, now)
            elif export.stream is not None and now >= self._alive_due(export):
                self._say(export, Alive(export.stream), now)
        lost, self._lost = self._lost, []
        return lost

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens."""
        due = [
            min(e.deadline, self._alive_due(e)) if e.stream is not None else e.deadline
            for e in self._exports.values()
            if e.state is not ExportState.ABANDONED
        ]
        return max(0.0, min(due) - now) if due else None

    def take_words(self) -> list[ExportWord]:
        """What is to be told since the last call, in order."""
        words, self._words = self._words, []
        return words

    def _alive_due(self, export: _Export) -> float:
        return export.last_sent + self.limits.progress_timeout_s / 3

    def _check_is_new(self, stream: int, key: RequestKey) -> None:
        """A stream is the lease of one export: a second one would outlive or end the first."""
        if stream in self._streams.keys or stream in self._streams.ended:
            raise HandOffFailed(f"{key} needs an Export stream of its own.", request=key)

    def _find(self, key: RequestKey, slot: int, slot_epoch: int, first_block: int) -> _Export:
        export = self._exports.get(key)
        if export is None or export.state is ExportState.ABANDONED:
            why = self._past.get(key, "it was never begun")
            raise HandOffFailed(f"{key} is not exported here: {why}", request=key)
        if (slot, slot_epoch) != (export.slot, export.slot_epoch):
            raise HandOffFailed(
                f"{key} is exported in slot {export.slot} with epoch {export.slot_epoch}, not in "
                f"slot {slot} with {slot_epoch}."
            )
        if export.state is ExportState.OPEN:
            raise HandOffFailed(f"{key} is being read already.", request=key)
        if first_block > len(export.blocks):
            raise HandOffFailed(f"{key} has {len(export.blocks)} blocks, not {first_block}")
        return export

    def _moved(self, stream: int, now: float) -> _Export | None:
        """The export of a stream on which something came; None when it ended while this was on its
        way: everything is freed already."""
        if stream in self._streams.ended:
            return None
        key = self._streams.keys.get(stream)
        if key is None:
            raise HandOffFailed("A stream that opened no export; nothing was released.")
        export = self._exports[key]
        export.deadline = now + self.limits.progress_timeout_s
        return export

    def _expire(self, key: RequestKey, export: _Export, now: float) -> None:
        if export.state is ExportState.OPEN:
            self.counters.expired_stalled += 1
            timeout_s = self.limits.progress_timeout_s
            error = HandOffFailed(f"The reader of {key} did not move for {timeout_s:g} s.")
        else:
            self.counters.expired_unopened += 1
            timeout_s = self.limits.open_timeout_s
            error = HandOffFailed(f"Nobody opened the export of {key} within {timeout_s:g} s.")
        self._end(key, error, now)

    def _end(self, key: RequestKey, error: HocketError | None, now: float) -> None:
        """Ends the reader's side. The epoch comes first: from here on a READ fails its fence."""
        export = self._exports[key]
        self._epochs.bump_slot_epoch(export.slot)
        self._free_slots.append(export.slot)
        self._free_unread(export, 0, len(export.blocks))
        export.state = ExportState.ABANDONED
        self._remember(key, "it was read." if error is None else str(error))
        if export.stream is not None:
            self._say(export, Ended(export.stream, error), now)
            self._streams.ended.add(export.stream)
            del self._streams.keys[export.stream]
            export.stream = None
        if not export.is_computing:
            del self._exports[key]
        elif error is not None:
            self._lost.append(ExportLost(key, error))

    def _free_unread(self, export: _Export, first: int, end: int) -> None:
        """Ends the reader's hold on these positions; those that ended before are left alone."""
        self._pool.free([export.unread.pop(i) for i in range(first, end) if i in export.unread])

    def _remember(self, key: RequestKey, why: str) -> None:
        self._past[key] = why
        if len(self._past) > _REMEMBERED_EXPORTS:
            self._past.popitem(last=False)

    def _say_ready(self, export: _Export, stream: int, first_block: int, now: float) -> None:
        blocks = tuple(export.blocks[first_block : export.num_ready])
        self._say(export, Ready(stream, first_block, blocks), now)

    def _say(self, export: _Export, word: ExportWord, now: float) -> None:
        export.last_sent = now
        self._words.append(word)
