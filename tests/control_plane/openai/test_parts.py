"""What the HTTP door is made of, piece by piece, where a socket would only blur it."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from control_plane.openai.door import ClientLeft, read_body
from control_plane.openai.errors import BodyTooSlow, error_reply
from control_plane.openai.logprobs import ChatLogprobs, CompletionLogprobs
from control_plane.openai.replies import CHAT, Chunks, Head
from control_plane.openai.token_texts import TokenTexts, shown
from hocket.errors import (
    CheckpointError,
    DeadlineExceeded,
    FingerprintMismatch,
    HandOffFailed,
    HocketError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    WorkerUnavailable,
)
from hocket.rpc import generation_pb2 as generation


def test_bytes_of_byte_level_tokens_put_together_are_the_text(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    text = "größer → 世界 👩‍👩‍👧\n\tok\x00"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(texts.token_bytes(i) for i in ids).decode() == text
    assert texts.token_bytes(1) == b"</s>"
    assert texts.token_bytes(511) == b""


def test_bytes_of_tokens_with_spaces_as_low_lines_and_lone_bytes() -> None:
    vocabulary = {"<unk>": 0, "\u2581the": 1, "<0xE4>": 2, "x": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    texts = TokenTexts(tokenizer)
    found = [texts.token_bytes(i) for i in (1, 2, 3, 4)]
    assert found == [b" the", b"\xe4", b"x", b"<end>"]
    assert [shown(token) for token in found] == [" the", "bytes:\\xe4", "x", "<end>"]


ERRORS: list[tuple[HocketError, int, str, bool]] = [
    (InvalidRequest("sampling.top_p", 2, "at most 1"), 400, "invalid_value", False),
    (ModelNotFound("no"), 404, "model_not_found", False),
    (Overloaded("full"), 429, "rate_limit_exceeded", True),
    (InternalError("bug"), 500, "internal", False),
    (FingerprintMismatch("differ"), 500, "fingerprint_mismatch", False),
    (CheckpointError("torn"), 500, "checkpoint", False),
    (WorkerUnavailable("gone"), 503, "worker_unavailable", True),
    (HandOffFailed("cut"), 503, "hand_off_failed", True),
    (DeadlineExceeded("late"), 504, "deadline_exceeded", False),
]


@pytest.mark.parametrize(("error", "status", "code", "is_retryable"), ERRORS)
def test_every_error_has_its_status_and_says_whether_to_retry(
    error: HocketError, status: int, code: str, is_retryable: bool
) -> None:
    reply = error_reply(error)
    told = json.loads(reply.body)["error"]
    assert list(told) == ["message", "type", "param", "code"]
    assert (reply.status, told["code"]) == (status, code)
    headers = dict(reply.headers)
    assert headers["x-should-retry"] == ("true" if is_retryable else "false")
    assert ("retry-after" in headers) == is_retryable


def test_impossible_tokens_are_valid_json(tokenizer: Any) -> None:
    entry = generation.TokenLogprobs(token_id=65, logprob=-math.inf)
    entry.top.add(token_id=66, logprob=-math.inf)
    texts = TokenTexts(tokenizer)
    for shape in (ChatLogprobs(texts), CompletionLogprobs(texts)):
        assert "Infinity" not in json.dumps(shape.take([entry]))


def test_any_text_survives_a_chunk() -> None:
    head = Head("id", 1, 'a "model"', None)
    chunks = Chunks(CHAT, head, [None], wants_usage=False)
    chunks.take(generation.GenerateResponse())
    text = 'quote " backslash \\ line\nreturn\r null\x00 separator\u2028 sign 👧'
    event = chunks.take(generation.GenerateResponse(text=text)).decode()
    assert event.count("\n") == 2
    told = json.loads(event.removeprefix("data: "))
    assert told["choices"][0]["delta"]["content"] == text
    assert told["model"] == 'a "model"'
    assert chunks.take(generation.GenerateResponse(token_ids=[5])) == b""


def _receive(*messages: dict[str, Any]) -> Any:
    """An ASGI `receive` that gives these, then waits for ever."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0) if left else await asyncio.Event().wait() or {}

    return receive


async def test_a_body_that_does_not_come_is_given_up() -> None:
    part = {"type": "http.request", "body": b'{"pro', "more_body": True}
    with pytest.raises(BodyTooSlow, match=r"within 0\.05 s"):
        await read_body({"headers": []}, _receive(part), 1000, timeout_s=0.05)
    assert error_reply(BodyTooSlow("late")).status == 408
    with pytest.raises(ClientLeft):
        await read_body({"headers": []}, _receive(part, {"type": "http.disconnect"}), 1000)
