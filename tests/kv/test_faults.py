"""Injected faults happen to the bytes themselves, and keep the promises of a transfer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from hocket.kv.faults import FaultyImporter
from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric, MemoryImporter
from hocket.kv.transfer import ReadId, ReadResult, ReadState
from hocket.transfer_settings import FaultSettings

POOL = [bytes([block + 1]) * 64 for block in range(8)]
STALE = b"\xee" * 64


class World:
    """An exporter, and an importer whose READs all have one fault (or shares of several)."""

    def __init__(self, settings: FaultSettings) -> None:
        self.fabric = MemoryFabric(is_automatic=False)
        self.exporter = MemoryExporter(self.fabric, list(POOL), num_slots=1)
        self.inner = MemoryImporter(self.fabric, [STALE] * 8)
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.importer = FaultyImporter(self.inner, settings, lambda s, f: self.due.append((s, f)))
        self.num_ends = 0
        self.importer.notify(self._count)

    def _count(self) -> None:
        self.num_ends += 1

    def post(self, blocks: list[int], *, has_checksums: bool = False) -> ReadId:
        checksums = self.exporter.checksums(blocks) if has_checksums else ()
        peer = self.exporter.describe()
        return self.importer.read_blocks(peer, 0, blocks, blocks, checksums)

    def read(self, blocks: list[int], *, has_checksums: bool = False) -> ReadResult:
        id = self.post(blocks, has_checksums=has_checksums)
        self.fabric.deliver(self.fabric.reads[0])
        return self.importer.poll(id)

    def let_time_pass(self) -> None:
        due, self.due = self.due, []
        for _, function in due:
            function()

    @property
    def here(self) -> list[bytes]:
        return self.inner.pool


def test_a_corrupted_read_has_one_wrong_byte_and_looks_done() -> None:
    world = World(FaultSettings(corrupted=1.0))
    assert world.read([0, 1, 2]).state is ReadState.DONE
    pairs = zip(b"".join(world.here[:3]), b"".join(POOL[:3]), strict=True)
    assert sum(ours != theirs for ours, theirs in pairs) == 1
    assert world.exporter.pool == POOL


def test_a_checksum_finds_the_wrong_byte() -> None:
    world = World(FaultSettings(corrupted=1.0))
    assert world.read([0, 1, 2], has_checksums=True).state is ReadState.CORRUPT


def test_a_truncated_read_leaves_the_last_block_as_it_was_and_looks_done() -> None:
    world = World(FaultSettings(truncated=1.0))
    assert world.read([0, 1, 2]).state is ReadState.DONE
    assert world.here[:3] == [*POOL[:2], STALE]


def test_a_checksum_finds_the_block_that_did_not_arrive() -> None:
    world = World(FaultSettings(truncated=1.0))
    result = world.read([0, 1, 2], has_checksums=True)
    assert result.state is ReadState.CORRUPT
    assert "blocks 2" in result.error


def test_a_failed_read_says_so_only_when_no_byte_can_land_any_more() -> None:
    world = World(FaultSettings(failed=1.0))
    id = world.post([0, 1])
    assert world.importer.poll(id).state is ReadState.IN_PROGRESS
    world.fabric.deliver(world.fabric.reads[0])
    result = world.importer.poll(id)
    assert (result.state, "injected" in result.error) == (ReadState.FAILED, True)


def test_a_delayed_read_ends_as_it_would_but_later_and_tells() -> None:
    world = World(FaultSettings(delayed=1.0, delay_s=3.0))
    id = world.post([0])
    world.fabric.deliver(world.fabric.reads[0])
    assert world.importer.poll(id).state is ReadState.IN_PROGRESS
    assert [seconds for seconds, _ in world.due] == [3.0]
    told = world.num_ends
    world.let_time_pass()
    assert world.num_ends == told + 1
    assert world.importer.poll(id).state is ReadState.DONE


def test_a_dropped_read_never_ends_and_its_last_block_lands_late() -> None:
    world = World(FaultSettings(dropped=1.0))
    id = world.post([0, 1])
    world.fabric.deliver(world.fabric.reads[0])
    assert world.importer.poll(id).state is ReadState.IN_PROGRESS
    assert world.here[:2] == [POOL[0], STALE]
    world.let_time_pass()
    assert world.here[:2] == POOL[:2]
    assert world.importer.poll(id).state is ReadState.IN_PROGRESS


def test_a_rebuild_ends_a_dropped_read_and_nothing_lands_afterwards() -> None:
    world = World(FaultSettings(dropped=1.0))
    id = world.post([0, 1])
    world.fabric.deliver(world.fabric.reads[0])
    told = world.num_ends
    world.importer.rebuild()
    assert world.num_ends > told
    assert world.importer.poll(id).state is ReadState.FENCED
    world.inner.pool[1] = b"\x55" * 64  # Another request's.
    world.let_time_pass()
    assert world.here[1] == b"\x55" * 64


def test_a_rebuild_ends_a_dropped_read_that_is_still_on_its_way() -> None:
    world = World(FaultSettings(dropped=1.0))
    id = world.post([0, 1])
    world.importer.rebuild()
    assert world.importer.poll(id).state is ReadState.FENCED
    assert world.here == [STALE] * 8


def test_a_dropped_read_whose_peer_dies_before_fails() -> None:
    world = World(FaultSettings(dropped=1.0))
    id = world.post([0, 1])
    world.exporter.close()
    assert world.importer.poll(id).state is ReadState.FAILED


def test_a_read_that_failed_leaves_its_fault_to_no_later_one() -> None:
    world = World(FaultSettings(truncated=0.5, seed=1))
    states: list[bool] = []
    for _ in range(40):
        world.inner.pool[0] = STALE
        world.post([0])
        world.fabric.fail(world.fabric.reads[0])
        world.inner.pool[0] = STALE
        before = world.importer.counters.faults
        world.read([0])
        was_faulty = world.importer.counters.faults > before
        assert (world.here[0] == STALE) is was_faulty
        states.append(was_faulty)
    assert len(set(states)) == 2


def faults_of(settings: FaultSettings, num_reads: int = 2000) -> list[str]:
    """What became of each of these READs, told from what can be seen."""
    world = World(settings)
    seen: list[str] = []
    for _ in range(num_reads):
        world.inner.pool[0] = STALE
        result = world.read([0])
        bytes_here = {POOL[0]: "right", STALE: "stale"}.get(world.here[0], "wrong")
        seen.append(f"{result.state.value}, {bytes_here}")
        world.importer.rebuild()
    return seen


MIXED = FaultSettings(corrupted=0.1, truncated=0.1, dropped=0.2, failed=0.3, seed=4)


def test_shares_are_shares_of_reads_and_a_read_has_one_fault() -> None:
    found = Counter(faults_of(MIXED))
    expected = {
        "done, wrong": 0.1,
        "done, stale": 0.1,
        "in progress, stale": 0.2,
        "failed, right": 0.3,
        "done, right": 0.3,
    }
    assert found.keys() == expected.keys()
    for what, share in expected.items():
        assert abs(found[what] / 2000 - share) < 0.04, (what, found)


def test_a_seed_says_which_reads_go_wrong() -> None:
    first = faults_of(MIXED, 50)
    assert faults_of(MIXED, 50) == first
    assert faults_of(replace(MIXED, seed=5), 50) != first


def test_faults_are_announced_loudly_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = World(FaultSettings(failed=0.5))
    (record,) = caplog.records
    assert "never in production" in record.message
    assert world.importer.counters.faults_on == 1
    for block in range(8):
        world.read([block])
    assert 0 < world.importer.counters.faults < 8
