"""Hand-offs that go well, and the ways in which shared/SCENARIOS says that they can go wrong."""

from __future__ import annotations

from dataclasses import replace

from decode_workers.import_stream import EventArrived, Imported, ImportFailed, OpenStream
from hocket.errors import Cancelled, DeadlineExceeded, FingerprintMismatch, HandOffFailed
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import handle_to_message, key_to_message
from hocket.types import ExportHandle, RequestKey
from prefill_workers.export_stream import EndStream, SendEvent, StreamGone, UpdateArrived
from tests.scenarios.hand_off_world import (
    EMPTY,
    FINGERPRINT,
    GARBAGE,
    NUM_BLOCKS,
    OPEN_TIMEOUT_S,
    PROGRESS_TIMEOUT_S,
    QUARANTINE_TIMEOUT_S,
    READ_TIMEOUT_S,
    World,
    bundle,
    content,
)

A, B = RequestKey("request-a"), RequestKey("request-b")


def imported(world: World, key: RequestKey) -> Imported:
    outcome = world.outcomes[key]
    assert isinstance(outcome, Imported), outcome
    return outcome


def failed(world: World, key: RequestKey) -> str:
    outcome = world.outcomes[key]
    assert isinstance(outcome, ImportFailed), outcome
    return str(outcome.error)


def prompt_read(world: World, key: RequestKey, blocks: list[int]) -> bool:
    return [world.importer.pool[b] for b in blocks] == [content(key, i) for i in range(len(blocks))]


def open_update(key: RequestKey, handle: ExportHandle) -> worker.ExportUpdate:
    opening = worker.OpenExport(key=key_to_message(key), export=handle_to_message(handle))
    return worker.ExportUpdate(open=opening)


# The hand-off as it should be.


def test_chunks_are_read_while_later_ones_are_computed(world: World) -> None:
    handle = world.prefill.exports.begin(A, 5, world.now)
    blocks = world.begin_import(A, handle)
    world.run()
    for first, count in ((0, 2), (2, 2), (4, 1)):
        world.prefill.compute(A, first, count, world.now)
        world.run()
        assert len(world.read().local_blocks) == count
        world.deliver_all()
        assert A not in world.outcomes
    world.prefill.exports.finish(A, bundle(first_token=42), world.now)
    world.run()

    outcome = imported(world, A)
    assert outcome.bundle == bundle(first_token=42)
    assert outcome.num_bytes == 5 * len(EMPTY)
    assert outcome.transport == "memory"
    assert prompt_read(world, A, blocks)
    assert world.pool.num_held == 5
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_a_reader_that_opens_late_gets_everything_in_one_read(world: World) -> None:
    handle = world.prefill.exports.begin(A, 4, world.now)
    for position in range(4):
        world.prefill.compute(A, position, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    blocks = world.begin_import(A, handle)
    world.run()
    assert world.read().remote_blocks == world.prefill.exports.blocks(A)
    world.deliver_all()
    assert prompt_read(world, A, blocks)
    imported(world, A)


def test_prefill_frees_acknowledged_blocks_only_when_the_prompt_is_computed(world: World) -> None:
    handle = world.prefill.exports.begin(A, 4, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 3, world.now)
    world.run()
    world.deliver_all()
    # Attention of the coming chunk still reads them.
    assert world.prefill.pool.num_free == NUM_BLOCKS - 4
    world.prefill.compute(A, 3, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    assert world.prefill.pool.num_free == NUM_BLOCKS - 1
    world.run()
    world.deliver_all()
    assert world.prefill.pool.num_free == NUM_BLOCKS


def test_a_long_computation_and_a_slow_reader_keep_each_other_alive(world: World) -> None:
    handle = world.prefill.exports.begin(A, 2, world.now)
    blocks = world.begin_import(A, handle)
    world.wait(10 * PROGRESS_TIMEOUT_S)
    world.prefill.compute(A, 0, 2, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    world.deliver_all()
    assert prompt_read(world, A, blocks)


# Ownership and cancellation.


def test_a1_the_client_leaves_before_decode_admits_and_prefill_is_free_at_once(
    world: World,
) -> None:
    world.prefill.prompt(A, 5, world.now)
    world.prefill.exports.abort(A, Cancelled("the client left"), world.now)
    world.run()
    world.assert_nothing_is_left()


def test_a1_the_client_leaves_and_only_decode_is_told(world: World) -> None:
    handle = world.prefill.prompt(A, 5, world.now)
    world.begin_import(A, handle)
    world.run()
    world.deliver_all()
    blocks = world.begin_import(B, replace(world.prefill.prompt(B, 3, world.now)))
    world.run()
    world.imports.cancel(B, world.now)
    world.run()
    assert world.prefill.pool.num_free == NUM_BLOCKS
    assert B not in world.outcomes
    assert world.pool.num_quarantined == len(blocks)


def test_a2_decode_frees_its_reservation_when_prefill_never_reports(world: World) -> None:
    handle = world.prefill.prompt(A, 5, world.now)
    world.is_cut = True
    world.begin_import(A, handle)
    world.wait(PROGRESS_TIMEOUT_S - 1)
    assert world.pool.num_free == NUM_BLOCKS - 5
    world.wait(1)
    assert world.pool.num_free == NUM_BLOCKS
    assert "prefill said nothing for 6 s" in failed(world, A)


def test_a4_decode_learns_at_once_why_prefill_gave_up(world: World) -> None:
    handle = world.prefill.exports.begin(A, 5, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.prefill.exports.abort(A, DeadlineExceeded("too late"), world.now)
    world.run()
    outcome = world.outcomes[A]
    assert isinstance(outcome, ImportFailed)
    assert "too late" in str(outcome.error)
    assert outcome.error.metadata["cause"] == "DEADLINE_EXCEEDED"
    assert world.pool.num_quarantined == 2
    world.deliver_all()
    world.assert_nothing_is_left()


def test_a5_a_late_message_for_a_dead_request_changes_nothing(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    exports = world.prefill.exports
    exports.take(UpdateArrived(1, open_update(A, handle)), world.now)
    exports.abort(A, Cancelled("the client left"), world.now)
    assert world.prefill.pool.num_free == NUM_BLOCKS
    exports.take_messages()
    ack = worker.AcknowledgeBlocks(first_block=0, num_blocks=3)
    done = worker.CloseExport(reason=worker.CloseExport.REASON_DONE)
    for update in (worker.ExportUpdate(acknowledge=ack), worker.ExportUpdate(close=done)):
        exports.take(UpdateArrived(1, update), world.now)
    exports.take(StreamGone(1), world.now)
    assert exports.take_messages() == []
    # And the other way round: READs and events of an import that was cancelled.
    world.imports.take(EventArrived(A, worker.ExportEvent(bundle=worker.Bundle())), world.now)
    world.run()
    world.assert_nothing_is_left()


def test_a5_the_completion_of_an_abandoned_read_releases_its_blocks(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.imports.cancel(A, world.now)
    world.run()
    assert world.pool.num_quarantined == 3
    world.fabric.complete(world.read())
    world.run()
    world.assert_nothing_is_left()


def test_a6_what_prefill_does_not_know_is_rejected_and_frees_nothing(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    exports = world.prefill.exports
    wrong = {
        "never begun": open_update(B, handle),
        "in epoch 9": open_update(A, replace(handle, worker_epoch=9)),
        "by prefill-7": open_update(A, replace(handle, worker_id="prefill-7")),
        "not in slot 2": open_update(A, replace(handle, slot=2)),
        "with epoch 1, not in slot 0 with 8": open_update(A, replace(handle, slot_epoch=8)),
        "opened no export": worker.ExportUpdate(
            acknowledge=worker.AcknowledgeBlocks(first_block=0, num_blocks=3)
        ),
    }
    for stream, (reason, update) in enumerate(wrong.items(), start=1):
        exports.take(UpdateArrived(stream, update), world.now)
        rejection, end = exports.take_messages()
        assert isinstance(rejection, SendEvent)
        assert reason in rejection.event.aborted.message
        assert end == EndStream(stream)
        exports.take(StreamGone(stream), world.now)
    assert exports.counters.rejected_opens == 5
    assert exports.keys() == [A]
    assert world.prefill.pool.num_free == NUM_BLOCKS - 3


def test_a6_a_second_reader_is_rejected_and_the_first_goes_on(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    blocks = world.begin_import(A, handle)
    world.run()
    world.prefill.exports.take(UpdateArrived(99, open_update(A, handle)), world.now)
    world.prefill.exports.take(StreamGone(99), world.now)
    world.deliver_all()
    assert prompt_read(world, A, blocks)
    imported(world, A)


def test_a7_target_blocks_of_a_read_in_flight_are_given_to_nobody(world: World) -> None:
    handle = world.prefill.exports.begin(A, 6, world.now)
    blocks = world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.deliver_all()
    world.prefill.compute(A, 2, 2, world.now)
    world.run()
    world.imports.cancel(A, world.now)
    # Read ones and not yet announced ones are free; exactly the READ's targets are not.
    assert world.pool.num_free == NUM_BLOCKS - 2
    others = world.pool.allocate(NUM_BLOCKS - 2)
    assert not set(others) & set(blocks[2:4])
    for block in others:
        world.importer.pool[block] = b"mine"
    world.deliver_all()
    assert all(world.importer.pool[block] == b"mine" for block in others)
    assert world.pool.num_free == 2
    world.pool.free(others)
    world.assert_nothing_is_left()


def test_a8_bytes_of_blocks_that_prefill_took_back_are_never_served(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.fabric.copy(world.read(), 1)
    world.prefill.exports.abort(A, Cancelled("the client left"), world.now)
    # Somebody else's prompt goes into the same blocks before the READ is through.
    assert world.prefill.exports.can_begin(NUM_BLOCKS)
    world.prefill.exporter.pool[:] = [GARBAGE] * NUM_BLOCKS
    world.is_cut = True  # The news of it is slower than the bytes.
    world.fabric.deliver(world.read())
    world.run()
    assert "took its blocks back" in failed(world, A)
    assert world.imports.counters.fences_tripped == 1
    assert world.pool.num_free == NUM_BLOCKS


def test_a8_a_lease_that_runs_out_bumps_the_epoch_before_blocks_are_free(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    world.begin_import(A, handle)
    world.run()
    world.is_cut = True
    world.wait(PROGRESS_TIMEOUT_S)
    assert world.prefill.exporter.slot_epoch(handle.slot) == handle.slot_epoch + 1
    assert world.prefill.pool.num_free == NUM_BLOCKS
    assert world.prefill.exports.counters.expired_stalled == 1


def test_a11_expiry_needs_no_traffic(world: World) -> None:
    world.prefill.prompt(A, 5, world.now)
    assert world.prefill.exports.next_tick_s(world.now) == OPEN_TIMEOUT_S
    world.prefill.exports.tick(world.now + OPEN_TIMEOUT_S)
    assert world.prefill.pool.num_free == NUM_BLOCKS


def test_a12_blocks_reclaimed_before_the_read_are_a_failure_for_the_reader(world: World) -> None:
    handle = world.prefill.prompt(A, 5, world.now)
    world.wait(OPEN_TIMEOUT_S)
    assert world.prefill.exports.counters.expired_unopened == 1
    assert world.prefill.pool.num_free == NUM_BLOCKS
    world.begin_import(A, handle)
    world.run()
    assert "Nobody opened the export" in failed(world, A)
    world.assert_nothing_is_left()


def test_a17_a_bundle_without_all_blocks_publishes_nothing(world: World) -> None:
    handle = world.prefill.exports.begin(A, 3, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.deliver_all()
    # Block 2 is never announced, whatever prefill's own table would say to that.
    world.imports.take(EventArrived(A, worker.ExportEvent(bundle=worker.Bundle())), world.now)
    world.run()
    assert "1 of 3 blocks were never announced, the first one 2" in failed(world, A)
    assert world.pool.num_free == NUM_BLOCKS


def test_a17_a_bundle_that_overtakes_the_last_read_waits_for_it(world: World) -> None:
    blocks = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.fabric.copy(world.read(), 2)
    world.run()
    assert A not in world.outcomes
    world.deliver_all()
    imported(world, A)
    assert prompt_read(world, A, blocks)


# Transfer and peers.


def test_b1_prefill_restarts_at_the_same_address_and_its_old_life_is_forgotten(
    world: World,
) -> None:
    old_handle = world.prefill.prompt(A, 3, world.now)
    world.begin_import(A, old_handle)
    world.run()
    old_agent = world.prefill.exporter.describe().agent
    world.restart_prefill()
    failed(world, A)

    # A handle of the old life opens nothing, and the new life is read under its own name.
    world.begin_import(A, old_handle)
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    assert "in epoch 1; this is prefill-0 in epoch 2" in failed(world, A)
    world.deliver_all()
    imported(world, B)
    assert prompt_read(world, B, blocks)
    assert world.importer.forgotten == [old_agent]
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_b3_one_transient_error_is_retried_and_harms_nobody_else(world: World) -> None:
    blocks_a = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    blocks_b = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    world.fabric.fail(world.fabric.reads[0])
    world.run()
    world.deliver_all()
    imported(world, A)
    imported(world, B)
    assert prompt_read(world, A, blocks_a)
    assert prompt_read(world, B, blocks_b)
    assert world.imports.counters.reads_retried == 1


def test_b3_an_error_that_stays_fails_one_request(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    for _ in range(2):
        world.fabric.fail(next(r for r in world.fabric.reads if set(r.local_blocks) - set(blocks)))
        world.run()
    assert "the READ failed: remote disconnected" in failed(world, A)
    world.deliver_all()
    imported(world, B)
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_b4_nothing_is_imported_before_the_last_fence_and_nothing_revokes_it_after(
    world: World,
) -> None:
    handle = world.prefill.exports.begin(A, 4, world.now)
    blocks = world.begin_import(A, handle)
    world.prefill.compute(A, 0, 3, world.now)
    world.run()
    world.deliver_all()
    world.prefill.compute(A, 3, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    assert A not in world.outcomes  # Bundle and three of four blocks are here.
    world.deliver_all()
    imported(world, A)
    # Prefill reuses everything and dies; what was imported is decode's own.
    world.prefill.exporter.pool[:] = [GARBAGE] * NUM_BLOCKS
    world.restart_prefill()
    world.wait(2 * PROGRESS_TIMEOUT_S)
    imported(world, A)
    assert prompt_read(world, A, blocks)


def test_b4_a_failure_of_the_last_read_fails_the_whole_hand_off(world: World) -> None:
    handle = world.prefill.exports.begin(A, 4, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 3, world.now)
    world.run()
    world.deliver_all()
    world.prefill.compute(A, 3, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    for _ in range(2):
        world.fabric.fail(world.read())
        world.run()
    failed(world, A)
    world.assert_nothing_is_left()


def test_b8_workers_that_do_not_match_open_no_stream(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    other = replace(handle, fingerprint=replace(FINGERPRINT, dtype="bfloat16"))
    world.begin_import(A, other)
    assert not any(isinstance(m, OpenStream) for m in world.imports.take_messages())
    world.run()
    outcome = world.outcomes[A]
    assert isinstance(outcome, ImportFailed)
    assert isinstance(outcome.error, FingerprintMismatch)
    assert world.pool.num_free == NUM_BLOCKS


# Peers that hang.


def test_a_broken_stream_ends_both_sides_at_once(world: World) -> None:
    handle = world.prefill.exports.begin(A, 5, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.break_stream(A)
    failed(world, A)
    # Prefill's engine is told to stop computing for nobody.
    assert [lost.key for lost in world.prefill.lost] == [A]
    world.deliver_all()
    world.assert_nothing_is_left()


def test_a_read_that_hangs_fails_by_our_own_deadline_and_a_rebuild_frees_its_blocks(
    world: World,
) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    hung = world.read()
    world.wait(READ_TIMEOUT_S)
    assert "did not end within 4 s" in failed(world, A)
    assert world.pool.num_quarantined == 3
    assert hung in world.fabric.reads
    world.wait(QUARANTINE_TIMEOUT_S)
    assert world.importer.num_rebuilds == 1
    world.run()
    world.assert_nothing_is_left()


def test_too_much_quarantine_rebuilds_the_agent_and_innocent_reads_are_done_again(
    world: World,
) -> None:
    big = world.prefill.exports.begin(A, 7, world.now)
    world.begin_import(A, big)
    world.prefill.compute(A, 0, 7, world.now)
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    world.imports.cancel(A, world.now)  # 7 of 12 blocks: more than half.
    world.run()
    assert world.importer.num_rebuilds == 1
    assert world.pool.num_quarantined == 0
    assert world.imports.counters.reads_retried == 1
    world.deliver_all()
    imported(world, B)
    assert prompt_read(world, B, blocks)
    world.prefill.exports.abort(A, HandOffFailed("the reader left"), world.now)
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_unread_prompts_stop_prefill_from_starting_more(world: World) -> None:
    world.prefill.prompt(A, 6, world.now)
    assert world.prefill.exports.can_begin(1)
    handle = world.prefill.prompt(B, 1, world.now)
    assert world.prefill.exports.unread_blocks == 7
    assert not world.prefill.exports.can_begin(1)
    world.begin_import(B, handle)
    world.run()
    world.deliver_all()
    assert world.prefill.exports.can_begin(1)
