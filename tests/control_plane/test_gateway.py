"""The gateway from outside: a real client, real gRPC on loopback, engines that follow a script."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import generate_latest

from hocket.errors import (
    ConfigError,
    DeadlineExceeded,
    HocketError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    WorkerUnavailable,
)
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from hocket.rpc.generation_pb2_grpc import GenerationStub
from hocket.rpc.status import error_from_rpc
from hocket.types import Fingerprint, Leg

TEXT = " the quick brown fox jumps over the lazy dog"


async def test_a_request_is_streamed_through_both_workers(serving: Any, tokenizer: Any) -> None:
    async with serving(TEXT) as s:
        answer = await s.generate(text="hello", request_id="mine")
        expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
        assert answer.text == TEXT
        assert answer.token_ids == [*expected, 1]
        assert {r.request_id for r in answer.responses} == {"mine"}
        finish = answer.finish
        assert finish.reason == generation.FINISH_REASON_STOP
        assert finish.usage.prompt_tokens == len(tokenizer.encode("hello").ids)
        assert finish.usage.output_tokens == len(expected) + 1
        assert finish.usage.cached_tokens == 2
        assert (finish.hand_off.bytes, finish.hand_off.transport) == (4096, "memory")
        assert finish.hand_off.prefill_worker == s.prefill.description.worker_id
        assert finish.hand_off.decode_worker == s.decode.description.worker_id
        assert 0 < finish.timing.first_token_s <= finish.timing.total_s
        (prefill,), (decode,) = s.prefill.engine.submitted, s.decode.engine.submitted
        assert (prefill.leg, decode.leg) == (Leg.PREFILL, Leg.DECODE)
        assert prefill.key == decode.key
        assert decode.export.worker_id == s.prefill.description.worker_id
        assert list(prefill.token_ids) == tokenizer.encode("hello").ids
        assert s.is_idle


async def test_output_indices_are_contiguous_and_the_first_token_comes_once(serving: Any) -> None:
    async with serving(TEXT) as s:
        answer = await s.generate(text="hello", top_logprobs=1)
        index = 0
        for response in answer.responses:
            assert response.output_index == index
            assert len(response.logprobs) == len(response.token_ids)
            index += len(response.token_ids)
        assert answer.logprobs == [-float(i) for i in range(index)]


async def test_several_tokens_per_step_give_the_same_text_and_their_counts(serving: Any) -> None:
    async with serving(TEXT) as one, serving(TEXT) as four:
        four.decode.engine.step_tokens = 4
        first, second = await one.generate(text="x"), await four.generate(text="x")
        assert first.text == second.text
        assert first.token_ids == second.token_ids
        usage = second.finish.usage
        assert usage.emitted_tokens == usage.output_tokens - 1
        assert usage.accepted_tokens == usage.emitted_tokens - usage.verify_steps
        assert list(usage.drafted_by_position) == [usage.verify_steps] * 3
        page = generate_latest(four.gateway.metrics.registry).decode()
        length = usage.emitted_tokens / usage.verify_steps
        assert f"hocket_acceptance_length {length}" in page
        assert f"hocket_draft_tokens_accepted_total {usage.accepted_tokens:.1f}" in page
        assert 'hocket_draft_survival_rate{position="0"}' in page
        assert 'hocket_requests_total{outcome="OK"} 1.0' in page
        assert "hocket_requests_queued 0.0" in page
        assert "hocket_requests_in_flight 0.0" in page
        assert f"hocket_output_tokens_total {usage.output_tokens:.1f}" in page


async def test_what_a_client_leaves_open_fits_the_smallest_pool(serving: Any) -> None:
    """One block: the server's default, 256 tokens, would not fit behind any prompt."""
    async with serving(TEXT, decode={"num_blocks": 1}) as s:
        assert (await s.client.get_model()).max_context_tokens == 64
        answer = await s.generate(text="x", stopping={"ignore_eos": True})
        assert answer.finish.usage.prompt_tokens + len(answer.token_ids) == 64
        with pytest.raises(InvalidRequest) as caught:
            await s.generate(text="x", stopping={"max_tokens": 64})
        assert caught.value.field == "stopping.max_tokens"


async def test_a_seed_is_picked_and_returned_or_kept(serving: Any) -> None:
    async with serving() as s:
        kept = await s.generate(text="x", sampling={"seed": 2**64 - 1})
        picked = [(await s.generate(text="x")).finish.seed for _ in range(3)]
        assert kept.finish.seed == 2**64 - 1
        assert len(set(picked)) == 3
        seeds = [r.sampling.seed for r in s.decode.engine.submitted]
        assert seeds == [kept.finish.seed, *picked]


async def test_max_tokens_1_starts_no_decode(serving: Any, until: Any) -> None:
    async with serving() as s:
        answer = await s.generate(text="x", stopping={"max_tokens": 1})
        assert len(answer.token_ids) == 1
        assert answer.finish.reason == generation.FINISH_REASON_LENGTH
        assert not answer.finish.HasField("hand_off")
        assert s.decode.engine.submitted == []
        await until(lambda: s.is_idle)


async def test_a_first_token_that_ends_the_output_waits_for_no_decode(
    serving: Any, until: Any
) -> None:
    async with serving(script=[1]) as s:
        s.decode.engine.stall_at = 0
        answer = await s.generate(text="x")
        assert (answer.text, answer.token_ids) == ("", [1])
        assert answer.finish.reason == generation.FINISH_REASON_STOP
        assert answer.finish.usage.output_tokens == 1
        await until(lambda: s.is_idle)
        # The exported prompt is given back at once, not at the end of a lease.
        await until(lambda: len(s.prefill.engine.cancelled) == 1)


async def test_ignore_eos_goes_on_after_the_end_token(serving: Any) -> None:
    async with serving(" fox") as s:
        answer = await s.generate(text="x", stopping={"max_tokens": 20, "ignore_eos": True})
        assert len(answer.token_ids) == 20
        assert answer.finish.reason == generation.FINISH_REASON_LENGTH


@pytest.mark.parametrize("step_tokens", [1, 3, 8])
async def test_a_stop_string_across_tokens_ends_the_text_before_it(
    serving: Any, tokenizer: Any, until: Any, step_tokens: int
) -> None:
    async with serving(TEXT) as s:
        s.decode.engine.step_tokens = step_tokens
        stop = ["wn fox ju", "never"]
        answer = await s.generate(text="x", stopping={"stop": stop})
        assert answer.text == " the quick bro"
        assert answer.finish.matched_stop == "wn fox ju"
        assert answer.finish.reason == generation.FINISH_REASON_STOP
        # The output ends with the token that completes the stop string, however drafts ran.
        whole = tokenizer.encode(TEXT, add_special_tokens=False).ids
        lengths = [n for n in range(len(whole)) if stop[0] in tokenizer.decode(whole[:n])]
        assert answer.token_ids == whole[: lengths[0]]
        usage = answer.finish.usage
        assert usage.output_tokens == lengths[0]
        # Decode was cancelled and told no sum: its counts are those of the steps that were seen,
        # the last one as far as it belongs to the output.
        num_steps, last = -(-(lengths[0] - 1) // step_tokens), (lengths[0] - 2) % step_tokens + 1
        assert usage.emitted_tokens == usage.output_tokens - 1
        assert usage.verify_steps == num_steps
        assert usage.drafted_tokens == num_steps * (step_tokens - 1)
        assert usage.accepted_tokens == (num_steps - 1) * (step_tokens - 1) + min(
            last, step_tokens - 1
        )
        await until(lambda: s.is_idle)


async def test_text_held_back_for_a_stop_string_is_flushed_at_the_end(serving: Any) -> None:
    async with serving(TEXT) as s:
        answer = await s.generate(text="x", stopping={"stop": ["dog house"]})
        assert answer.text == TEXT
        assert answer.finish.matched_stop == ""


async def test_characters_of_several_tokens_come_whole(serving: Any) -> None:
    text = "größer → 世界 👩‍👩‍👧 ok"
    async with serving(text) as s:
        answer = await s.generate(text="x", stopping={"max_tokens": 100})
        assert answer.text == text
        assert all("\ufffd" not in r.text for r in answer.responses)


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing"),
    ({"text": ""}, "text", "''"),
    ({"chat": {}}, "chat.messages", "[]"),
    ({"token_ids": {}}, "token_ids.ids", "[]"),
    ({"token_ids": {"ids": [3, 512]}}, "token_ids.ids[1]", "512"),
    ({"chat": {"messages": [{"role": "boss"}]}}, "chat.messages[0].role", "'boss'"),
    ({"text": "x", "sampling": {"temperature": -0.5}}, "sampling.temperature", "-0.5"),
    ({"text": "x", "sampling": {"temperature": 101}}, "sampling.temperature", "101.0"),
    ({"text": "x", "sampling": {"temperature": math.nan}}, "sampling.temperature", "nan"),
    ({"text": "x", "sampling": {"temperature": math.inf}}, "sampling.temperature", "inf"),
    ({"text": "x", "sampling": {"top_p": 0}}, "sampling.top_p", "0.0"),
    ({"text": "x", "sampling": {"top_p": 1.1}}, "sampling.top_p", "1.1"),
    ({"text": "x", "sampling": {"min_p": -0.1}}, "sampling.min_p", "-0.1"),
    ({"text": "x", "sampling": {"top_k": 513}}, "sampling.top_k", "513"),
    ({"text": "x", "top_logprobs": 21}, "top_logprobs", "21"),
    ({"text": "x", "stopping": {"max_tokens": 0}}, "stopping.max_tokens", "0"),
    ({"text": "x", "stopping": {"max_tokens": 255}}, "stopping.max_tokens", "255"),
    ({"text": "x", "stopping": {"stop": [""]}}, "stopping.stop[0]", "''"),
    ({"text": "x", "stopping": {"stop": ["a"] * 17}}, "stopping.stop", "'17 strings'"),
    ({"text": "x", "stopping": {"stop": ["a" * 257]}}, "stopping.stop[0]", "'aaa"),
    ({"text": "x", "stopping": {"stop_token_ids": [512]}}, "stopping.stop_token_ids[0]", "512"),
    ({"token_ids": {"ids": [3] * 201}}, "prompt", "'201 tokens'"),
    ({"text": "x", "request_id": "i" * 129}, "request_id", "'iii"),
]


async def test_bad_input_gets_field_value_and_limit_and_the_next_request_works(
    serving: Any,
) -> None:
    async with serving() as s:
        for fields, field, value in INVALID:
            with pytest.raises(InvalidRequest) as caught:
                await s.generate(**fields)
            error = caught.value
            assert error.field == field, fields
            assert error.metadata["value"].startswith(value), (error.metadata, fields)
            assert error.metadata["limit"], fields
            assert field in str(error)
        assert s.prefill.engine.submitted == []
        assert (await s.generate(text="x")).text == TEXT
        assert s.is_idle


UNREADABLE = {
    "a surrogate": b"\x12\x03\xed\xa0\x80",
    "a cut message": b"\x12\x7f\x00",
    "noise": b"\xff" * 50,
}


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_what_is_no_message_is_the_clients_fault_and_the_next_request_works(
    serving: Any, method: str
) -> None:
    async with serving() as s, grpc.aio.insecure_channel(s.address) as channel:
        call = channel.unary_stream(f"/hocket.v1.Generation/{method}")
        for packed in UNREADABLE.values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call(packed)))
            error = error_from_rpc(caught.value)
            assert isinstance(error, InvalidRequest), error
            assert error.field == "message"
        assert (await s.generate(text="x")).text == TEXT


async def test_what_a_client_sent_is_not_logged(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with serving() as s:
        await s.generate(text="secret words")
        for fields in ({"chat": {"messages": [{"role": "secret"}]}}, {"text": "secret " * 300}):
            with pytest.raises(InvalidRequest):
                await s.generate(**fields)
    assert "chat.messages[0].role" in {getattr(r, "fault", "") for r in caplog.records}
    assert "secret" not in caplog.text
    assert not any("secret" in str(vars(record)) for record in caplog.records)


async def test_error_details_are_the_standard_ones(serving: Any) -> None:
    """Read without our own client, as any gRPC client would."""
    async with serving() as s, grpc.aio.insecure_channel(s.address) as channel:
        stub: Any = GenerationStub(channel)
        call = stub.Generate(generation.GenerateRequest(text="x", sampling={"top_p": 2}))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        metadata = dict(await call.trailing_metadata())
        status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad)
        assert (info.reason, info.domain) == ("INVALID_REQUEST", "hocket")
        assert dict(info.metadata) == {
            "field": "sampling.top_p",
            "value": "2.0",
            "limit": "above 0 and at most 1",
        }
        assert bad.field_violations[0].field == "sampling.top_p"


async def test_another_model_is_not_found_and_the_served_one_is_named(serving: Any) -> None:
    async with serving() as s:
        with pytest.raises(ModelNotFound, match="'fox' is"):
            await s.generate(text="x", model="wolf")
        with pytest.raises(ModelNotFound):
            await s.client.get_model("wolf")
        assert (await s.generate(text="x", model="fox")).text == TEXT


async def test_an_oversized_message_is_refused_and_the_next_request_works(serving: Any) -> None:
    async with serving(max_message_bytes=10_000) as s:
        with pytest.raises(InvalidRequest, match="at most 10000 bytes"):
            await s.generate(text="x" * 20_000)
        with pytest.raises(Overloaded, match="larger than max") as caught:
            await s.generate(text="x" * 50_000)
        assert not caught.value.is_retryable
        assert (await s.generate(text="x")).text == TEXT


async def test_a_leaving_client_cancels_both_legs(serving: Any, until: Any) -> None:
    async with serving() as s:
        s.decode.engine.stall_at = 3
        s.prefill.engine.stall_at = None
        responses = s.client.generate(generation.GenerateRequest(text="x"))
        await anext(responses)
        await until(lambda: bool(s.decode.engine.running))
        await responses.aclose()
        await until(lambda: s.is_idle)
        assert len(s.decode.engine.cancelled) == 1


async def test_a_client_that_leaves_before_the_first_token_cancels_prefill_and_decode(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = 0
        s.decode.engine.stall_at = 0
        call = asyncio.create_task(s.generate(text="x"))
        await until(lambda: bool(s.decode.engine.running))
        call.cancel()
        await until(lambda: s.is_idle)
        assert len(s.prefill.engine.cancelled) >= 1
        assert len(s.decode.engine.cancelled) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_stops_is_unavailable_in_bounded_time_and_the_other_leg_is_cancelled(
    serving: Any, until: Any, role: str
) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = 0 if role == "prefill" else None
        s.decode.engine.stall_at = 0 if role == "prefill" else 2
        stopped, other = (s.prefill, s.decode) if role == "prefill" else (s.decode, s.prefill)
        call = asyncio.create_task(s.generate(text="x"))
        await until(lambda: bool(s.decode.engine.running))
        loop = asyncio.get_running_loop()
        stopped_s = loop.time()
        await stopped.stop()
        with pytest.raises(WorkerUnavailable, match=stopped.description.address):
            await call
        assert loop.time() - stopped_s < 2.5
        await until(lambda: other.engine.sessions.num_requests == 0 and not other.engine.running)
        with pytest.raises(WorkerUnavailable, match=f"no {role} worker can take the request"):
            await s.generate(text="x")


async def test_a_prefill_worker_that_dies_after_the_hand_off_harms_nothing(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = 0
        s.decode.engine.stall_at = 2
        call = asyncio.create_task(s.generate(text="x"))
        await until(lambda: bool(s.decode.engine.running))
        await s.prefill.stop()
        await asyncio.sleep(0.6)
        s.decode.engine.resume.set()
        assert (await call).text == TEXT


async def test_a_failed_prefill_cancels_decode_and_answers_at_once(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        s.prefill.engine.fails_with = Overloaded("prefill is full", limit=1)
        with pytest.raises(Overloaded, match="prefill is full") as caught:
            await s.generate(text="x")
        assert caught.value.is_retryable
        assert caught.value.metadata == {"limit": "1"}
        assert s.decode.engine.submitted == []
        await until(lambda: s.is_idle)


async def test_a_failed_decode_cancels_prefill_and_answers_at_once(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        s.prefill.engine.stall_at = 0
        s.decode.engine.fails_with = Overloaded("decode is full")
        with pytest.raises(Overloaded, match="decode is full"):
            await s.generate(text="x")
        await until(lambda: s.is_idle)
        assert len(s.prefill.engine.cancelled) >= 1


async def test_a_deadline_ends_both_legs(serving: Any, until: Any) -> None:
    async with serving(deadline_s=0.2) as s:
        s.decode.engine.stall_at = 3
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s"):
            await s.generate(text="x")
        await until(lambda: s.is_idle)
        (decode,) = s.decode.engine.submitted
        assert 0 < decode.deadline_s <= 0.2


async def test_many_requests_at_once_do_not_mix(serving: Any) -> None:
    async with serving() as s:
        s.decode.engine.step_tokens = 2
        answers = await asyncio.gather(*(s.generate(text=f"n{i}") for i in range(40)))
        assert [a.text for a in answers] == [TEXT] * 40
        assert s.is_idle


async def test_nothing_is_left_after_many_requests_that_leave_at_random_moments(
    serving: Any, until: Any
) -> None:
    chance = random.Random(7)

    async def leave(s: Any, number: int) -> None:
        call = asyncio.create_task(s.generate(text=f"n{number}", stopping={"max_tokens": 30}))
        await asyncio.sleep(chance.random() * 0.15)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async with serving() as s:
        for batch in range(5):
            await asyncio.gather(*(leave(s, 40 * batch + i) for i in range(40)))
        await until(lambda: s.is_idle)
        assert (await s.generate(text="x")).text == TEXT
        value = s.gateway.metrics.registry.get_sample_value
        await until(lambda: value("hocket_requests_in_flight") == 0)
        assert value("hocket_requests_queued") == 0


async def test_the_same_request_id_twice_at_a_time_is_two_requests(serving: Any) -> None:
    async with serving() as s:
        answers = await asyncio.gather(*(s.generate(text="x", request_id="a") for _ in range(5)))
        assert [a.text for a in answers] == [TEXT] * 5
        assert len({r.key for r in s.decode.engine.submitted}) == 5


async def test_workers_that_cannot_pair_are_not_used_and_the_difference_is_named(
    serving: Any,
) -> None:
    other = Fingerprint("w", "kv", 64, "bfloat16", "1-invariant")
    async with serving(decode={"fingerprint": other}) as s:
        with pytest.raises(WorkerUnavailable, match="dtype: 'float32' != 'bfloat16'"):
            await s.generate(text="x")


async def test_health_follows_the_workers(serving: Any, until: Any) -> None:
    async with serving() as s, grpc.aio.insecure_channel(s.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        await s.gateway.wait_until_serving(2)
        serving_status = health_pb2.HealthCheckResponse.SERVING
        assert await status("") == await status("hocket.v1.Generation") == serving_status
        drained = replace(s.decode.description, is_draining=True)
        s.directory.set([s.prefill.description, drained])
        await asyncio.sleep(0.25)
        assert await status("hocket.v1.Generation") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(WorkerUnavailable, match="is draining"):
            await s.generate(text="x")
        s.directory.set([s.prefill.description, s.decode.description])
        await asyncio.sleep(0.25)
        assert await status("") == serving_status


async def test_a_worker_that_leaves_the_directory_finishes_what_it_has(
    serving: Any, until: Any
) -> None:
    async with serving() as s:
        s.decode.engine.stall_at = 3
        call = asyncio.create_task(s.generate(text="x", stopping={"max_tokens": 3}))
        await until(lambda: bool(s.decode.engine.submitted))
        s.directory.set([])
        assert len((await call).token_ids) == 3
        await until(lambda: s.gateway._pool.snapshots() == [])


async def test_reflection_names_the_services(serving: Any) -> None:
    async with serving() as s, grpc.aio.insecure_channel(s.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
        assert {"hocket.v1.Generation", "grpc.health.v1.Health"} <= names


async def test_tokenize_gives_what_generate_would_see(serving: Any) -> None:
    async with serving() as s:
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        for prompt in ({"text": "hello"}, {"chat": chat}):
            token_ids = await s.client.tokenize(generation.TokenizeRequest(**prompt))
            await s.generate(**prompt)
            assert list(s.prefill.engine.submitted[-1].token_ids) == token_ids


async def test_get_model_tells_the_limits(serving: Any) -> None:
    async with serving(default_max_tokens=99) as s:
        model = await s.client.get_model()
        assert (model.name, model.revision, model.vocabulary_size) == ("fox", "w", 512)
        assert (model.max_context_tokens, model.default_max_tokens) == (256, 99)
        assert (model.has_mtp, model.max_draft_tokens) == (True, 3)


async def test_a_port_that_is_taken_is_a_clear_error(serving: Any) -> None:
    async with serving() as s:
        port = int(s.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"{port} cannot be bound"):
            async with serving(port=port):
                pass


async def test_nobody_listening_is_worker_unavailable() -> None:
    client = GenerationClient("127.0.0.1:1")
    with pytest.raises(HocketError) as caught:
        await client.get_model()
    assert isinstance(caught.value, WorkerUnavailable)
    await client.close()
