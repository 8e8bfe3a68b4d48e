"""Scenarios B: transfers that fail, and peers that restart, hang or do not match."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from decode_workers.import_stream import ImportFailed, OpenStream
from hocket.errors import FingerprintMismatch, HandOffFailed
from tests.scenarios.hand_off_world import (
    FINGERPRINT,
    GARBAGE,
    NUM_BLOCKS,
    PROGRESS_TIMEOUT_S,
    QUARANTINE_TIMEOUT_S,
    READ_TIMEOUT_S,
    A,
    B,
    World,
    bundle,
)
from tests.scenarios.transfers import Transfer


def test_b1_prefill_restarts_at_the_same_address_and_its_old_life_is_forgotten(
    world: World,
) -> None:
    old_handle = world.prefill.prompt(A, 3, world.now)
    world.begin_import(A, old_handle)
    world.run()
    old_agent = world.prefill.exporter.describe().agent
    world.restart_prefill()
    world.failed(A)

    # A handle of the old life opens nothing, and the new life is read under its own name.
    world.begin_import(A, old_handle)
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    assert "in epoch 1; this is prefill-0 in epoch 2" in world.failed(A)
    world.deliver_all()
    world.imported(B)
    assert world.has_prompt(B, blocks)
    assert world.importer.forgotten == [old_agent]
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_b1_decode_restarts_and_its_old_life_holds_nothing_of_prefills(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    half = world.prefill.begin(B, 3, world.now)
    world.begin_import(B, half)
    world.prefill.compute(B, 0, 1, world.now)
    world.run()
    assert len(world.fabric.reads) == 2
    world.restart_decode()
    assert world.prefill.exports.counters.peers_gone == 2
    # B's computation is told to stop; A's blocks are free.
    assert [lost.key for lost in world.prefill.lost] == [B]
    world.assert_nothing_is_left()

    blocks = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.deliver_all()
    world.imported(A)
    assert world.has_prompt(A, blocks)


def test_b3_one_transient_error_is_retried_and_harms_nobody_else(world: World) -> None:
    blocks_a = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    blocks_b = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    world.fabric.fail(world.fabric.reads[0])
    world.run()
    world.deliver_all()
    world.imported(A)
    world.imported(B)
    assert world.has_prompt(A, blocks_a)
    assert world.has_prompt(B, blocks_b)
    assert world.imports.counters.reads_retried == 1


def test_b3_an_error_that_stays_fails_one_request(world: World) -> None:
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    for _ in range(2):
        world.fabric.fail(next(r for r in world.fabric.reads if set(r.local_blocks) - set(blocks)))
        world.run()
    assert "the READ failed: remote disconnected" in world.failed(A)
    world.deliver_all()
    world.imported(B)
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_b4_nothing_is_imported_before_the_last_fence_and_nothing_revokes_it_after(
    world: World,
) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    blocks = world.begin_import(A, handle)
    world.prefill.compute(A, 0, 3, world.now)
    world.run()
    world.deliver_all()
    world.prefill.compute(A, 3, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    assert A not in world.outcomes  # Bundle and three of four blocks are here.
    world.deliver_all()
    world.imported(A)
    # Prefill reuses everything and dies; what was imported is decode's own.
    world.prefill.exporter.pool[:] = [GARBAGE] * NUM_BLOCKS
    world.restart_prefill()
    world.wait(2 * PROGRESS_TIMEOUT_S)
    world.imported(A)
    assert world.has_prompt(A, blocks)


def test_b4_a_failure_of_the_last_read_fails_the_whole_hand_off(world: World) -> None:
    handle = world.prefill.begin(A, 4, world.now)
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
    world.failed(A)
    world.assert_nothing_is_left()


def damage_what_lands(world: World, times: int) -> None:
    """A byte flips on the way, in so many READs."""
    left = [0] * times

    def flip(local_blocks: list[int]) -> None:
        if left:
            left.pop()
            block = local_blocks[-1]
            data = np.array(world.importer.blocks.read(block))
            data[3] ^= 1
            world.importer.blocks.write(block, data)

    world.importer.notify_landed(flip)


def test_b4_a_byte_that_changes_on_the_way_is_noticed_and_read_again(transfer: Transfer) -> None:
    world = World(transfer, has_checksums=True)
    damage_what_lands(world, times=1)
    blocks = world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.deliver_all()
    assert world.has_prompt(A, blocks)
    world.imported(A)
    counters = world.imports.counters
    assert (counters.reads_corrupt, counters.reads_retried) == (1, 1)
    world.pool.free(blocks)
    world.assert_nothing_is_left()
    world.close()


def test_b4_bytes_that_arrive_wrong_every_time_fail_the_hand_off(transfer: Transfer) -> None:
    world = World(transfer, has_checksums=True)
    damage_what_lands(world, times=2)
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.deliver_all()
    assert "1 of 3 blocks did not arrive as they were sent" in world.failed(A)
    assert world.imports.counters.reads_corrupt == 2
    world.assert_nothing_is_left()
    world.close()


DIFFERENCES = {
    "b8_layout": replace(FINGERPRINT, dtype="bfloat16"),
    "b8_block_size": replace(FINGERPRINT, block_tokens=32),
    "b9_mtp_layers": replace(FINGERPRINT, kv_layout="9x160"),
    "b10_model_revision": replace(FINGERPRINT, weights="later"),
    "b10_numerics_of_another_version": replace(FINGERPRINT, numerics="2-invariant"),
}


@pytest.mark.parametrize("difference", list(DIFFERENCES))
def test_b8_b9_b10_workers_that_do_not_match_open_no_stream(world: World, difference: str) -> None:
    handle = world.prefill.prompt(A, 3, world.now)
    other = replace(handle, fingerprint=DIFFERENCES[difference])
    world.begin_import(A, other)
    assert not any(isinstance(m, OpenStream) for m in world.imports.take_messages())
    world.run()
    outcome = world.outcomes[A]
    assert isinstance(outcome, ImportFailed)
    assert isinstance(outcome.error, FingerprintMismatch)
    assert world.pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize("difference", list(DIFFERENCES))
def test_b8_b9_b10_prefill_refuses_a_reader_that_does_not_match(
    world: World, difference: str
) -> None:
    world.imports.settings = replace(world.imports.settings, fingerprint=DIFFERENCES[difference])
    handle = world.prefill.prompt(A, 3, world.now)
    # A reader that does not look at the handle's fingerprint itself.
    world.begin_import(A, replace(handle, fingerprint=DIFFERENCES[difference]))
    world.run()
    assert "can't be read by decode-0" in world.failed(A)
    assert not world.fabric.reads
    assert world.pool.num_free == NUM_BLOCKS


def test_b6_an_announcement_that_gets_lost_fails_the_hand_off_with_the_numbers(
    world: World,
) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    world.begin_import(A, handle)
    world.run()
    world.loses = lambda event: event.chunk.first_block == 2
    for first in (0, 2):
        world.prefill.compute(A, first, 2, world.now)
        world.run()
        world.deliver_all()
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    assert "2 of 4 blocks were never announced, the first one 2" in world.failed(A)
    assert world.imports.counters.failed == 1
    world.assert_nothing_is_left()


def test_b6_the_export_of_another_request_is_not_read(world: World) -> None:
    world.prefill.prompt(A, 3, world.now)
    of_b = world.prefill.prompt(B, 3, world.now)
    world.begin_import(A, of_b)
    world.run()
    assert "is exported in slot 0" in world.failed(A)
    assert not world.fabric.reads
    assert world.pool.num_free == NUM_BLOCKS


def test_a_broken_stream_ends_both_sides_at_once(world: World) -> None:
    handle = world.prefill.begin(A, 5, world.now)
    world.begin_import(A, handle)
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.break_stream(A)
    world.failed(A)
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
    assert "did not end within 4 s" in world.failed(A)
    assert world.pool.num_quarantined == 3
    assert hung in world.fabric.reads
    world.wait(QUARANTINE_TIMEOUT_S)
    assert world.importer.num_rebuilds == 1
    world.run()
    world.assert_nothing_is_left()


def test_too_much_quarantine_rebuilds_the_agent_and_innocent_reads_are_done_again(
    world: World,
) -> None:
    big = world.prefill.begin(A, 7, world.now)
    world.begin_import(A, big)
    world.prefill.compute(A, 0, 7, world.now)
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    world.imports.cancel(A, world.decode_now)  # 7 of 12 blocks: more than half.
    world.run()
    assert world.importer.num_rebuilds == 1
    assert world.pool.num_quarantined == 0
    assert world.imports.counters.reads_retried == 1
    world.deliver_all()
    world.imported(B)
    assert world.has_prompt(B, blocks)
    world.prefill.exports.abort(A, HandOffFailed("the reader left"), world.now)
    world.pool.free(blocks)
    world.assert_nothing_is_left()
