"""Adaptive drafts are as good as the best constant number, learning included, without knowing it.

Time is simulated, so it may decide.
"""

from __future__ import annotations

import pytest

from hocket.scheduling.draft_controller import DraftPolicy
from tests.scheduling.draft_world import SimulatedRequest, SimulatedWorker
from tests.scheduling.draft_worlds import EASY, HARD, WORLDS, compare


@pytest.mark.parametrize("name", WORLDS)
def test_adaptive_drafts_are_as_good_as_the_best_constant_number(name: str) -> None:
    found = compare(WORLDS[name])
    assert found.to_best > 0.97, found
    assert found.to_none > 0.98, found


def test_requests_that_keep_drafts_get_them() -> None:
    worker = SimulatedWorker(DraftPolicy(4), lambda rows: 0.6 + 0.05 * rows, noise=0.05)
    easy = [SimulatedRequest(i, lambda _: EASY, 10**6) for i in range(4)]
    hard = [SimulatedRequest(i, lambda _: HARD, 10**6) for i in range(4, 8)]
    worker.running = [*easy, *hard]
    for _ in range(60):
        worker.step()
    before_easy, before_hard = (sum(r.num_drafts for r in kind) for kind in (easy, hard))
    for _ in range(100):
        worker.step()
    for_easy = sum(r.num_drafts for r in easy) - before_easy
    for_hard = sum(r.num_drafts for r in hard) - before_hard
    assert for_easy > 8 * for_hard
    assert for_easy > 100 * 4 * 1.5
