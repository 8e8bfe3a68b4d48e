"""One line for each request, and outcomes that mean what they say."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from control_plane.request_flow import RequestFlow
from hocket.errors import InvalidRequest, Overloaded
from hocket.rpc import generation_pb2 as generation

TEXT = " the quick brown fox jumps over the lazy dog"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(r) for r in caplog.records if r.message == "request ended"]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


async def test_a_request_leaves_one_line(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(TEXT) as s:
        answer = await s.generate(text="hello", request_id="mine")
        (line,) = lines(caplog)
        assert line["request_id"] == "mine"
        assert line["outcome"] == "OK"
        assert line["prompt_tokens"] == answer.finish.usage.prompt_tokens
        assert line["output_tokens"] == answer.finish.usage.output_tokens
        assert 0 < line["first_token_s"] <= line["total_s"]
        assert line["attempts"] == 1
        assert line["prefill_worker"] == s.prefill.description.worker_id
        assert line["decode_worker"] == s.decode.description.worker_id


async def test_a_request_that_fails_says_why(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(TEXT) as s:
        s.prefill.engine.fails_with = Overloaded("full up")
        with pytest.raises(Overloaded):
            await s.generate(text="hello", request_id="mine")
        line = lines(caplog)[-1]
        assert (line["request_id"], line["outcome"]) == ("mine", "OVERLOADED")
        assert "full up" in line["fault"]
        assert line["output_tokens"] == 0
        assert "first_token_s" not in line


async def test_a_request_that_never_found_workers_names_none(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(TEXT) as s:
        with pytest.raises(InvalidRequest):
            await s.generate(text="hello", request_id="x" * 3000)
        (line,) = lines(caplog)
        assert line["attempts"] == 0
        assert "prefill_worker" not in line
        assert len(line["request_id"]) < 300, "a line must not grow with what a client sends"


@pytest.mark.parametrize(("leaves_at", "outcome"), [("first", "CANCELLED"), ("last", "OK")])
async def test_a_client_that_leaves_with_its_answer_has_not_cancelled(
    serving: Any, caplog: pytest.LogCaptureFixture, leaves_at: str, outcome: str
) -> None:
    async with serving(TEXT) as s:
        gateway, left = s.gateway, asyncio.Event()
        flow = RequestFlow(gateway._pool, gateway._tokenizer, gateway.metrics, lambda: 1)

        async def send(response: generation.GenerateResponse) -> None:
            if leaves_at == "first" or response.HasField("finish"):
                left.set()
                await asyncio.Event().wait()

        request = generation.GenerateRequest(text="hello")
        served = asyncio.create_task(flow.serve(request, gateway._limits(), 60.0, send))
        await left.wait()
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)
        (line,) = lines(caplog)
        assert line["outcome"] == outcome
        counted = gateway.metrics.registry.get_sample_value
        assert counted("hocket_requests_total", {"outcome": outcome}) == 1
