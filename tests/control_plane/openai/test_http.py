"""The HTTP door byte by byte: framing, bad input, leaving clients, stopping. Raw sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from hocket.errors import ConfigError

TEXT = " the quick brown fox jumps over the lazy dog"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def _request(path: str, **body: Any) -> bytes:
    told = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(told)}\r\n\r\n"
    return head.encode() + told


def _events(body: bytes) -> list[str]:
    """The data of each event; the framing is checked on the way."""
    assert body.endswith(b"\n\n")
    events = body.decode()[:-2].split("\n\n")
    assert all(e.startswith("data: ") and "\n" not in e for e in events), events
    return [e.removeprefix("data: ") for e in events]


async def test_a_stream_is_framed_as_openai_frames_it(open_door: Any) -> None:
    async with open_door() as d:
        answer = await d.post(
            CHAT,
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=2,
        )
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done = _events(answer.body)
        assert done == "[DONE]"
        first, *middle, last, usage = [json.loads(e) for e in events]
        head = {name: first[name] for name in ("id", "object", "created", "model")}
        assert head["object"] == "chat.completion.chunk"
        assert list(first) == [*head, "system_fingerprint", "choices", "usage"]
        opening = {"role": "assistant", "content": "", "refusal": None}
        rest = {"logprobs": None, "finish_reason": None}
        assert first["choices"] == [{"index": 0, "delta": opening} | rest]
        for chunk in middle:
            assert chunk.items() >= head.items()
            ((choice),) = chunk["choices"]
            assert choice == {"index": 0, "delta": {"content": choice["delta"]["content"]}} | rest
        assert last["choices"] == [
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
        ]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2


async def test_a_stream_without_usage_does_not_speak_of_it(open_door: Any) -> None:
    async with open_door() as d:
        answer = await d.post(COMPLETIONS, prompt="x", stream=True)
        *events, done = _events(answer.body)
        assert done == "[DONE]"
        assert all("usage" not in json.loads(e) for e in events)
        assert len(answer.chunks) > 1


INVALID: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": 7}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    (COMPLETIONS, {"prompt": [[3], [4]]}, "prompt"),
    (COMPLETIONS, {"prompt": [3, "a"]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [3, True]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [3, -1]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": [3, 512]}, "prompt[1]"),
    (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "suffix": "end"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "9"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": 10**400}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.5}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "top_k": 513}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "x", "stop": 5}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [5]}, "stop[0]"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [512]}, "stop_token_ids[0]"),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": 1}, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage"),
    (COMPLETIONS, {"prompt": "x", "model": 3}, "model"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": ["hello"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text"),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
     "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
     "tools"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
     "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", [-1, 0, 2**32])
async def test_a_wrong_number_of_tokens_is_answered_with_the_one_range(
    open_door: Any, wrong: int
) -> None:
    async with open_door() as d:
        answer = await d.post(COMPLETIONS, prompt="x", max_tokens=wrong)
        assert answer.error["message"] == (
            f"max_tokens is {wrong}; it must be a whole number from 1 to 4294967295."
        )


async def test_bad_fields_are_400_with_their_name_and_the_next_request_works(
    open_door: Any,
) -> None:
    async with open_door() as d:
        for path, body, param in INVALID:
            answer = await d.post(path, **body)
            assert answer.status == 400, (body, answer.body)
            assert answer.error["param"] == param, (body, answer.error)
            assert answer.error["type"] == "invalid_request_error"
            assert answer.error["code"] in ("invalid_value", "context_length_exceeded")
            assert answer.error["message"].startswith(param), (body, answer.error)
        assert d.behind.prefill.engine.submitted == []
        assert (await d.post(COMPLETIONS, prompt="x")).json["choices"][0]["text"] == TEXT
        assert d.behind.is_idle


async def test_what_exceeds_the_context_has_a_code_of_its_own(open_door: Any) -> None:
    async with open_door() as d:
        long_output = await d.post(COMPLETIONS, prompt="x", max_tokens=255)
        long_prompt = await d.post(COMPLETIONS, prompt=[3] * 201)
        chat = [{"role": "user", "content": "x" * 900}]
        long_chat = await d.post(CHAT, messages=chat)
        zero = await d.post(COMPLETIONS, prompt="x", max_tokens=0)
        for answer, param in (
            (long_output, "max_tokens"), (long_prompt, "prompt"), (long_chat, "messages")
        ):  # fmt: skip
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["code"] == "context_length_exceeded"
        assert zero.error["code"] == "invalid_value"


async def test_neutral_values_and_unknown_fields_are_accepted(open_door: Any) -> None:
    neutral = {
        "n": 1, "best_of": 1, "echo": False, "suffix": None, "logit_bias": {}, "user": "me",
        "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "store": True,
        "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True,
        "stop": None, "seed": None, "logprobs": None, "top_k": -1, "of_tomorrow": {"x": [1]},
    }  # fmt: skip
    async with open_door() as d:
        assert (await d.post(COMPLETIONS, prompt="x", **neutral)).status == 200
        messages = [{"role": "user", "content": "x", "name": "me"}]
        answer = await d.post(CHAT, messages=messages, model=None, **neutral)
        assert answer.status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000,
     b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x"} {}',
     b'{"prompt": "x", "prompt": "y"}', b'{"prompt": "x", "logit_bias": {"3": 1, "3": 2}}'],
)  # fmt: skip
async def test_a_body_that_is_no_json_object_is_400(open_door: Any, body: bytes) -> None:
    async with open_door() as d:
        answer = await d.raw(f"POST {COMPLETIONS}", body)
        assert (answer.status, answer.error["param"]) == (400, "body")
        assert len(answer.body) < 600


async def test_bytes_that_are_no_http_are_refused(open_door: Any) -> None:
    async with open_door() as d:
        reader, writer = await d.connect()
        writer.write(b"\x16\x03\x01 no http at all\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_an_oversized_body_is_413_however_it_comes(open_door: Any) -> None:
    async with open_door(max_message_bytes=10_000) as d:
        small = await d.post(COMPLETIONS, prompt="x" * 20_000)
        declared = await d.raw(
            f"POST {COMPLETIONS}", b"", {"content-length": "99999999", "expect": "100-continue"}
        )
        chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
        pieces = await d.raw(
            f"POST {COMPLETIONS}", chunk * 3 + b"0\r\n\r\n",
            {"content-length": "", "transfer-encoding": "chunked"},
        )  # fmt: skip
        for answer in (small, declared, pieces):
            assert answer.status == 413
            assert answer.error["code"] == "request_too_large"
            assert "10000 bytes" in answer.error["message"]
        assert (await d.post(COMPLETIONS, prompt="x")).status == 200


async def test_unknown_paths_and_methods_have_the_same_shape(open_door: Any) -> None:
    async with open_door() as d:
        lost = await d.raw("GET /v1/embeddings")
        assert (lost.status, lost.error["code"]) == (404, "unknown_url")
        wrong = await d.raw(f"GET {COMPLETIONS}")
        assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "post"


async def test_request_ids_go_in_and_out(open_door: Any) -> None:
    async with open_door() as d:
        mine = {"x-request-id": "mine-1"}
        body = json.dumps({"prompt": "x"})
        answer = await d.raw(f"POST {COMPLETIONS}", body, mine)
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json["id"] == "cmpl-mine-1"
        assert d.behind.prefill.engine.submitted[0].key.request_id.startswith("mine-1.")
        refused = await d.raw(f"POST {COMPLETIONS}", "{}", mine)
        assert refused.headers["x-request-id"] == "mine-1"
        made = await d.raw(f"POST {COMPLETIONS}", body)
        assert made.json["id"] == f"cmpl-{made.headers['x-request-id']}"
        for bad in ("i" * 129, "a b"):
            answer = await d.raw(f"POST {COMPLETIONS}", body, {"x-request-id": bad})
            assert (answer.status, answer.error["param"]) == (400, "x-request-id")
        assert (await d.raw("GET /health", b"", mine)).headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("stall_at", [0, 3])
async def test_a_socket_that_closes_cancels_both_legs(
    open_door: Any, until: Any, is_stream: bool, stall_at: int
) -> None:
    async with open_door() as d:
        prefill, decode = d.behind.prefill.engine, d.behind.decode.engine
        decode.stall_at = stall_at
        prefill.stall_at = 0 if stall_at == 0 else None
        _, writer = await d.connect()
        writer.write(_request(COMPLETIONS, prompt="x", stream=is_stream))
        await until(lambda: bool(decode.running))
        writer.close()
        await until(lambda: d.behind.is_idle)
        assert len(decode.cancelled) == 1
        value = d.behind.gateway.metrics.registry.get_sample_value
        assert value("hocket_requests_total", {"outcome": "CANCELLED"}) == 1


async def test_a_client_that_leaves_within_its_body_leaves_nothing(
    open_door: Any, until: Any
) -> None:
    async with open_door() as d:
        _, writer = await d.connect()
        writer.write(_request(COMPLETIONS, prompt="x")[:-5])
        await asyncio.sleep(0.05)
        writer.close()
        assert (await d.post(COMPLETIONS, prompt="x")).status == 200
        assert len(d.behind.prefill.engine.submitted) == 1


async def test_a_connection_serves_one_request_after_the_other(open_door: Any) -> None:
    async with open_door() as d:
        reader, writer = await d.connect()
        for _ in range(3):
            writer.write(_request(COMPLETIONS, prompt="x", max_tokens=1))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()


async def test_a_client_that_does_not_read_is_waited_for_and_holds_up_nobody_else(
    open_door: Any, until: Any
) -> None:
    large = {"max_context_tokens": 50_000, "num_blocks": 1000}
    async with open_door(script=[30, 40, 50], prefill=large, decode=large) as d:
        d.behind.decode.engine.step_tokens = 100
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", d.port))
            (connection,) = await _connections(d, until)
            kernel = connection.transport.get_extra_info("socket")
            kernel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            body = {"prompt": "x", "stream": True, "max_tokens": 20_000, "logprobs": 1}
            deaf.sendall(_request(COMPLETIONS, **body))
            await until(lambda: connection.flow.write_paused)
            assert (await d.post(COMPLETIONS, prompt="x", max_tokens=3)).status == 200
            value = d.behind.gateway.metrics.registry.get_sample_value
            assert value("hocket_requests_in_flight") == 1
        await until(lambda: value("hocket_requests_in_flight") == 0)
        await until(lambda: d.behind.is_idle)


async def _connections(d: Any, until: Any) -> list[Any]:
    """The server's side of what is connected."""
    connections = d.behind.gateway._http._server.server_state.connections
    await until(lambda: bool(connections))
    return list(connections)


async def test_events_leave_at_once(open_door: Any, until: Any) -> None:
    async with open_door() as d:
        _, writer = await d.connect()
        (connection,) = await _connections(d, until)
        kernel = connection.transport.get_extra_info("socket")
        assert kernel.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def test_health_is_200_only_while_requests_are_served(open_door: Any) -> None:
    async with open_door() as d:
        assert (await d.raw("GET /health")).json == {"status": "serving"}
        listed = d.behind.directory.workers()
        d.behind.directory.set([])
        answer = await d.raw("GET /health")
        assert (answer.status, answer.json["status"]) == (503, "no workers that can pair")
        refused = await d.post(COMPLETIONS, prompt="x")
        assert (refused.status, refused.error["code"]) == (503, "worker_unavailable")
        d.behind.directory.set(listed)


async def test_stopping_lets_running_requests_end(open_door: Any, until: Any) -> None:
    async with open_door() as d:
        d.behind.decode.engine.stall_at = 3
        call = asyncio.create_task(d.post(COMPLETIONS, prompt="x", stream=True))
        await until(lambda: bool(d.behind.decode.engine.running))
        stop = asyncio.create_task(d.behind.gateway._http.stop(5))
        await asyncio.sleep(0.3)
        with pytest.raises(ConnectionRefusedError):
            await d.connect()
        d.behind.decode.engine.resume.set()
        *_, last, done = _events((await call).body)
        assert json.loads(last)["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        await stop


@pytest.mark.parametrize("stall_at", [0, 3])
async def test_stopping_tells_those_whom_it_cannot_wait_for(
    open_door: Any, until: Any, stall_at: int
) -> None:
    async with open_door() as d:
        prefill, decode = d.behind.prefill.engine, d.behind.decode.engine
        prefill.stall_at, decode.stall_at = (0, 0) if stall_at == 0 else (None, stall_at)
        call = asyncio.create_task(d.post(COMPLETIONS, prompt="x", stream=True))
        await until(lambda: bool(decode.running))
        await asyncio.sleep(0.05)
        await d.behind.gateway._http.stop(0.1)
        answer = await call
        if stall_at == 0:
            assert answer.status == 503
            error = answer.error
        else:
            assert answer.status == 200
            error = json.loads(_events(answer.body)[-1])["error"]
        assert error["message"] == "the gateway is stopping"
        await until(lambda: d.behind.is_idle)


async def test_a_port_that_is_taken_is_a_clear_error_and_the_gateway_does_not_start(
    open_door: Any, serving: Any
) -> None:
    async with open_door() as d:
        with pytest.raises(ConfigError, match=rf"gateway\.http_port: 127\.0\.0\.1:{d.port}"):
            async with serving(http_port=d.port):
                pass
