"""The import table by itself: what it promises its engine and its server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode_workers.import_stream import (
    EndStream,
    EventArrived,
    Imported,
    ImportFailed,
    ImportMessage,
    ImportSettings,
    OpenStream,
    SendUpdate,
    StreamGone,
)
from decode_workers.kv_import import ImportTable
from hocket.errors import HandOffFailed, WorkerUnavailable
from hocket.kv.block_pool import BlockPool
from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric, MemoryImporter
from hocket.kv.wire import pool_to_message
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import bundle_to_message
from hocket.types import Bundle, ExportHandle, Fingerprint, RequestKey, Usage

A = RequestKey("a")
FINGERPRINT = Fingerprint("digest", "layout", 64, "float32", "1-invariant")
BUNDLE = Bundle(7, None, None, Usage(prompt_tokens=130), b"hidden")
NUM_BLOCKS = 8
HANDLE = ExportHandle("prefill-0", 3, "host:1", 1, 10, FINGERPRINT, num_blocks=3)
PROGRESS = worker.ExportEvent(progress=worker.Progress())


class Side:
    """A table with the pool, transfer and exporter that it works on."""

    def __init__(self) -> None:
        self.fabric = MemoryFabric(is_automatic=False)
        self.exporter = MemoryExporter(self.fabric, [b"data"] * NUM_BLOCKS, 2, first_epoch=10)
        self.pool = BlockPool(NUM_BLOCKS)
        self.importer = MemoryImporter(self.fabric, [b"...."] * NUM_BLOCKS)
        settings = ImportSettings(
            worker_id="decode-0",
            worker_epoch=5,
            fingerprint=FINGERPRINT,
            progress_timeout_s=6.0,
            read_timeout_s=4.0,
            max_quarantine_share=0.5,
        )
        self.table = ImportTable(self.pool, self.importer, settings)

    def begin(self) -> list[int]:
        blocks = self.pool.allocate(3)
        self.table.open(A, HANDLE, 0.0)
        self.table.receive(A, blocks, 0.0)
        return blocks

    def opened(self, now: float = 0.0) -> None:
        self.event(worker.ExportEvent(opened=pool_to_message(self.exporter.describe())), now)

    def chunk(self, first_block: int, blocks: Sequence[int], now: float = 0.0) -> None:
        chunk = worker.ChunkReady(first_block=first_block, blocks=blocks)
        self.event(worker.ExportEvent(chunk=chunk), now)

    def bundle(self, now: float = 0.0) -> None:
        self.event(worker.ExportEvent(bundle=bundle_to_message(BUNDLE)), now)

    def event(self, event: worker.ExportEvent, now: float = 0.0) -> None:
        self.table.take(EventArrived(A, event), now)

    def failure(self, now: float = 0.0) -> str:
        (outcome,) = self.table.tick(now)
        assert isinstance(outcome, ImportFailed)
        return str(outcome.error)


@pytest.fixture
def side() -> Side:
    return Side()


def transcript(messages: list[ImportMessage]) -> list[str]:
    lines: list[str] = []
    for message in messages:
        match message:
            case OpenStream(_, address):
                lines.append(f"open {address}")
            case SendUpdate(_, update):
                kind = update.WhichOneof("update")
                ack = f" {update.acknowledge.first_block}+{update.acknowledge.num_blocks}"
                lines.append(f"{kind}{ack if kind == 'acknowledge' else ''}")
            case EndStream():
                lines.append("end")
    return lines


def test_chunks_are_acknowledged_as_they_are_fenced_and_done_closes_the_stream(
    side: Side,
) -> None:
    side.begin()
    side.opened()
    side.chunk(0, [4, 5])
    side.chunk(2, [6])
    # The second READ ends first.
    side.fabric.deliver(side.fabric.reads[1])
    side.table.tick(1.0)
    side.fabric.deliver(side.fabric.reads[0])
    side.bundle()
    (outcome,) = side.table.tick(2.0)
    assert outcome == Imported(A, BUNDLE, num_bytes=12, transport="memory", seconds=2.0)
    said = ["open host:1", "acknowledge 2+1", "acknowledge 0+2", "close", "end"]
    assert transcript(side.table.take_messages()) == said
    assert side.table.is_idle
    assert (side.table.counters.bytes, side.table.counters.read_seconds) == (12, 3.0)


def test_the_opening_says_who_reads_and_what(side: Side) -> None:
    side.begin()
    (message,) = side.table.take_messages()
    assert isinstance(message, OpenStream)
    opening = message.update.open
    assert (opening.worker_id, opening.worker_epoch, opening.first_block) == ("decode-0", 5, 0)
    assert (opening.export.slot, opening.export.slot_epoch) == (1, 10)


def test_blocks_that_are_here_already_are_neither_asked_for_nor_missed(side: Side) -> None:
    blocks = side.pool.allocate(3)
    side.table.open(A, HANDLE, 0.0)
    side.opened()
    side.chunk(0, [4])
    side.table.receive(A, blocks, 0.0, first_block=2)
    side.chunk(1, [5, 6])
    assert side.fabric.reads[0].local_blocks == blocks[2:]
    side.fabric.deliver(side.fabric.reads[0])
    side.bundle()
    (outcome,) = side.table.tick(0.0)
    assert isinstance(outcome, Imported)
    assert outcome.num_bytes == 4
    assert side.table.counters.blocks_skipped == 2
    acknowledged = ["acknowledge 0+1", "acknowledge 1+1", "acknowledge 2+1"]
    said = transcript(side.table.take_messages())
    assert said == ["open host:1", *acknowledged, "close", "end"]


def test_a_request_that_waits_for_room_keeps_its_export_and_reads_all_of_it_at_once(
    side: Side,
) -> None:
    side.table.open(A, HANDLE, 0.0)
    side.opened()
    side.chunk(0, [4])
    for second in range(2, 60, 2):
        side.event(PROGRESS, second)
        assert side.table.tick(second) == []
    side.chunk(1, [7, 2], 60.0)
    side.bundle(60.0)
    assert side.table.tick(60.0) == []
    assert not side.fabric.reads
    blocks = side.pool.allocate(3)
    side.table.receive(A, blocks, 61.0)
    (read,) = side.fabric.reads
    assert (read.remote_blocks, read.local_blocks) == ([4, 7, 2], blocks)
    side.fabric.deliver(read)
    (outcome,) = side.table.tick(61.0)
    assert isinstance(outcome, Imported)
    alive = set(transcript(side.table.take_messages())[1:-3])
    assert alive == {"progress"}


def test_an_export_that_is_lost_while_its_reader_waits_for_room_takes_no_blocks(
    side: Side,
) -> None:
    side.table.open(A, HANDLE, 0.0)
    side.table.take(StreamGone(A, WorkerUnavailable("gone")), 0.0)
    # The engine may reserve before it hears of it.
    side.table.receive(A, side.pool.allocate(3), 0.0)
    assert side.pool.num_free == NUM_BLOCKS
    assert "gone" in side.failure()


@pytest.mark.parametrize(
    ("first_block", "blocks"), [(2, [6, 7]), (1, [5]), (3, [6]), (2, [])], ids=str
)
def test_a_chunk_that_does_not_fit_the_prompt_fails_the_import(
    side: Side, first_block: int, blocks: list[int]
) -> None:
    side.begin()
    side.opened()
    side.chunk(0, [4, 5])
    side.chunk(first_block, blocks)
    assert "were announced" in side.failure()
    assert side.pool.num_quarantined == 2, "the READ of the first chunk is in flight"


def test_blocks_before_the_pool_are_a_failure(side: Side) -> None:
    side.begin()
    side.chunk(0, [4])
    assert "before the pool" in side.failure()
    assert side.pool.num_free == NUM_BLOCKS


def test_a_bundle_that_makes_no_sense_fails_the_import(side: Side) -> None:
    side.begin()
    side.opened()
    side.event(worker.ExportEvent(bundle=worker.Bundle(finish_reason=99)))  # type: ignore[arg-type]
    assert "makes no sense" in side.failure()


def test_a_handle_of_another_length_fails_the_import(side: Side) -> None:
    side.table.open(A, HANDLE, 0.0)
    side.table.receive(A, side.pool.allocate(2), 0.0)
    assert transcript(side.table.take_messages()) == ["open host:1", "close", "end"]
    assert "has 3 blocks, not 2" in side.failure()
    assert side.pool.num_free == NUM_BLOCKS


def test_a_stream_that_cannot_be_opened_keeps_its_error(side: Side) -> None:
    side.begin()
    error = WorkerUnavailable("connection refused")
    side.table.take(StreamGone(A, error), 0.0)
    assert side.table.tick(0.0) == [ImportFailed(A, error)]
    assert side.pool.num_free == NUM_BLOCKS


def test_silence_is_broken_by_progress_and_ended_by_the_deadline(side: Side) -> None:
    side.begin()
    side.opened()
    side.table.take_messages()
    assert side.table.next_tick_s(0.0) == 2.0
    for now in (2.0, 3.0, 4.0):
        side.event(PROGRESS, now)
        assert side.table.tick(now) == []
    assert transcript(side.table.take_messages()) == ["progress", "progress"]
    assert side.table.tick(9.9) == []
    assert "said nothing for 6 s" in side.failure(10.0)
    assert side.table.next_tick_s(10.0) is None


def test_reads_in_flight_wake_who_sleeps_when_they_end_or_are_late(side: Side) -> None:
    ends: list[int] = []
    side.importer.notify(lambda: ends.append(len(side.fabric.reads)))
    side.begin()
    side.opened()
    side.chunk(0, [4])
    side.chunk(1, [5, 6])
    for now in (1.5, 3.0):
        side.event(PROGRESS, now)
        side.table.tick(now)
    assert side.table.next_tick_s(3.0) == 1.0, "read_timeout_s after the post"
    side.fabric.deliver(side.fabric.reads[0])
    side.fabric.fail(side.fabric.reads[0])
    assert ends == [1, 0]


def test_a_cancel_has_no_outcome_and_silences_one_that_is_due(side: Side) -> None:
    side.begin()
    side.table.take(StreamGone(A, HandOffFailed("gone")), 0.0)
    side.table.cancel(A, 0.0)
    assert side.table.tick(0.0) == []
    side.begin()
    side.table.take_messages()
    side.table.cancel(A, 0.0)
    side.table.cancel(A, 0.0)
    assert side.table.tick(0.0) == []
    assert transcript(side.table.take_messages()) == ["close", "end"]
    assert side.pool.num_free == NUM_BLOCKS
    assert side.table.counters.cancelled == 1


def test_quarantine_is_not_idleness_of_requests_but_its_blocks_are_counted(side: Side) -> None:
    side.begin()
    side.opened()
    side.chunk(0, [4, 5])
    side.table.cancel(A, 0.0)
    side.table.take_messages()
    assert side.table.is_idle, "a drain need not wait for a hung peer"
    assert side.table.counters.quarantined_blocks == side.pool.num_quarantined == 2


def test_counters_tell_fences_abandoned_reads_and_what_is_in_quarantine_now(side: Side) -> None:
    counters = side.table.counters
    side.begin()
    side.opened()
    side.chunk(0, [4])
    side.chunk(1, [5, 6])
    side.fabric.deliver(side.fabric.reads[0])
    side.table.tick(1.0)
    assert (counters.fences_checked, counters.fences_tripped, counters.reads_in_flight) == (1, 0, 1)
    side.exporter.bump_slot_epoch(1)
    side.chunk(0, [4])  # Announced twice: the import ends under its second READ.
    side.table.tick(1.0)
    assert (counters.reads_abandoned, counters.blocks_in_quarantine) == (1, 2)
    side.fabric.deliver(side.fabric.reads[0])
    side.table.tick(1.0)
    assert (counters.reads_in_flight, counters.blocks_in_quarantine) == (0, 0)
    assert (counters.reads_abandoned, counters.quarantined_blocks) == (1, 2)
    assert counters.fences_checked == 1, "nobody wants an abandoned READ's bytes"
    side.begin()
    side.opened()
    side.chunk(0, [4])
    side.fabric.deliver(side.fabric.reads[0])
    side.table.tick(1.0)
    assert (counters.fences_checked, counters.fences_tripped) == (2, 1)
    assert (counters.bytes, counters.read_seconds) == (4, 1.0)
