"""One prefill and one decode worker's hand-off halves, joined in memory under a manual clock.

The tables, pools and transfer are the shipped ones; this file plays engine, server and network.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_workers import import_stream as down
from decode_workers.import_stream import Imported, ImportFailed, ImportSettings
from decode_workers.kv_import import ImportTable
from hocket.errors import HandOffFailed
from hocket.kv.block_pool import BlockPool
from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric, MemoryImporter, MemoryRead
from hocket.types import Bundle, ExportHandle, Fingerprint, FinishReason, RequestKey, Usage
from prefill_workers import export_stream as up
from prefill_workers.export_stream import ExportLost, ExportSettings
from prefill_workers.kv_export import ExportTable

NUM_BLOCKS = 12
OPEN_TIMEOUT_S = 15.0
PROGRESS_TIMEOUT_S = 6.0
READ_TIMEOUT_S = 4.0
QUARANTINE_TIMEOUT_S = 30.0
FINGERPRINT = Fingerprint("digest", "8x160", 64, "float32", "1-invariant")
EMPTY, GARBAGE = b"....", b"!!!!"


def content(key: RequestKey, position: int) -> bytes:
    """What block `position` of a prompt holds."""
    return f"{key.request_id[-1]}{key.attempt}{position:02d}".encode()


def bundle(first_token: int = 7, finish_reason: FinishReason | None = None) -> Bundle:
    return Bundle(first_token, None, finish_reason, Usage(prompt_tokens=3, output_tokens=1), b"h")


@dataclass
class Prefill:
    """A prefill worker's half; `restart` gives it a new life at the same address."""

    fabric: MemoryFabric
    epoch: int = 1
    max_unread_share: float = 0.5
    lost: list[ExportLost] = field(default_factory=list[ExportLost])

    def __post_init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.exporter = MemoryExporter(self.fabric, [EMPTY] * NUM_BLOCKS, num_slots=3)
        settings = ExportSettings(
            worker_id="prefill-0",
            worker_epoch=self.epoch,
            address="prefill:1",
            fingerprint=FINGERPRINT,
            num_slots=3,
            progress_timeout_s=PROGRESS_TIMEOUT_S,
            open_timeout_s=OPEN_TIMEOUT_S,
            max_unread_share=self.max_unread_share,
        )
        self.exports = ExportTable(self.pool, self.exporter, settings)

    def compute(self, key: RequestKey, first: int, count: int, now: float) -> None:
        for position in range(first, first + count):
            block = self.exports.blocks(key)[position]
            self.exporter.pool[block] = content(key, position)
        self.exports.chunk_ready(key, first, count, now)

    def prompt(self, key: RequestKey, num_blocks: int, now: float) -> ExportHandle:
        """A whole prompt: computed, finished, unread."""
        handle = self.exports.begin(key, num_blocks, now)
        self.compute(key, 0, num_blocks, now)
        self.exports.finish(key, bundle(), now)
        return handle


@dataclass
class Decode:
    """A decode worker's half, in one of its lives."""

    fabric: MemoryFabric
    epoch: int = 5

    def __post_init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.importer = MemoryImporter(self.fabric, [EMPTY] * NUM_BLOCKS)
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
    """Both halves and the streams between them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.fabric = MemoryFabric(is_automatic=False)
        self.prefill = Prefill(self.fabric)
        decode = Decode(self.fabric)
        self.pool, self.importer, self.imports = decode.pool, decode.importer, decode.imports
        self.outcomes: dict[RequestKey, Imported | ImportFailed] = {}
        # Set: nothing crosses, and nobody is told.
        self.is_cut = False
        self._streams: dict[RequestKey, int] = {}
        self._num_streams = 0

    def begin_import(self, key: RequestKey, handle: ExportHandle) -> list[int]:
        blocks = self.pool.allocate(handle.num_blocks)
        self.imports.begin(key, handle, blocks, self.now)
        return blocks

    def run(self) -> None:
        """Everything that can happen without a READ or the clock moving."""
        while self._tick() | self._carry_up() | self._carry_down():
            pass

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        """Time passes; both engines wake now and then, traffic or not."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            self.run()

    def deliver_all(self) -> None:
        """Every READ in flight ends well, and those that follow from it."""
        while self.fabric.reads:
            for read in list(self.fabric.reads):
                self.fabric.deliver(read)
            self.run()

    def read(self) -> MemoryRead:
        """The only READ in flight."""
        (read,) = self.fabric.reads
        return read

    def break_stream(self, key: RequestKey) -> None:
        """The connection of one hand-off breaks, and both sides notice."""
        stream = self._streams.pop(key)
        self.prefill.exports.take(up.StreamGone(stream), self.now)
        self.imports.take(down.StreamGone(key, HandOffFailed("the stream broke")), self.now)
        self.run()

    def restart_prefill(self) -> None:
        """Killed and started again at the same address."""
        self.prefill.exporter.close()
        self.prefill = Prefill(self.fabric, epoch=self.prefill.epoch + 1)
        for key in list(self._streams):
            del self._streams[key]
            self.imports.take(down.StreamGone(key, HandOffFailed("connection reset")), self.now)
        self.run()

    def assert_nothing_is_left(self) -> None:
        assert self.prefill.pool.num_free == NUM_BLOCKS
        assert self.pool.num_free == NUM_BLOCKS, self.pool.num_quarantined
        assert self.prefill.exports.is_idle
        assert self.imports.is_idle
        assert not self.fabric.reads
        assert not self._streams

    def _tick(self) -> bool:
        lost = self.prefill.exports.tick(self.now)
        for entry in lost:
            self.prefill.exports.abort(entry.key, entry.error, self.now)
        self.prefill.lost += lost
        outcomes = self.imports.tick(self.now)
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
        if not self.is_cut:
            self.prefill.exports.take(command, self.now)

    def _carry_down(self) -> bool:
        messages = self.prefill.exports.take_messages()
        keys = {stream: key for key, stream in self._streams.items()}
        for message in messages:
            key = keys.get(message.stream)
            if key is None or self.is_cut:
                continue
            match message:
                case up.SendEvent(_, event):
                    self.imports.take(down.EventArrived(key, event), self.now)
                case up.EndStream(stream):
                    self._streams.pop(key, None)
                    self.prefill.exports.take(up.StreamGone(stream), self.now)
                    ended = HandOffFailed("prefill ended the stream")
                    self.imports.take(down.StreamGone(key, ended), self.now)
        return bool(messages)
