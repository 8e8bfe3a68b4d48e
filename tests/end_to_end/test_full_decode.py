"""A decode worker that is full for longer than an export waits for its reader: it keeps the exports
of the requests in its queue alive, and nothing is computed twice."""

from __future__ import annotations

import pytest

from tests.end_to_end.running_cluster import Case, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_exports_outlive_a_queue_that_is_longer_than_their_patience(
    cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    with running("decode.max_batch=1", "transfer.open_timeout_s=1") as up:
        occupied = [Case(case.token_ids, max_tokens=400).message(0) for case in cases[:2]]
        found = up.ask(*occupied, *(case.message(3) for case in cases), timeout_s=120)
        assert [answer.token_ids for answer in found[2:]] == expected
        # Nearly all of them; a machine that halts for a second may be late to open one.
        handed_over = sum(answer.finish.HasField("hand_off") for answer in found)
        assert handed_over > len(found) / 2
        for worker_id in ("prefill-0", "decode-0"):

            def is_free(worker_id: str = worker_id) -> bool:
                worker = up.worker(worker_id)
                return worker is not None and worker.load.free_blocks == worker.load.num_blocks

            until(is_free, 20, f"{worker_id} holds no block")
