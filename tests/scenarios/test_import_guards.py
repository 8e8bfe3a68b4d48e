"""The guards of decode's half of a hand-off and of the transfer, each with the scenario that fails
without it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from decode_workers.import_stream import ImportSettings
from hocket.errors import Cancelled
from hocket.kv import memory_transfer, nixl_reads
from hocket.kv.block_pool import BlockPool
from hocket.kv.memory_transfer import MemoryImporter
from hocket.kv.nixl_agent import NixlAgent
from hocket.kv.nixl_reads import ImportLoop
from hocket.scheduling import import_ownership
from hocket.scheduling.import_ownership import ImportOwnership
from hocket.scheduling.reads_in_flight import ReadsInFlight
from hocket.types import Fingerprint
from tests.scenarios import test_hand_off as hand_off
from tests.scenarios import test_ownership as ownership
from tests.scenarios import test_peers as peers
from tests.scenarios.conftest import NIXL_ONLY
from tests.scenarios.guards import (
    Guard,
    Patch,
    around,
    assert_the_scenario_needs_it,
    both,
    replacing,
    run,
    without_limit,
)
from tests.scenarios.hand_off_world import GARBAGE, NUM_BLOCKS, A, World
from tests.scenarios.nixl_fabric import HeldImporter
from tests.scenarios.transfers import Transfer


def conclude_uncovered(real: Any, self: Any, key: Any, current: Any, now: float) -> None:
    current.covered = set(range(current.num_blocks))
    real(self, key, current, now)


def no_quarantine(patch: Patch) -> None:
    """Targets of an abandoned READ are free at once."""
    patch.setattr(BlockPool, "quarantine", BlockPool.free)
    patch.setattr(BlockPool, "release_quarantined", lambda *_: None)


def no_checksums(patch: Patch) -> None:
    for module in (memory_transfer, nixl_reads):
        patch.setattr(module, "find_damage", lambda *_: "")


def never_forgets(patch: Patch) -> None:
    for importer in (MemoryImporter, HeldImporter):
        patch.setattr(importer, "forget_peer", lambda *_: None)


def keep_import(real: Any, self: Any, key: Any, *args: Any) -> None:
    """The import of an abandoned READ is still there when the READ ends."""
    current = self._imports[key]
    real(self, key, *args)
    self._imports[key] = current


def wait_for_abandoned(real: Any, self: Any, number: int) -> Any:
    read = self._reads[number]
    real(self, number)
    return read


IMPORT_GUARDS = {
    "fence: the epoch is looked at": Guard(
        replacing(ImportOwnership, "_is_fenced", lambda *_: True),
        ownership.test_a8_bytes_of_blocks_that_prefill_took_back_are_never_served,
    ),
    "coverage": Guard(
        around(ImportOwnership, "_conclude", conclude_uncovered),
        ownership.test_a17_a_bundle_without_all_blocks_publishes_nothing,
    ),
    "checksum": Guard(
        no_checksums,
        peers.test_b4_a_byte_that_changes_on_the_way_is_noticed_and_read_again,
    ),
    "quarantine": Guard(
        no_quarantine,
        ownership.test_a7_target_blocks_of_a_read_in_flight_are_given_to_nobody,
    ),
    "quarantine: its share": Guard(
        without_limit(ImportSettings, max_quarantine_share=1.0),
        peers.test_too_much_quarantine_rebuilds_the_agent_and_innocent_reads_are_done_again,
    ),
    "deadline: quarantine": Guard(
        without_limit(ImportSettings, quarantine_timeout_s=math.inf),
        peers.test_a_read_that_hangs_fails_by_our_own_deadline_and_a_rebuild_frees_its_blocks,
    ),
    "deadline: a READ": Guard(
        without_limit(ImportSettings, read_timeout_s=math.inf),
        peers.test_a_read_that_hangs_fails_by_our_own_deadline_and_a_rebuild_frees_its_blocks,
    ),
    "deadline: prefill says nothing": Guard(
        without_limit(ImportSettings, progress_timeout_s=math.inf),
        ownership.test_a2_decode_frees_its_reservation_when_prefill_never_reports,
    ),
    "deadline: prefill says nothing, while there is no room": Guard(
        without_limit(ImportSettings, progress_timeout_s=math.inf),
        ownership.test_a2_a_request_that_waits_for_room_learns_that_prefill_is_silent,
    ),
    "keepalive: decode's": Guard(
        replacing(ImportOwnership, "_alive_due", lambda *_: math.inf),
        hand_off.test_a_request_that_waits_for_room_keeps_its_lease_and_then_reads_all_at_once,
    ),
    "READs: a number of attempts": Guard(
        without_limit(ImportSettings, max_read_attempts=99),
        peers.test_b3_an_error_that_stays_fails_one_request,
    ),
    "identity: the layout, at decode": Guard(
        replacing(Fingerprint, "difference", lambda *_: ""),
        lambda world: peers.test_b8_b9_b10_workers_that_do_not_match_open_no_stream(
            world, "b10_model_revision"
        ),
    ),
    "identity: a peer's agent of an earlier life": Guard(
        never_forgets,
        peers.test_b1_prefill_restarts_at_the_same_address_and_its_old_life_is_forgotten,
    ),
    "dedup: announcements": Guard(
        replacing(import_ownership, "_nonsense", lambda *_: None),
        ownership.test_a17_a_block_announced_twice_is_read_once,
    ),
    "dedup: late events of an import that is gone": Guard(
        replacing(ImportOwnership, "__contains__", lambda *_: True),
        ownership.test_a5_a_late_message_for_a_dead_request_changes_nothing,
    ),
    "dedup: the late end of an abandoned READ": Guard(
        both(
            around(ReadsInFlight, "end", wait_for_abandoned),
            around(ImportOwnership, "_close", keep_import),
        ),
        ownership.test_a5_the_completion_of_an_abandoned_read_releases_its_blocks,
    ),
}


@pytest.mark.parametrize("guard", IMPORT_GUARDS)
def test_a_scenario_fails_without(transfer: Transfer, guard: str) -> None:
    chosen = IMPORT_GUARDS[guard]
    assert_the_scenario_needs_it(chosen, lambda: run(chosen.scenario, transfer))


# The transport's own: the epoch is asked for only when the bytes are here.


def epochs_first(patch: Patch) -> None:
    advance = ImportLoop._advance

    def advance_turned_round(self: Any, peer: Any, batch: Any) -> bool:
        if not batch.handle and batch.posts:
            batch.posts.reverse()
        return advance(self, peer, batch)

    patch.setattr(ImportLoop, "_advance", advance_turned_round)


def taken_back_as_the_read_leaves(world: World) -> None:
    """Prefill takes its blocks back, and somebody writes into them, between the moment at which a
    READ was decided on and that at which its first byte is read."""
    world.begin_import(A, world.prefill.prompt(A, 3, world.now))
    world.run()
    world.is_cut = True  # The news of it is slower than the bytes.
    read_part = NixlAgent.read_part

    def take_back_and_read(*args: Any) -> int:
        world.prefill.exports.abort(A, Cancelled("the client left"), world.now)
        world.prefill.exporter.pool[:] = [GARBAGE] * NUM_BLOCKS
        return read_part(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlAgent, "read_part", take_back_and_read)
        world.deliver_all()
    assert "took its blocks back" in world.failed(A)


@pytest.mark.parametrize("transfer", [NIXL_ONLY], indirect=True)
def test_nixls_scenario_fails_when_the_epoch_is_read_before_the_bytes(transfer: Transfer) -> None:
    guard = Guard(epochs_first, taken_back_as_the_read_leaves)
    assert_the_scenario_needs_it(guard, lambda: run(guard.scenario, transfer))
