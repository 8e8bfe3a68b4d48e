"""Hand-offs between two hosts over a network that is slow, loses packets, or is cut.

Whatever it does: the output is the one of the engine in one process, both workers live on, and no
block is missing afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from hocket.types import Leg, StartRequest
from tests.end_to_end.two_hosts.conftest import PROGRESS_TIMEOUT_S, READ_TIMEOUT_S
from tests.end_to_end.two_hosts.hosts import Gateway, Heard, Pair, until
from tests.end_to_end.two_hosts.network import why_no_loss

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MakeRequest = Callable[..., StartRequest]
Expected = Callable[[StartRequest], tuple[int, ...]]

BLOCK_BITS = 51_200 * 8
# What a busy machine may add to a deadline, and what sweeping up may take after it.
SLACK_S = 10.0


def assert_handed_off(heard: Heard) -> None:
    assert heard.failed is None
    assert heard.joined is not None
    assert not heard.joined.recomputed
    assert heard.joined.transport == "tcp"


async def test_a_hand_off_between_hosts_equals_the_engine_in_one_process(
    pair: Pair, make_request: MakeRequest, expected: Expected
) -> None:
    requests = [make_request(f"good-{n}", n) for n in (1, 64, 300, 1000)]
    async with Gateway(pair) as gateway:
        answers = await asyncio.gather(*(gateway.generate(request) for request in requests))
    for request, heard in zip(requests, answers, strict=True):
        assert_handed_off(heard)
        assert heard.token_ids == expected(request)
    await pair.wait_until_free(SLACK_S)


async def test_a_hand_off_that_takes_longer_than_its_deadlines_is_not_given_up_while_it_moves(
    pair: Pair, make_request: MakeRequest, expected: Expected
) -> None:
    num_blocks, kbit_per_s = 32, 2000
    assert num_blocks * BLOCK_BITS / (kbit_per_s * 1000) > max(
        2 * PROGRESS_TIMEOUT_S, 1.5 * READ_TIMEOUT_S
    )
    request = make_request("slow", num_blocks * 64)
    before = pair.decode.counters()
    pair.network.limit_rate(kbit_per_s)
    async with Gateway(pair) as gateway:
        heard = await gateway.generate(request)
    assert_handed_off(heard)
    assert heard.token_ids == expected(request)
    after = pair.decode.counters()
    for name in ("reads_timed_out_total", "failed_total", "reads_abandoned_total"):
        assert after[name] == before[name], name
    await pair.wait_until_free(SLACK_S)


@pytest.mark.skipif(bool(why_no_loss()), reason=why_no_loss())
async def test_a_link_that_loses_packets_changes_no_output(
    pair: Pair, make_request: MakeRequest, expected: Expected
) -> None:
    requests = [make_request(f"lossy-{n}", 200 + 100 * n) for n in range(5)]
    before = pair.network.retransmitted("prefill")
    pair.network.lose(5)
    async with Gateway(pair) as gateway:
        answers = await asyncio.gather(*(gateway.generate(request) for request in requests))
    for request, heard in zip(requests, answers, strict=True):
        assert heard.failed is None
        assert heard.token_ids == expected(request)
    assert pair.network.retransmitted("prefill") > before, "the link has lost nothing"
    assert any(heard.joined and not heard.joined.recomputed for heard in answers)
    await pair.wait_until_free(SLACK_S)


async def _begin_and_cut(pair: Pair, gateway: Gateway, request: StartRequest, port: str) -> Heard:
    """Cuts the link when some of the request's blocks have crossed and others are on their way."""
    pair.network.limit_rate(600)
    before = (await asyncio.to_thread(pair.decode.counters))["bytes_total"]
    heard = gateway.start(request)

    async def is_crossing() -> bool:
        counters = await asyncio.to_thread(pair.decode.counters)
        return counters["bytes_total"] > before and counters["reads_in_flight"] > 0

    await until(is_crossing, 30, "some blocks have crossed and others are on their way")
    assert heard.joined is None
    pair.network.cut(port)
    return heard


async def _assert_both_sides_notice(pair: Pair, heard: Heard) -> None:
    """Within their deadlines: prefill frees what it exported, decode computes the prompt itself."""

    async def prefill_is_free() -> bool:
        load = await pair.prefill.load()
        return load.free_blocks == load.num_blocks

    await until(prefill_is_free, PROGRESS_TIMEOUT_S + SLACK_S, "prefill has its blocks back")
    async with asyncio.timeout(READ_TIMEOUT_S + SLACK_S):
        await heard.is_over.wait()
    assert heard.failed is None
    assert heard.joined is not None
    assert heard.joined.recomputed


@pytest.mark.parametrize("port", ["decode", "prefill"])
async def test_a_link_cut_during_a_hand_off_costs_that_hand_off_only(
    pair: Pair, make_request: MakeRequest, expected: Expected, port: str
) -> None:
    request = make_request(f"cut-{port}", 700)
    alone = replace(make_request(f"alone-{port}", 200), leg=Leg.WHOLE)
    first = make_request(f"first-{port}", 200, max_tokens=1)
    before = pair.decode.counters()
    async with Gateway(pair) as gateway:
        heard = await _begin_and_cut(pair, gateway, request, port)
        await _assert_both_sides_notice(pair, heard)
        assert heard.token_ids == expected(request)
        # The READs that were on their way never end: only a new agent gives their blocks back.
        await pair.wait_until_free(READ_TIMEOUT_S + SLACK_S)
        counters = pair.decode.counters()
        assert counters["quarantined_blocks_total"] > before["quarantined_blocks_total"]
        assert counters["rebuilds_total"] > before["rebuilds_total"]
        for other in (alone, first):
            assert (await gateway.generate(other)).token_ids == expected(other)
        pair.network.mend()
        await _hands_off_again(pair, gateway, make_request, expected, f"after-{port}")
    pair.assert_alive()


async def _hands_off_again(
    pair: Pair, gateway: Gateway, make_request: MakeRequest, expected: Expected, name: str
) -> None:
    """Every request is answered from now on, and soon by a hand-off again."""
    for number in range(10):
        request = make_request(f"{name}-{number}", 200)
        heard = await gateway.generate(request)
        assert heard.failed is None
        assert heard.token_ids == expected(request)
        if heard.joined is not None and not heard.joined.recomputed:
            break
        await asyncio.sleep(0.5)
    else:
        raise AssertionError("no hand-off succeeds after the link is back")
    await pair.wait_until_free(SLACK_S)


@pytest.mark.parametrize("port", ["decode", "prefill"])
async def test_a_link_cut_while_nothing_crosses_is_not_noticed_later(
    pair: Pair, make_request: MakeRequest, expected: Expected, port: str
) -> None:
    async with Gateway(pair) as gateway:
        assert_handed_off(await gateway.generate(make_request(f"before-{port}", 130)))
        await pair.wait_until_free(SLACK_S)
        pair.network.cut(port)
        await asyncio.sleep(2.0)
        pair.network.mend()
        await _hands_off_again(pair, gateway, make_request, expected, f"idle-{port}")
    pair.assert_alive()
