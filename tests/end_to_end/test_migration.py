"""A decode worker is killed while it answers: another goes on, and clients see nothing of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from hocket.rpc.clients import GenerationClient
from tests.end_to_end.running_cluster import Case, Running, answers, running, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running("decode.workers=2") as cluster:
        yield cluster


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_c1_d12_a_killed_decode_worker_fails_no_request_and_changes_no_token(
    up: Running, cases: list[Case], num_drafts: int
) -> None:
    """Long outputs on both workers, greedy and sampled, against the same ones undisturbed."""
    long = [Case(c.token_ids, 200, c.temperature, c.top_p, c.seed) for c in cases]
    whole = [answer.token_ids for answer in up.ask(*(c.message(num_drafts) for c in long))]
    restarts = up.cluster.restarts("decode-0")
    process = up.cluster.process_ids()["decode-0"]

    async def stream(client: GenerationClient, case: Case, has_some: asyncio.Event) -> list[int]:
        token_ids: list[int] = []
        async for response in client.generate(case.message(num_drafts), timeout_s=60):
            assert response.output_index in (len(token_ids), case.max_tokens)
            token_ids += response.token_ids
            if len(token_ids) >= 5:
                has_some.set()
        return token_ids

    async def story(client: GenerationClient) -> list[list[int]]:
        events = [asyncio.Event() for _ in long]
        streams = [
            asyncio.create_task(stream(client, case, event))
            for case, event in zip(long, events, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in events))
        assert not all(one.done() for one in streams)
        os.kill(process, signal.SIGKILL)
        return await asyncio.gather(*streams)

    found = up.with_client(story)
    assert [tuple(one) for one in found] == whole
    until(lambda: up.cluster.restarts("decode-0") > restarts, 30, "decode-0 is replaced")
    until(lambda: up.worker("decode-0") is not None, 60, "decode-0 serves again")
    until(lambda: answers(up, cases[0].message()), 30, "the gateway serves")
