"""A decode worker that is full for longer than an export waits: its requests are answered all the
same, and right."""

from __future__ import annotations

import pytest

from tests.end_to_end.running_cluster import Case, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_requests_whose_export_ran_out_in_decodes_queue_are_answered(
    cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    with running("decode.max_batch=1", "transfer.open_timeout_s=0.2") as up:
        occupied = [Case(case.token_ids, max_tokens=400).message(0) for case in cases[:2]]
        found = up.ask(*occupied, *(case.message(3) for case in cases), timeout_s=120)
        assert [answer.token_ids for answer in found[2:]] == expected
        # Computed by decode, whose queue was longer than the export's patience.
        assert sum(not answer.finish.HasField("hand_off") for answer in found) >= 1
        for worker_id in ("prefill-0", "decode-0"):

            def is_free(worker_id: str = worker_id) -> bool:
                worker = up.worker(worker_id)
                return worker is not None and worker.load.free_blocks == worker.load.num_blocks

            until(is_free, 20, f"{worker_id} holds no block")
