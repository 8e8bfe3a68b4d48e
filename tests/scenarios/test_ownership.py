"""Scenarios A: who owns which block when somebody leaves, is late, or tells nonsense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode_workers.import_stream import EventArrived, ImportFailed
from hocket.errors import Cancelled, DeadlineExceeded
from hocket.rpc import worker_pb2 as worker
from prefill_workers.export_stream import (
    EndStream,
    ExportMessage,
    SendEvent,
    StreamGone,
    UpdateArrived,
)
from tests.scenarios.hand_off_world import (
    GARBAGE,
    NUM_BLOCKS,
    OPEN_TIMEOUT_S,
    OWN,
    PROGRESS_TIMEOUT_S,
    A,
    B,
    World,
    open_update,
)
from tests.scenarios.transfers import Transfer


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
    world.imports.cancel(B, world.decode_now)
    world.run()
    assert world.prefill.pool.num_free == NUM_BLOCKS
    assert B not in world.outcomes
    assert world.pool.num_quarantined == len(blocks)


def test_a1_the_client_leaves_while_decode_waits_for_room(world: World) -> None:
    world.imports.open(A, world.prefill.prompt(A, 5, world.now), world.decode_now)
    world.run()
    world.imports.cancel(A, world.decode_now)
    world.run()
    assert A not in world.outcomes
    world.assert_nothing_is_left()


def test_a2_a_request_that_waits_for_room_learns_that_prefill_is_silent(world: World) -> None:
    handle = world.prefill.prompt(A, 5, world.now)
    world.is_cut = True
    world.imports.open(A, handle, world.decode_now)
    world.wait(PROGRESS_TIMEOUT_S)
    assert "prefill said nothing for 6 s" in world.failed(A)


def test_a2_decode_frees_its_reservation_when_prefill_never_reports(world: World) -> None:
    handle = world.prefill.prompt(A, 5, world.now)
    world.is_cut = True
    world.begin_import(A, handle)
    world.wait(PROGRESS_TIMEOUT_S - 1)
    assert world.pool.num_free == NUM_BLOCKS - 5
    world.wait(1)
    assert world.pool.num_free == NUM_BLOCKS
    assert "prefill said nothing for 6 s" in world.failed(A)


def test_a4_decode_learns_at_once_why_prefill_gave_up(world: World) -> None:
    handle = world.prefill.begin(A, 5, world.now)
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
    assert exports.counters.opened == 1
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
    world.imports.take(
        EventArrived(A, worker.ExportEvent(bundle=worker.Bundle())), world.decode_now
    )
    world.run()
    world.assert_nothing_is_left()


def test_a5_the_completion_of_an_abandoned_read_releases_its_blocks(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.imports.cancel(A, world.decode_now)
    world.run()
    assert world.pool.num_quarantined == 3
    world.fabric.complete(world.read())
    world.run()
    world.assert_nothing_is_left()


def assert_refused(messages: list[ExportMessage], reason: str) -> None:
    """The stream was told why, then ended."""
    assert [type(message) for message in messages] == [SendEvent, EndStream]
    rejection = messages[0]
    assert isinstance(rejection, SendEvent)
    assert reason in rejection.event.aborted.message


def test_a6_what_prefill_does_not_know_is_rejected_and_frees_nothing(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    exports = world.prefill.exports
    wrong = {
        "never begun": open_update(B, handle),
        "in epoch 9": open_update(A, replace(handle, worker_epoch=9)),
        "by prefill-7": open_update(A, replace(handle, worker_id="prefill-7")),
        "not in slot 2": open_update(A, replace(handle, slot=2)),
        f"with epoch {handle.slot_epoch}, not in slot 0 with 8": open_update(
            A, replace(handle, slot_epoch=8)
        ),
        "opened no export": worker.ExportUpdate(
            acknowledge=worker.AcknowledgeBlocks(first_block=0, num_blocks=3)
        ),
    }
    for stream, (reason, update) in enumerate(wrong.items(), start=1):
        exports.take(UpdateArrived(stream, update), world.now)
        assert_refused(exports.take_messages(), reason)
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
    assert world.has_prompt(A, blocks)
    world.imported(A)


def test_a6_an_acknowledgement_of_what_was_never_announced_frees_nothing_else(
    world: World,
) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    world.prefill.compute(A, 0, 2, world.now)
    exports = world.prefill.exports
    exports.take(UpdateArrived(1, open_update(A, handle)), world.now)
    exports.take_messages()
    ack = worker.AcknowledgeBlocks(first_block=0, num_blocks=3)
    exports.take(UpdateArrived(1, worker.ExportUpdate(acknowledge=ack)), world.now)
    assert_refused(exports.take_messages(), "up to 3 acknowledged, 2 announced")
    # The prompt's computation still holds all of them.
    assert world.prefill.pool.num_free == NUM_BLOCKS - 4


def test_a6_blocks_acknowledged_twice_are_freed_once(world: World) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    other = world.prefill.prompt(B, 3, world.now)
    exports = world.prefill.exports
    exports.take(UpdateArrived(1, open_update(A, handle)), world.now)
    ack = worker.ExportUpdate(acknowledge=worker.AcknowledgeBlocks(first_block=0, num_blocks=3))
    for _ in range(2):
        exports.take(UpdateArrived(1, ack), world.now)
    assert world.prefill.pool.num_free == NUM_BLOCKS - other.num_blocks


def test_a7_target_blocks_of_a_read_in_flight_are_given_to_nobody(world: World) -> None:
    handle = world.prefill.begin(A, 6, world.now)
    blocks = world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.deliver_all()
    world.prefill.compute(A, 2, 2, world.now)
    world.run()
    world.imports.cancel(A, world.decode_now)
    # Read ones and not yet announced ones are free; exactly the READ's targets are not.
    assert world.pool.num_free == NUM_BLOCKS - 2
    others = world.pool.allocate(NUM_BLOCKS - 2)
    assert not set(others) & set(blocks[2:4])
    for block in others:
        world.importer.pool[block] = OWN
    world.deliver_all()
    assert all(world.importer.pool[block] == OWN for block in others)
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
    assert "took its blocks back" in world.failed(A)
    assert world.imports.counters.fences_tripped == 1
    assert world.pool.num_free == NUM_BLOCKS


def test_a8_wrong_checksums_of_blocks_taken_back_are_no_reason_to_read_them_again(
    transfer: Transfer,
) -> None:
    world = World(transfer, has_checksums=True)
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.is_cut = True
    world.prefill.exports.abort(A, Cancelled("the client left"), world.now)
    world.prefill.exporter.pool[:] = [GARBAGE] * NUM_BLOCKS
    world.fabric.deliver(world.read())
    world.run()
    assert "took its blocks back" in world.failed(A)
    assert world.imports.counters.reads == 1
    world.close()


def test_a8_the_epoch_is_raised_before_anybody_else_gets_the_blocks(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    read, pool = world.read(), world.prefill.pool
    give_back = pool.free

    def give_back_and_reuse(blocks: Sequence[int]) -> None:
        """In the moment a block is free, it is written; in the next, the READ lands."""
        give_back(blocks)
        for block in [block for block in blocks if pool.num_holders(block) == 0]:
            world.prefill.exporter.pool[block] = GARBAGE
        if read in world.fabric.reads:
            world.fabric.deliver(read)

    pool.free = give_back_and_reuse
    world.is_cut = True  # The news of it is slower than the bytes.
    world.prefill.exports.abort(A, Cancelled("the client left"), world.now)
    world.run()
    assert "took its blocks back" in world.failed(A)


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
    assert "Nobody opened the export" in world.failed(A)
    world.assert_nothing_is_left()


def test_a17_a_bundle_without_all_blocks_publishes_nothing(world: World) -> None:
    handle = world.prefill.begin(A, 3, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.deliver_all()
    # Block 2 is never announced, whatever prefill's own table would say to that.
    world.imports.take(
        EventArrived(A, worker.ExportEvent(bundle=worker.Bundle())), world.decode_now
    )
    world.run()
    assert "1 of 3 blocks were never announced, the first one 2" in world.failed(A)
    assert world.pool.num_free == NUM_BLOCKS


def test_a17_a_gap_in_what_was_announced_is_not_covered_by_what_came_after(
    world: World,
) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    world.imports.open(A, handle, world.decode_now)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    # While the request waits for room, block 3 is announced, and block 2 never is.
    chunk = worker.ChunkReady(first_block=3, blocks=world.prefill.exports.blocks(A)[3:])
    world.imports.take(EventArrived(A, worker.ExportEvent(chunk=chunk)), world.decode_now)
    world.run()
    assert "blocks 3..3 of 4 were announced after 2 others" in world.failed(A)
    assert world.pool.num_free == NUM_BLOCKS


def test_a17_a_block_announced_twice_is_read_once(world: World) -> None:
    handle = world.prefill.begin(A, 3, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    chunk = worker.ChunkReady(first_block=1, blocks=world.prefill.exports.blocks(A)[1:])
    world.imports.take(EventArrived(A, worker.ExportEvent(chunk=chunk)), world.decode_now)
    world.run()
    assert "were announced after 2 others" in world.failed(A)
    assert world.imports.counters.reads == 1
    world.deliver_all()
    assert world.pool.num_free == NUM_BLOCKS


def test_a17_a_bundle_that_overtakes_the_last_read_waits_for_it(world: World) -> None:
    blocks = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.fabric.copy(world.read(), 2)
    world.run()
    assert A not in world.outcomes
    world.deliver_all()
    world.imported(A)
    assert world.has_prompt(A, blocks)
