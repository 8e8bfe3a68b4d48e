"""The flow's messages in OpenAI's shapes: chunks of a stream, or one whole reply.

A chunk differs from the last one only in text and logprobs, so all that repeats is written once
per request and a token costs one string put together. `ChatLogprobs` and `CompletionLogprobs`
are the two shapes that logprobs have. `app.py` sends what comes out.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from control_plane.openai.sse import DONE, event
from control_plane.openai.token_texts import TokenTexts, shown
from hocket.rpc import generation_pb2 as generation

_REASONS = {
    generation.FINISH_REASON_STOP: "stop",
    generation.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Form:
    """What differs between the two kinds of reply, as JSON text where a stream needs it."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    before_text: str
    after_text: str
    no_text: str
    opening: str | None


CHAT = Form(
    id_prefix="chatcmpl-",
    whole_object="chat.completion",
    chunk_object="chat.completion.chunk",
    before_text='"delta":{"content":',
    after_text="}",
    no_text='"delta":{}',
    opening='"delta":{"role":"assistant","content":"","refusal":null}',
)
COMPLETION = Form(
    id_prefix="cmpl-",
    whole_object="text_completion",
    chunk_object="text_completion",
    before_text='"text":',
    after_text="",
    no_text='"text":""',
    opening=None,
)


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of a reply repeats. `created`: seconds since 1970."""

    request_id: str
    created: int
    model: str
    system_fingerprint: str | None

    def values(self, form: Form, kind: str) -> dict[str, Any]:
        """As the first fields of a reply of `kind`."""
        return {
            "id": form.id_prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class LogprobsShape(Protocol):
    """Turns logprobs into one of OpenAI's shapes, in the order in which they come."""

    def take(self, entries: Iterable[generation.TokenLogprobs]) -> dict[str, Any]:
        """The entries after those of the calls before."""
        ...


class ChatLogprobs:
    """{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def take(self, entries: Iterable[generation.TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(e) | {"top_logprobs": [self._entry(t) for t in e.top]} for e in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, entry: generation.TokenLogprobs | generation.TopLogprob) -> dict[str, Any]:
        token = self._texts.token_bytes(entry.token_id)
        return {"token": shown(token), "logprob": _finite(entry.logprob), "bytes": list(token)}


class CompletionLogprobs:
    """{"tokens", "token_logprobs", "top_logprobs", "text_offset"}, four lists of equal length.

    An offset counts the characters of the output before those that the token begins.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Iterable[generation.TokenLogprobs]) -> dict[str, Any]:
        shape: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for entry in entries:
            token = self._texts.token_bytes(entry.token_id)
            shape["tokens"].append(shown(token))
            shape["token_logprobs"].append(_finite(entry.logprob))
            top = ((self._texts.token_bytes(t.token_id), t.logprob) for t in entry.top)
            shape["top_logprobs"].append({shown(token): _finite(p) for token, p in top})
            shape["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(token))
        return shape


class Chunks:
    """One reply as server-sent events. `opening`, any number of `piece`, `closing`."""

    def __init__(
        self, form: Form, head: Head, logprobs: LogprobsShape | None, *, wants_usage: bool
    ) -> None:
        """`logprobs` None: the client asked for none."""
        self._form = form
        self._logprobs = logprobs
        self._wants_usage = wants_usage
        values = json.dumps(head.values(form, form.chunk_object), separators=(",", ":"))
        self._head = values[:-1] + ',"choices":['
        self._before = f'{self._head}{{"index":0,{form.before_text}'
        usage = ',"usage":null' if wants_usage else ""
        self._end = f'"finish_reason":null}}]{usage}}}'
        self._after = f'{form.after_text},"logprobs":null,{self._end}'

    def opening(self) -> bytes:
        """What precedes the first piece; empty for a plain completion."""
        opening = self._form.opening
        if opening is None:
            return b""
        return event(f'{self._head}{{"index":0,{opening},"logprobs":null,{self._end}')

    def piece(self, response: generation.GenerateResponse) -> bytes:
        """New text; empty when there is none yet, which is when a character is not whole."""
        if self._logprobs is None or not response.logprobs:
            if not response.text:
                return b""
            return event(self._before + encode_basestring(response.text) + self._after)
        shape = _json(self._logprobs.take(response.logprobs))
        text = encode_basestring(response.text) + self._form.after_text
        return event(f'{self._before}{text},"logprobs":{shape},{self._end}')

    def closing(self, finish: generation.Finish) -> bytes:
        """The reason, the usage if it was asked for, and the end."""
        no_text, reason = self._form.no_text, _json(_REASONS[finish.reason])
        choice = f'{{"index":0,{no_text},"logprobs":null,"finish_reason":{reason}}}'
        extra = f'"hocket":{_json(own_fields(finish))}'
        if not self._wants_usage:
            return event(f"{self._head}{choice}],{extra}}}") + DONE
        last = event(f'{self._head}{choice}],"usage":null,{extra}}}')
        return last + event(f'{self._head}],"usage":{_json(usage(finish.usage))}}}') + DONE


@dataclass(slots=True)
class Whole:
    """One reply as one JSON object: `add` every message, then `body`."""

    form: Form
    head: Head
    logprobs: LogprobsShape | None
    _texts: list[str] = field(default_factory=list[str])
    _entries: list[generation.TokenLogprobs] = field(default_factory=list[generation.TokenLogprobs])
    _finish: generation.Finish | None = None

    def add(self, response: generation.GenerateResponse) -> None:
        """Takes the next message of the flow."""
        self._texts.append(response.text)
        self._entries.extend(response.logprobs)
        if response.HasField("finish"):
            self._finish = response.finish

    def body(self) -> bytes:
        """The reply, once the last message has come."""
        assert self._finish is not None
        text = "".join(self._texts)
        choice: dict[str, Any] = {"index": 0}
        if self.form is CHAT:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = None if self.logprobs is None else self.logprobs.take(self._entries)
        choice["finish_reason"] = _REASONS[self._finish.reason]
        values = self.head.values(self.form, self.form.whole_object) | {
            "choices": [choice],
            "usage": usage(self._finish.usage),
            "hocket": own_fields(self._finish),
        }
        return _json(values).encode()


def usage(counts: generation.Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.output_tokens,
        "total_tokens": counts.prompt_tokens + counts.output_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
    }


def own_fields(finish: generation.Finish) -> dict[str, Any]:
    """What OpenAI has no word for: the seed that gives these tokens again, and the drafting."""
    return {
        "seed": finish.seed,
        "drafted_tokens": finish.usage.drafted_tokens,
        "accepted_tokens": finish.usage.accepted_tokens,
        "verify_steps": finish.usage.verify_steps,
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token that cannot be gets what other servers write."""
    return max(logprob, -9999.0)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
