"""The whole system with an expert-parallel decode group of two ranks, compared and broken."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from hocket.errors import GroupLost, HocketError, WorkerUnavailable
from hocket.rpc.clients import GenerationClient
from tests.end_to_end.running_cluster import Case, Running, answer_of, answers, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
RANKS = ("decode-0.0", "decode-0.1")


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running("decode.group_size=2", "decode.group_timeout_s=5") as cluster:
        yield cluster


def test_every_rank_is_a_worker_of_its_own(up: Running) -> None:
    ranks = {w.worker_id: w for w in up.serving.workers if w.group}
    assert tuple(sorted(ranks)) == RANKS
    assert [(w.group, w.rank, w.group_size) for w in ranks.values()] == [
        ("decode-0", 0, 2),
        ("decode-0", 1, 2),
    ]
    assert len({w.epoch for w in ranks.values()}) == 1
    assert len({w.address for w in ranks.values()}) == 2


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_both_ranks_give_the_output_of_the_engine_in_one_process(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]], num_drafts: int
) -> None:
    found = up.ask(*(case.message(num_drafts) for case in cases))
    assert [answer.token_ids for answer in found] == expected
    assert {answer.finish.hand_off.decode_worker for answer in found} == set(RANKS)


def test_a_killed_rank_ends_all_requests_of_the_group_which_starts_again_whole(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    before = {w.worker_id: w.epoch for w in up.serving.workers}
    process = up.cluster.process_ids()[RANKS[1]]
    long = [Case(case.token_ids, max_tokens=2000) for case in cases[:2]]

    async def story(client: GenerationClient) -> tuple[list[object], float]:
        running_now = [
            asyncio.create_task(answer_of(client, case.message(0), 120)) for case in long
        ]
        await asyncio.sleep(1.5)
        os.kill(process, signal.SIGKILL)
        killed_at = time.monotonic()
        ends = await asyncio.gather(*running_now, return_exceptions=True)
        return list(ends), time.monotonic() - killed_at

    ends, seconds = up.with_client(story)
    for end in ends:
        assert isinstance(end, GroupLost | WorkerUnavailable), end
        assert isinstance(end, HocketError)
        assert end.is_retryable
    assert seconds < 10
    until(lambda: answers(up, cases[0].message()), 90, "the group serves again")
    until(lambda: all(up.worker(rank) for rank in RANKS), 20, "both ranks are registered")
    now = {rank: up.worker(rank) for rank in RANKS}
    epochs = {worker.epoch for worker in now.values() if worker}
    assert len(epochs) == 1
    assert epochs.pop() > before[RANKS[0]]
    found = up.ask(*(case.message(3) for case in cases))
    assert [answer.token_ids for answer in found] == expected


def test_a_rank_that_stands_still_is_noticed_and_the_group_starts_again(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    process = up.cluster.process_ids()[RANKS[0]]
    os.kill(process, signal.SIGSTOP)
    try:
        until(lambda: not answers(up, cases[0].message()), 60, "the group is lost")
        until(lambda: answers(up, cases[0].message()), 90, "the group serves again")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert up.ask(cases[3].message())[0].token_ids == expected[3]
