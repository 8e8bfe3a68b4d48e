"""The export table by itself: what it promises its engine and its server."""

from __future__ import annotations

import pytest

from hocket.errors import Cancelled, HandOffFailed
from hocket.kv.block_pool import BlockPool, OutOfBlocks
from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import fingerprint_to_message, handle_to_message, key_to_message
from hocket.types import Bundle, ExportHandle, Fingerprint, RequestKey, Usage
from prefill_workers.export_stream import (
    EndStream,
    ExportMessage,
    ExportSettings,
    SendEvent,
    StreamGone,
    UpdateArrived,
)
from prefill_workers.kv_export import ExportTable

A, B, C = (RequestKey(name) for name in "abc")
FINGERPRINT = Fingerprint("digest", "layout", 64, "float32", "1-invariant")
BUNDLE = Bundle(7, None, None, Usage(prompt_tokens=130), b"hidden")
NUM_BLOCKS = 8
NUM_SLOTS = 2
Parts = tuple[ExportTable, BlockPool, MemoryExporter]


@pytest.fixture
def parts() -> Parts:
    pool = BlockPool(NUM_BLOCKS)
    exporter = MemoryExporter(MemoryFabric(), [b"...."] * NUM_BLOCKS, NUM_SLOTS, first_epoch=10)
    settings = ExportSettings(
        worker_id="prefill-0",
        worker_epoch=3,
        address="host:1",
        fingerprint=FINGERPRINT,
        num_slots=NUM_SLOTS,
        progress_timeout_s=6.0,
        open_timeout_s=15.0,
        max_unread_share=0.5,
    )
    return ExportTable(pool, exporter, settings), pool, exporter


def opening(
    key: RequestKey, handle: ExportHandle, first_block: int = 0, dtype: str = "float32"
) -> worker.ExportUpdate:
    fingerprint = Fingerprint("digest", "layout", 64, dtype, "1-invariant")
    return worker.ExportUpdate(
        open=worker.OpenExport(
            key=key_to_message(key),
            export=handle_to_message(handle),
            worker_id="decode-0",
            fingerprint=fingerprint_to_message(fingerprint),
            first_block=first_block,
        )
    )


def transcript(messages: list[ExportMessage]) -> list[str]:
    """One word and its numbers per message."""
    lines: list[str] = []
    for message in messages:
        match message:
            case EndStream(stream):
                lines.append(f"{stream} end")
            case SendEvent(stream, event):
                kind = event.WhichOneof("event")
                chunk = f" {event.chunk.first_block}+{len(event.chunk.blocks)}"
                lines.append(f"{stream} {kind}{chunk if kind == 'chunk' else ''}")
    return lines


def begin(parts: Parts, key: RequestKey, num_blocks: int) -> ExportHandle:
    """An export of new blocks, as the engine begins it."""
    table, pool, _ = parts
    return table.begin(key, pool.allocate(num_blocks), 0.0)


ACK_2 = worker.ExportUpdate(acknowledge=worker.AcknowledgeBlocks(first_block=0, num_blocks=2))
PROGRESS = worker.ExportUpdate(progress=worker.Progress())
DONE = worker.ExportUpdate(close=worker.CloseExport(reason=worker.CloseExport.REASON_DONE))


def test_the_handle_names_life_slot_and_epoch(parts: Parts) -> None:
    table, pool, exporter = parts
    handle = begin(parts, A, 3)
    assert (handle.worker_id, handle.worker_epoch, handle.address) == ("prefill-0", 3, "host:1")
    assert handle.slot_epoch == exporter.slot_epoch(handle.slot) == 10
    assert handle.num_blocks == len(set(table.blocks(A))) == 3
    assert pool.num_free == NUM_BLOCKS - 3


def test_events_go_down_in_order_and_the_bundle_is_last(parts: Parts) -> None:
    table, _, _ = parts
    handle = begin(parts, A, 3)
    table.chunk_ready(A, 0, 1, 0.0)
    table.take(UpdateArrived(4, opening(A, handle)), 0.0)
    table.chunk_ready(A, 1, 1, 0.0)
    table.chunk_ready(A, 2, 1, 0.0)
    table.finish(A, BUNDLE, 0.0)
    told = ["4 opened", "4 chunk 0+1", "4 chunk 1+1", "4 chunk 2+1", "4 bundle"]
    assert transcript(table.take_messages()) == told
    table.take(UpdateArrived(4, DONE), 0.0)
    assert transcript(table.take_messages()) == ["4 end"]
    assert table.is_idle
    assert table.counters.completed == 1


def test_blocks_that_the_reader_has_already_are_not_announced(parts: Parts) -> None:
    table, pool, _ = parts
    handle = begin(parts, A, 4)
    table.chunk_ready(A, 0, 4, 0.0)
    table.finish(A, BUNDLE, 0.0)
    table.take(UpdateArrived(1, opening(A, handle, first_block=3)), 0.0)
    assert transcript(table.take_messages()) == ["1 opened", "1 chunk 3+1", "1 bundle"]
    assert pool.num_free == NUM_BLOCKS - 1


def test_acknowledged_blocks_are_free_once_however_often_they_are_acknowledged(
    parts: Parts,
) -> None:
    table, pool, _ = parts
    handle = begin(parts, A, 3)
    table.chunk_ready(A, 0, 3, 0.0)
    table.finish(A, BUNDLE, 0.0)
    table.take(UpdateArrived(1, opening(A, handle)), 0.0)
    for _ in range(3):
        table.take(UpdateArrived(1, ACK_2), 0.0)
        assert pool.num_free == NUM_BLOCKS - 1
        assert table.unread_blocks == 1


def test_a_slot_is_reused_with_another_epoch(parts: Parts) -> None:
    table, _, _ = parts
    seen: set[tuple[int, int]] = set()
    for number in range(6):
        key = RequestKey("request", number)
        handle = begin(parts, key, 1)
        seen.add((handle.slot, handle.slot_epoch))
        table.abort(key, Cancelled("enough"), 0.0)
    assert len(seen) == 6


def test_nothing_begins_without_slot_blocks_or_a_reader_for_the_last_ones(parts: Parts) -> None:
    table, _, _ = parts
    assert not table.can_begin(NUM_BLOCKS + 1)
    with pytest.raises(OutOfBlocks):
        begin(parts, C, NUM_BLOCKS + 1)
    begin(parts, A, 1)
    assert table.can_begin(1)
    begin(parts, B, 1)
    assert not table.can_begin(1), "both slots are taken"
    table.abort(B, Cancelled("enough"), 0.0)
    begin(parts, B, 5)
    table.chunk_ready(B, 0, 5, 0.0)
    table.abort(A, Cancelled("enough"), 0.0)
    assert table.can_begin(1), "B is not finished, so nobody is late yet"
    table.finish(B, BUNDLE, 0.0)
    assert not table.can_begin(1), "5 of 8 blocks are finished and unread"


def test_another_layout_is_refused_with_the_difference(parts: Parts) -> None:
    table, _, _ = parts
    handle = begin(parts, A, 1)
    table.take(UpdateArrived(1, opening(A, handle, dtype="bfloat16")), 0.0)
    refusal, end = table.take_messages()
    assert isinstance(refusal, SendEvent)
    assert refusal.event.aborted.reason == "FINGERPRINT_MISMATCH"
    assert "dtype: 'float32' != 'bfloat16'" in refusal.event.aborted.message
    assert end == EndStream(1)
    # The right reader may still come.
    table.take(UpdateArrived(2, opening(A, handle)), 0.0)
    assert transcript(table.take_messages()) == ["2 opened"]


def test_a_reader_that_acknowledges_what_was_not_announced_loses_its_export(parts: Parts) -> None:
    table, pool, _ = parts
    handle = begin(parts, A, 3)
    table.chunk_ready(A, 0, 1, 0.0)
    table.take(UpdateArrived(1, opening(A, handle)), 0.0)
    table.take_messages()
    table.take(UpdateArrived(1, ACK_2), 0.0)
    assert transcript(table.take_messages()) == ["1 aborted", "1 end"]
    (lost,) = table.tick(0.0)
    assert lost.key == A
    table.abort(A, lost.error, 0.0)
    assert pool.num_free == NUM_BLOCKS


def test_blocks_of_a_computation_stay_held_until_the_engine_stops_it(parts: Parts) -> None:
    table, pool, exporter = parts
    handle = begin(parts, A, 3)
    table.take(UpdateArrived(1, opening(A, handle)), 0.0)
    table.take(StreamGone(1), 0.0)
    # The epoch is up at once, the blocks are still written to.
    assert exporter.slot_epoch(handle.slot) == handle.slot_epoch + 1
    assert pool.num_free == NUM_BLOCKS - 3
    assert [lost.key for lost in table.tick(0.0)] == [A]
    assert table.tick(0.0) == []
    table.chunk_ready(A, 0, 3, 0.0)
    table.finish(A, BUNDLE, 0.0)
    assert pool.num_free == NUM_BLOCKS
    assert table.is_idle or transcript(table.take_messages()) == ["1 opened", "1 aborted", "1 end"]


def test_aborting_what_is_not_here_is_no_error_and_frees_nothing(parts: Parts) -> None:
    table, pool, _ = parts
    table.abort(A, HandOffFailed("never begun"), 0.0)
    begin(parts, A, 2)
    for _ in range(2):
        table.abort(A, HandOffFailed("twice"), 0.0)
    assert pool.num_free == NUM_BLOCKS
    assert table.tick(0.0) == []


def test_the_lease_runs_from_the_readers_last_word(parts: Parts) -> None:
    table, pool, _ = parts
    handle = begin(parts, A, 2)
    table.chunk_ready(A, 0, 2, 0.0)
    table.finish(A, BUNDLE, 0.0)
    table.take(UpdateArrived(1, opening(A, handle)), 10.0)
    table.take(UpdateArrived(1, PROGRESS), 15.0)
    table.tick(20.9)
    assert pool.num_free == NUM_BLOCKS - 2
    table.tick(21.0)
    assert pool.num_free == NUM_BLOCKS
    assert table.counters.expired_stalled == 1


def test_an_unopened_export_waits_as_long_as_its_prompt_moves(parts: Parts) -> None:
    table, pool, _ = parts
    begin(parts, A, 2)
    table.chunk_ready(A, 0, 1, 14.0)
    assert table.tick(28.0) == []
    table.chunk_ready(A, 1, 1, 28.0)
    table.finish(A, BUNDLE, 28.0)
    assert table.next_tick_s(28.0) == 15.0
    table.tick(43.0)
    assert pool.num_free == NUM_BLOCKS
    assert table.counters.expired_unopened == 1
    assert table.next_tick_s(43.0) is None


def test_an_open_stream_hears_from_prefill_while_nothing_is_ready(parts: Parts) -> None:
    table, _, _ = parts
    handle = begin(parts, A, 2)
    table.take(UpdateArrived(1, opening(A, handle)), 0.0)
    table.take_messages()
    assert table.next_tick_s(0.0) == 2.0
    for now in (1.9, 2.0, 3.0, 4.0):
        table.tick(now)
        table.take(UpdateArrived(1, PROGRESS), now)
    assert transcript(table.take_messages()) == ["1 progress", "1 progress"]


def test_a_repeated_end_of_a_stream_is_harmless(parts: Parts) -> None:
    table, pool, _ = parts
    handle = begin(parts, A, 2)
    table.take(UpdateArrived(1, opening(A, handle)), 0.0)
    for _ in range(3):
        table.take(StreamGone(1), 0.0)
    table.tick(0.0)
    table.abort(A, HandOffFailed("gone"), 0.0)
    assert pool.num_free == NUM_BLOCKS
    assert table.counters.peers_gone == 1


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_stream_opens_one_export_and_no_second_one(parts: Parts, has_ended: bool) -> None:
    table, pool, _ = parts
    first, second = begin(parts, A, 2), begin(parts, B, 2)
    table.take(UpdateArrived(1, opening(A, first)), 0.0)
    if has_ended:
        table.abort(A, Cancelled("gone"), 0.0)
    table.take(UpdateArrived(1, opening(B, second)), 0.0)
    assert table.counters.rejected_opens == 1
    # The second export still waits for a reader of its own; whatever held the first has let go.
    table.take(UpdateArrived(2, opening(B, second)), 0.0)
    assert table.counters.opened == 2
    table.abort(A, Cancelled("gone"), 0.0)
    table.take(StreamGone(1), 0.0)
    table.tick(100.0)
    table.abort(B, Cancelled("gone"), 100.0)
    assert pool.num_free == NUM_BLOCKS
