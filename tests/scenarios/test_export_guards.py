"""The guards of prefill's half of a hand-off, each with the scenario that fails without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hocket.kv.memory_transfer import MemoryExporter
from hocket.scheduling.export_ownership import ExportOwnership, ExportState
from prefill_workers.export_stream import ExportSettings
from prefill_workers.kv_export import ExportTable
from tests.scenarios import test_hand_off as hand_off
from tests.scenarios import test_ownership as ownership
from tests.scenarios import test_peers as peers
from tests.scenarios.guards import (
    Guard,
    Patch,
    around,
    assert_the_scenario_needs_it,
    replacing,
    run,
    without_limit,
)
from tests.scenarios.nixl_fabric import HeldExporter
from tests.scenarios.transfers import Transfer


def never_bumps(patch: Patch) -> None:
    for exporter in (MemoryExporter, HeldExporter):
        patch.setattr(exporter, "bump_slot_epoch", lambda self, slot: self.slot_epoch(slot))


def bumps_last(patch: Patch) -> None:
    """The epoch is raised after the blocks are free instead of before."""
    end = ExportOwnership._end

    def end_then_bump(self: Any, *args: Any) -> None:
        late: list[int] = []
        epochs = self._epochs
        self._epochs = LateEpochs(late.append)
        try:
            end(self, *args)
        finally:
            self._epochs = epochs
        for slot in late:
            epochs.bump_slot_epoch(slot)

    patch.setattr(ExportOwnership, "_end", end_then_bump)


@dataclass(frozen=True)
class LateEpochs:
    bump_slot_epoch: Callable[[int], None]


def find_by_key(real: Any, self: Any, key: Any, slot: int, epoch: int, first: int) -> Any:
    """Whatever slot and epoch an Open names, they are taken for the export's."""
    export = self._exports.get(key)
    if export is not None:
        slot, epoch = export.slot, export.slot_epoch
    return real(self, key, slot, epoch, first)


def find_open_ones(real: Any, self: Any, key: Any, *args: Any) -> Any:
    """A second reader is taken for the first."""
    export = self._exports.get(key)
    if export is not None and export.state is ExportState.OPEN:
        export.state = ExportState.WAITING
    return real(self, key, *args)


def acknowledge_anything(real: Any, self: Any, stream: int, *args: Any) -> None:
    key = self._streams.keys.get(stream)
    if key is not None:
        export = self._exports[key]
        export.num_ready, num_ready = len(export.blocks), export.num_ready
        real(self, stream, *args)
        export.num_ready = num_ready


def free_again(self: Any, export: Any, first: int, end: int) -> None:
    self._pool.free(export.blocks[first:end])


def forget_ended_streams(real: Any, self: Any, stream: int, now: float) -> Any:
    self._streams.ended.clear()
    return real(self, stream, now)


EXPORT_GUARDS = {
    "fence: the epoch is raised": Guard(
        never_bumps,
        ownership.test_a8_bytes_of_blocks_that_prefill_took_back_are_never_served,
    ),
    "fence: the epoch is raised first": Guard(
        bumps_last,
        ownership.test_a8_the_epoch_is_raised_before_anybody_else_gets_the_blocks,
    ),
    "deadline: an export that nobody opens": Guard(
        without_limit(ExportSettings, open_timeout_s=math.inf),
        ownership.test_a12_blocks_reclaimed_before_the_read_are_a_failure_for_the_reader,
    ),
    "deadline: a reader that does not move": Guard(
        without_limit(ExportSettings, progress_timeout_s=math.inf),
        ownership.test_a8_a_lease_that_runs_out_bumps_the_epoch_before_blocks_are_free,
    ),
    "deadlines fire by themselves": Guard(
        replacing(ExportOwnership, "_expire", lambda *_: None),
        ownership.test_a11_expiry_needs_no_traffic,
    ),
    "keepalive: prefill's": Guard(
        replacing(ExportOwnership, "_alive_due", lambda *_: math.inf),
        hand_off.test_a_long_computation_and_a_slow_reader_keep_each_other_alive,
    ),
    "identity: the worker's life": Guard(
        replacing(ExportTable, "_check_life", lambda *_: None),
        ownership.test_a6_what_prefill_does_not_know_is_rejected_and_frees_nothing,
    ),
    "identity: slot and epoch": Guard(
        around(ExportOwnership, "_find", find_by_key),
        ownership.test_a6_what_prefill_does_not_know_is_rejected_and_frees_nothing,
    ),
    "identity: the layout, at prefill": Guard(
        replacing(ExportTable, "_check_layout", lambda *_: None),
        lambda world: peers.test_b8_b9_b10_prefill_refuses_a_reader_that_does_not_match(
            world, "b8_layout"
        ),
    ),
    "one reader": Guard(
        around(ExportOwnership, "_find", find_open_ones),
        ownership.test_a6_a_second_reader_is_rejected_and_the_first_goes_on,
    ),
    "acknowledgements: only of what was announced": Guard(
        around(ExportOwnership, "acknowledge", acknowledge_anything),
        ownership.test_a6_an_acknowledgement_of_what_was_never_announced_frees_nothing_else,
    ),
    "dedup: acknowledgements": Guard(
        replacing(ExportOwnership, "_free_unread", free_again),
        ownership.test_a6_blocks_acknowledged_twice_are_freed_once,
    ),
    "dedup: late words on an ended stream": Guard(
        around(ExportOwnership, "_moved", forget_ended_streams),
        ownership.test_a5_a_late_message_for_a_dead_request_changes_nothing,
    ),
    "cap: unread prompts": Guard(
        without_limit(ExportSettings, max_unread_share=1.0),
        hand_off.test_unread_prompts_stop_prefill_from_starting_more,
    ),
}


@pytest.mark.parametrize("guard", EXPORT_GUARDS)
def test_a_scenario_fails_without(transfer: Transfer, guard: str) -> None:
    chosen = EXPORT_GUARDS[guard]
    assert_the_scenario_needs_it(chosen, lambda: run(chosen.scenario, transfer))
