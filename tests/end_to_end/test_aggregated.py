"""Without a prefill pool decode workers do whole requests, and say the same."""

from __future__ import annotations

import asyncio

import pytest

from hocket.errors import InvalidRequest
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import ClusterClient
from tests.end_to_end.running_cluster import Case, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_decode_workers_alone_give_the_output_of_the_engine_in_one_process(
    cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    with running("prefill.workers=0", "decode.workers=2") as up:
        found = up.ask(*(case.message(3) for case in cases))
        assert [answer.token_ids for answer in found] == expected
        for case, answer in zip(cases, found, strict=True):
            assert answer.finish.reason == generation.FINISH_REASON_LENGTH
            assert answer.finish.usage.prompt_tokens == len(case.token_ids)
            assert answer.finish.timing.prefill_s > 0
            assert not answer.finish.HasField("hand_off")
        one = cases[0].message()
        one.stopping.max_tokens = 1
        assert up.ask(one)[0].token_ids == expected[0][:1]
        with pytest.raises(InvalidRequest, match=r"no such pool.*prefill\.workers = 0"):
            asyncio.run(ask_for_prefill(up.serving.admin_address))


async def ask_for_prefill(address: str) -> None:
    client = ClusterClient(address)
    try:
        await client.scale(cluster.ScaleRequest(prefill=cluster.PoolSize(workers=1)))
    finally:
        await client.close()
