"""One prefill and one decode worker's hand-off halves, joined in one thread under manual clocks.

The tables, pools and transfers are the shipped ones; this file plays engine, server and network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from decode_workers import import_stream as down
from decode_workers.import_stream import Imported, ImportFailed, ImportSettings
from decode_workers.kv_import import ImportTable
from hocket.errors import HandOffFailed
from hocket.kv.block_pool import BlockPool
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import fingerprint_to_message, handle_to_message, key_to_message
from hocket.scheduling.export_words import ExportLost
from hocket.types import Bundle, ExportHandle, Fingerprint, FinishReason, RequestKey, Usage
from prefill_workers import export_stream as up
from prefill_workers.export_stream import ExportSettings
from prefill_workers.kv_export import ExportTable
from tests.scenarios.transfers import MEMORY, Transfer

NUM_BLOCKS = 12
OPEN_TIMEOUT_S = 15.0
PROGRESS_TIMEOUT_S = 6.0
READ_TIMEOUT_S = 4.0
QUARANTINE_TIMEOUT_S = 30.0
FINGERPRINT = Fingerprint("digest", "8x160", 64, "float32", "1-invariant")
# What blocks hold: nothing yet, what somebody else has written, what decode has written itself.
EMPTY, GARBAGE, OWN = b"........", b"garbage!", b"own data"
A, B = RequestKey("request-a"), RequestKey("request-b")


def content(key: RequestKey, position: int) -> bytes:
    """What block `position` of a prompt holds."""
    return f"{key.request_id[-1]}{key.attempt:02d}-{position:04d}".encode()


def open_update(key: RequestKey, handle: ExportHandle) -> worker.ExportUpdate:
    opening = worker.OpenExport(
        key=key_to_message(key),
        export=handle_to_message(handle),
        fingerprint=fingerprint_to_message(FINGERPRINT),
    )
    return worker.ExportUpdate(open=opening)


def bundle(first_token: int = 7, finish_reason: FinishReason | None = None) -> Bundle:
    return Bundle(first_token, None, finish_reason, Usage(prompt_tokens=3, output_tokens=1), b"h")


@dataclass
class Prefill:
    """A prefill worker's half; `restart` gives it a new life at the same address."""

    transfer: Transfer
    fabric: Any
    epoch: int = 1
    num_blocks: int = NUM_BLOCKS
    has_checksums: bool = False
    lost: list[ExportLost] = field(default_factory=list[ExportLost])

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.exporter = self.transfer.exporter(self.fabric, [EMPTY] * self.num_blocks, 3)
        settings = ExportSettings(
            worker_id="prefill-0",
            worker_epoch=self.epoch,
            address="prefill:1",
            fingerprint=FINGERPRINT,
            num_slots=3,
            progress_timeout_s=PROGRESS_TIMEOUT_S,
            open_timeout_s=OPEN_TIMEOUT_S,
            max_unread_share=0.5,
            has_checksums=self.has_checksums,
        )
        self.exports = ExportTable(self.pool, self.exporter, settings)

    def begin(self, key: RequestKey, num_blocks: int, now: float) -> ExportHandle:
        """Admits a prompt: all of its blocks are reserved."""
        return self.exports.begin(key, self.pool.allocate(num_blocks), now)

    def compute(self, key: RequestKey, first: int, count: int, now: float) -> None:
        blocks = self.exports.blocks(key)
        for position in range(first, first + count):
            self.exporter.pool[blocks[position]] = content(key, position)
        self.exports.chunk_ready(key, first, count, now)

    def prompt(self, key: RequestKey, num_blocks: int, now: float) -> ExportHandle:
        """A whole prompt: computed, finished, unread."""
        handle = self.begin(key, num_blocks, now)
        self.compute(key, 0, num_blocks, now)
        self.exports.finish(key, bundle(), now)
        return handle


@dataclass
class Decode:
    """A decode worker's half, in one of its lives."""

    transfer: Transfer
    fabric: Any
    epoch: int = 5
    num_blocks: int = NUM_BLOCKS

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.importer = self.transfer.importer(self.fabric, [EMPTY] * self.num_blocks)
        settings = ImportSettings(
            worker_id="decode-0",
            worker_epoch=self.epoch,
            fingerprint=FINGERPRINT,
            progress_timeout_s=PROGRESS_TIMEOUT_S,
            read_timeout_s=READ_TIMEOUT_S,
            max_quarantine_share=0.5,
            quarantine_timeout_s=QUARANTINE_TIMEOUT_S,
        )
        self.imports = ImportTable(self.pool, self.importer, settings)


class World:
    """Both halves and the streams between them. `now` is prefill's clock, `decode_now` decode's;
    both go at the same pace, and show what they like."""

    def __init__(
        self,
        transfer: Transfer = MEMORY,
        num_blocks: int = NUM_BLOCKS,
        prefill_clock: float = 100.0,
        decode_clock: float = 100.0,
        has_checksums: bool = False,
    ) -> None:
        self.now, self.decode_now = prefill_clock, decode_clock
        self.transfer = transfer
        self.fabric = transfer.fabric(is_automatic=False)
        self.prefill = Prefill(
            transfer, self.fabric, num_blocks=num_blocks, has_checksums=has_checksums
        )
        self.decode = Decode(transfer, self.fabric, num_blocks=num_blocks)
        self.outcomes: dict[RequestKey, Imported | ImportFailed] = {}
        # Set: nothing crosses, and nobody is told.
        self.is_cut = False
        # Which events get lost on their way down; and everything that crossed, in order.
        self.loses: Callable[[worker.ExportEvent], bool] = lambda _event: False
        self.crossed: list[worker.ExportUpdate | worker.ExportEvent] = []
        self._streams: dict[RequestKey, int] = {}
        self._num_streams = 0

    @property
    def pool(self) -> BlockPool:
        """Decode's."""
        return self.decode.pool

    @property
    def importer(self) -> Any:
        return self.decode.importer

    @property
    def imports(self) -> ImportTable:
        return self.decode.imports

    def close(self) -> None:
        self.importer.close()
        self.prefill.exporter.close()

    def begin_import(self, key: RequestKey, handle: ExportHandle) -> list[int]:
        """Decode has room at once."""
        self.imports.open(key, handle, self.decode_now)
        return self.receive(key, handle)

    def receive(self, key: RequestKey, handle: ExportHandle) -> list[int]:
        """Decode has room now."""
        blocks = self.pool.allocate(handle.num_blocks)
        self.imports.receive(key, blocks, self.decode_now)
        return blocks

    def run(self) -> None:
        """Everything that can happen without a READ or the clock moving."""
        while self._tick() | self._carry_up() | self._carry_down():
            pass

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        """Time passes; both engines wake now and then, traffic or not."""
        end = self.now + seconds
        while self.now < end:
            passed_s = min(step_s, end - self.now)
            self.now += passed_s
            self.decode_now += passed_s
            self.run()

    def deliver_all(self) -> None:
        """Every READ in flight ends well, and those that follow from it."""
        while self.fabric.reads:
            for read in list(self.fabric.reads):
                self.fabric.deliver(read)
            self.run()

    def read(self) -> Any:
        """The only READ in flight."""
        (read,) = self.fabric.reads
        return read

    def break_stream(self, key: RequestKey) -> None:
        """The connection of one hand-off breaks, and both sides notice."""
        stream = self._streams.pop(key)
        self.prefill.exports.take(up.StreamGone(stream), self.now)
        self.imports.take(down.StreamGone(key, HandOffFailed("the stream broke")), self.decode_now)
        self.run()

    def restart_prefill(self) -> None:
        """Killed and started again at the same address."""
        self.prefill.exporter.close()
        old = self.prefill
        self.prefill = replace(old, epoch=old.epoch + 1, lost=[])
        for key in list(self._streams):
            del self._streams[key]
            gone = down.StreamGone(key, HandOffFailed("connection reset"))
            self.imports.take(gone, self.decode_now)
        self.run()

    def restart_decode(self) -> None:
        """Killed and started again: its memory and its READs are gone with it."""
        self.importer.close()
        self.decode = replace(self.decode, epoch=self.decode.epoch + 1)
        for key in list(self._streams):
            self.prefill.exports.take(up.StreamGone(self._streams.pop(key)), self.now)
        self.run()

    def imported(self, key: RequestKey) -> Imported:
        outcome = self.outcomes.get(key)
        assert isinstance(outcome, Imported), outcome
        return outcome

    def failed(self, key: RequestKey) -> str:
        """Why a hand-off failed."""
        outcome = self.outcomes.get(key)
        assert isinstance(outcome, ImportFailed), outcome
        return str(outcome.error)

    def has_prompt(self, key: RequestKey, blocks: list[int]) -> bool:
        """Whether decode's blocks hold the prompt, byte for byte."""
        found = [self.importer.pool[block] for block in blocks]
        return found == [content(key, i) for i in range(len(blocks))]

    def assert_nothing_is_left(self) -> None:
        assert self.prefill.pool.num_free == self.prefill.pool.num_blocks
        assert self.pool.num_free == self.pool.num_blocks, self.pool.num_quarantined
        assert self.prefill.exports.is_idle
        assert self.imports.is_idle
        assert not self.fabric.reads
        assert not self._streams

    def _tick(self) -> bool:
        lost = self.prefill.exports.tick(self.now)
        for entry in lost:
            self.prefill.exports.abort(entry.key, entry.error, self.now)
        self.prefill.lost += lost
        outcomes = self.imports.tick(self.decode_now)
        self.outcomes |= {outcome.key: outcome for outcome in outcomes}
        return bool(outcomes or lost)

    def _carry_up(self) -> bool:
        messages = self.imports.take_messages()
        for message in messages:
            match message:
                case down.OpenStream(key, address, update):
                    assert address == "prefill:1"
                    self._num_streams += 1
                    self._streams[key] = self._num_streams
                    self._to_prefill(up.UpdateArrived(self._num_streams, update))
                case down.SendUpdate(key, update) if key in self._streams:
                    self._to_prefill(up.UpdateArrived(self._streams[key], update))
                case down.EndStream(key) if key in self._streams:
                    self._to_prefill(up.StreamGone(self._streams.pop(key)))
                case _:
                    pass
        return bool(messages)

    def _to_prefill(self, command: up.ExportCommand) -> None:
        if self.is_cut:
            return
        if isinstance(command, up.UpdateArrived):
            self.crossed.append(command.update)
        self.prefill.exports.take(command, self.now)

    def _carry_down(self) -> bool:
        messages = self.prefill.exports.take_messages()
        keys = {stream: key for key, stream in self._streams.items()}
        for message in messages:
            key = keys.get(message.stream)
            if key is None or self.is_cut:
                continue
            match message:
                case up.SendEvent(_, event) if self.loses(event):
                    pass
                case up.SendEvent(_, event):
                    self.crossed.append(event)
                    self.imports.take(down.EventArrived(key, event), self.decode_now)
                case up.EndStream(stream):
                    self._streams.pop(key, None)
                    self.prefill.exports.take(up.StreamGone(stream), self.now)
                    ended = HandOffFailed("prefill ended the stream")
                    self.imports.take(down.StreamGone(key, ended), self.decode_now)
        return bool(messages)
