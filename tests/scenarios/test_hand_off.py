"""The hand-off as it should be, whatever the clocks say and however long the prompt."""

from __future__ import annotations

from collections import Counter

import pytest

from hocket.kv.nixl_agent import NixlAgent, Part
from hocket.rpc import worker_pb2 as worker
from tests.scenarios.hand_off_world import (
    EMPTY,
    NUM_BLOCKS,
    OPEN_TIMEOUT_S,
    OWN,
    PROGRESS_TIMEOUT_S,
    A,
    B,
    World,
    bundle,
)
from tests.scenarios.transfers import Transfer

HOUR_S = 3600.0


def test_chunks_are_read_while_later_ones_are_computed(world: World) -> None:
    handle = world.prefill.begin(A, 5, world.now)
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

    outcome = world.imported(A)
    assert outcome.bundle == bundle(first_token=42)
    assert outcome.num_bytes == 5 * len(EMPTY)
    assert outcome.transport == world.transfer.transport
    assert world.has_prompt(A, blocks)
    assert world.pool.num_held == 5
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_a_reader_that_opens_late_gets_everything_in_one_read(world: World) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    for position in range(4):
        world.prefill.compute(A, position, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    blocks = world.begin_import(A, handle)
    world.run()
    assert world.read().remote_blocks == world.prefill.exports.blocks(A)
    world.deliver_all()
    assert world.has_prompt(A, blocks)
    world.imported(A)


def test_prefill_frees_acknowledged_blocks_only_when_the_prompt_is_computed(world: World) -> None:
    handle = world.prefill.begin(A, 4, world.now)
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
    handle = world.prefill.begin(A, 2, world.now)
    blocks = world.begin_import(A, handle)
    world.wait(10 * PROGRESS_TIMEOUT_S)
    world.prefill.compute(A, 0, 2, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    world.deliver_all()
    assert world.has_prompt(A, blocks)


def test_a_request_that_waits_for_room_keeps_its_lease_and_then_reads_all_at_once(
    world: World,
) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    world.imports.open(A, handle, world.decode_now)
    world.run()
    world.prefill.compute(A, 0, 1, world.now)
    world.run()
    world.prefill.compute(A, 1, 3, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.wait(OPEN_TIMEOUT_S + 5 * PROGRESS_TIMEOUT_S)
    assert not world.fabric.reads
    assert world.pool.num_free == NUM_BLOCKS
    blocks = world.receive(A, handle)
    assert world.read().remote_blocks == world.prefill.exports.blocks(A)
    world.deliver_all()
    world.imported(A)
    assert world.has_prompt(A, blocks)
    world.pool.free(blocks)
    world.assert_nothing_is_left()


def test_blocks_that_decode_has_already_are_acknowledged_and_never_written(world: World) -> None:
    handle = world.prefill.begin(A, 4, world.now)
    blocks = world.pool.allocate(4)
    for block in blocks[:2]:
        world.importer.pool[block] = OWN
    world.imports.open(A, handle, world.decode_now)
    world.imports.receive(A, blocks, world.decode_now, first_block=2)
    world.prefill.compute(A, 0, 3, world.now)
    world.run()
    assert world.read().local_blocks == blocks[2:3]
    world.prefill.compute(A, 3, 1, world.now)
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    world.deliver_all()
    assert world.imported(A).num_bytes == 2 * len(EMPTY)
    assert [world.importer.pool[block] for block in blocks[:2]] == [OWN] * 2
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


# A9: two hosts with very different clocks.


def leisurely_hand_off(world: World) -> list[int]:
    """Longer than every deadline, so that all of them are pushed back now and then."""
    handle = world.prefill.begin(A, 4, world.now)
    blocks = world.begin_import(A, handle)
    for first in (0, 2):
        world.wait(2 * PROGRESS_TIMEOUT_S)
        world.prefill.compute(A, first, 2, world.now)
        world.run()
        world.deliver_all()
    world.prefill.exports.finish(A, bundle(), world.now)
    world.run()
    return blocks


def what_crossed(world: World) -> list[bytes]:
    """All messages, but for the names and addresses that no two worlds share."""
    told: list[bytes] = []
    for message in world.crossed:
        copy = type(message)()
        copy.CopyFrom(message)
        if isinstance(copy, worker.ExportEvent) and copy.HasField("opened"):
            copy.opened.Clear()
        if isinstance(copy, worker.ExportUpdate) and copy.HasField("open"):
            copy.open.export.slot_epoch = 0
        told.append(copy.SerializeToString(deterministic=True))
    return told


def test_a9_no_clock_reading_crosses_between_hosts_whose_clocks_are_hours_apart(
    transfer: Transfer,
) -> None:
    together, apart = World(transfer), World(transfer, prefill_clock=100 * HOUR_S, decode_clock=7.0)
    for world in (together, apart):
        blocks = leisurely_hand_off(world)
        world.imported(A)
        assert world.has_prompt(A, blocks)
        world.pool.free(blocks)
        world.assert_nothing_is_left()
        world.close()
    assert what_crossed(together) == what_crossed(apart)
    assert len(together.crossed) > 10


@pytest.mark.parametrize("hours", [5, -5])
def test_a9_a_clock_that_jumps_moves_only_the_deadlines_of_its_own_host(
    world: World, hours: int
) -> None:
    world.begin_import(A, world.prefill.begin(A, 4, world.now))
    world.prefill.compute(A, 0, 2, world.now)
    world.run()
    world.deliver_all()
    world.decode_now += hours * HOUR_S
    world.run()
    if hours > 0:
        assert "prefill said nothing for 6 s" in world.failed(A)
    else:
        # Decode sends nothing for hours; prefill's own clock ends the lease, and decode is told.
        world.wait(PROGRESS_TIMEOUT_S)
        assert "did not move for 6 s" in world.failed(A)
    assert [lost.key for lost in world.prefill.lost] == [A]
    # Both halves serve the next one.
    blocks = world.begin_import(B, world.prefill.prompt(B, 3, world.now))
    world.run()
    world.deliver_all()
    assert world.has_prompt(B, blocks)
    world.imported(B)
    world.pool.free(blocks)
    world.assert_nothing_is_left()


# B13: thousands of blocks.


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """What NIXL is asked to move, one entry per post; in memory there are none."""
    posted: list[Part] = []
    read_part = NixlAgent.read_part
    monkeypatch.setattr(
        NixlAgent, "read_part", lambda *args: posted.append(args[-1]) or read_part(*args)
    )
    return posted


def test_b13_thousands_of_blocks_cross_in_one_message_one_read_and_few_posts(
    transfer: Transfer, posts: list[Part]
) -> None:
    world = World(transfer, num_blocks=5000)
    blocks = world.begin_import(A, world.prefill.prompt(A, 4000, world.now))
    world.run()
    assert len(world.read().local_blocks) == 4000
    world.deliver_all()
    assert world.has_prompt(A, blocks)
    world.imported(A)
    kinds = Counter(next(iter(message.ListFields()))[0].name for message in world.crossed)
    assert kinds == Counter(open=1, opened=1, chunk=1, bundle=1, acknowledge=1, close=1)
    assert world.imports.counters.reads == 1
    # Neighbours on both sides are one post over TCP, too.
    assert len(posts) == (1 if transfer.transport == "tcp" else 0)
    world.close()


def test_b13_a_fragmented_pool_costs_a_post_per_run_of_neighbours_not_per_block(
    transfer: Transfer, posts: list[Part]
) -> None:
    world = World(transfer, num_blocks=4000)
    # Given back in another order than taken: runs of 500.
    taken = [world.pool.allocate(500) for _ in range(8)]
    for run in reversed(taken):
        world.pool.free(run)
    blocks = world.begin_import(A, world.prefill.prompt(A, 2000, world.now))
    assert blocks[0] == 3500
    world.run()
    world.deliver_all()
    assert world.has_prompt(A, blocks)
    assert world.imports.counters.reads == 1
    assert len(posts) == (4 if transfer.transport == "tcp" else 0)
    world.close()
