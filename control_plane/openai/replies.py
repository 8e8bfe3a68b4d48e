"""The flow's messages in OpenAI's shapes: chunks of a stream, or one whole reply.

A chunk differs from the last one of its choice only in text and logprobs, so all that repeats is
written once per request and a token costs one string put together. `logprobs.py` has the shapes of
logprobs. `door.py` sends what comes out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from control_plane.openai.logprobs import LogprobsShape, prompt_logprobs
from control_plane.openai.sse import DONE, event
from control_plane.openai.token_texts import TokenTexts
from hocket.rpc import generation_pb2 as generation

_REASONS = {
    generation.FINISH_REASON_STOP: "stop",
    generation.FINISH_REASON_LENGTH: "length",
}
_NO_USAGE = ',"usage":null'


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


class Chunks:
    """One reply as server-sent events."""

    def __init__(
        self,
        form: Form,
        head: Head,
        shapes: Sequence[LogprobsShape | None],
        *,
        wants_usage: bool,
        echo: Echo | None = None,
    ) -> None:
        """`shapes`: one for each choice, None where the client asked for no logprobs."""
        values = json.dumps(head.values(form, form.chunk_object), separators=(",", ":"))
        self._head = values[:-1] + ',"choices":['
        self._wants_usage = wants_usage
        self._no_usage = _NO_USAGE if wants_usage else ""
        after = f"}}]{self._no_usage}}}"
        self._choices = [
            _ChoiceChunks(form, index, shape, self._head, after)
            for index, shape in enumerate(shapes)
        ]
        self._totals = Totals(len(shapes))
        self._echo = echo
        self._prompt: list[generation.TokenLogprobs] = []
        self._held: list[generation.GenerateResponse] = []

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended, and with them the reply."""
        return self._totals.is_over

    def take(self, response: generation.GenerateResponse) -> bytes:
        """The events of this message; empty when there is no text yet, which is when a character
        is not whole, or the prompt, which comes first, is not. The last ones of all are the usage,
        if it was asked for, and the end."""
        if self._echo is None:
            return self._events(response)
        self._held.append(response)
        self._prompt.extend(response.prompt_logprobs)
        if len(self._prompt) < self._echo.num_logprobs:
            return b""
        text, entries = self._echo.text, self._echo.entries(self._prompt)
        told = [choice.text(text, entries) for choice in self._choices]
        held, self._held, self._echo = self._held, [], None
        return b"".join([*told, *map(self._events, held)])

    def _events(self, response: generation.GenerateResponse) -> bytes:
        choice = self._choices[response.choice]
        data = choice.opening()
        if response.text or response.logprobs:
            data += choice.text(response.text, response.logprobs)
        if not response.HasField("finish"):
            return data
        self._totals.add(response)
        own = f',"hocket":{_json(self._totals.own_fields())}' if self.is_over else ""
        data += choice.closing(response.finish, f"{self._no_usage}{own}")
        if not self.is_over:
            return data
        if self._wants_usage:
            data += event(f'{self._head}],"usage":{_json(self._totals.usage())}}}')
        return data + DONE


class _ChoiceChunks:
    """The chunks of one choice. `head` and `after` frame the choice's own object."""

    def __init__(
        self, form: Form, index: int, shape: LogprobsShape | None, head: str, after: str
    ) -> None:
        self._form = form
        self._shape = shape
        self._has_begun = False
        self._head = f'{head}{{"index":{index},'
        self._before = self._head + form.before_text
        self._end = f'"finish_reason":null{after}'
        self._after = f'{form.after_text},"logprobs":null,{self._end}'

    def opening(self) -> bytes:
        """What precedes the first piece, once; nothing for a plain completion."""
        opening, has_begun, self._has_begun = self._form.opening, self._has_begun, True
        if has_begun or opening is None:
            return b""
        return event(f'{self._head}{opening},"logprobs":null,{self._end}')

    def text(self, text: str, entries: Sequence[generation.TokenLogprobs]) -> bytes:
        """New text and its logprobs, if there are any and the client asked for some."""
        if self._shape is None or not entries:
            return event(self._before + encode_basestring(text) + self._after) if text else b""
        logprobs = _json(self._shape.take(entries))
        told = encode_basestring(text) + self._form.after_text
        return event(f'{self._before}{told},"logprobs":{logprobs},{self._end}')

    def closing(self, finish: generation.Finish, extra: str) -> bytes:
        """The reason. `extra`: more fields of the chunk, each after a comma."""
        reason = _json(_REASONS[finish.reason])
        choice = f'{self._form.no_text},"logprobs":null,"finish_reason":{reason}}}'
        return event(f"{self._head}{choice}]{extra}}}")


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, to be repeated before each output: its text, its first token, which has no
    logprob, and how many logprobs of the others are to come."""

    text: str
    first_token_id: int
    num_logprobs: int

    def entries(self, prompt: Sequence[generation.TokenLogprobs]) -> list[generation.TokenLogprobs]:
        """Of all its tokens."""
        first = generation.TokenLogprobs(token_id=self.first_token_id, logprob=math.nan)
        return [first, *prompt]


@dataclass(slots=True)
class _WholeChoice:
    """What has come of one choice."""

    texts: list[str] = field(default_factory=list[str])
    entries: list[generation.TokenLogprobs] = field(default_factory=list[generation.TokenLogprobs])
    reason: str = ""


class Whole:
    """One reply as one JSON object: `add` every message, then `body`."""

    def __init__(
        self,
        form: Form,
        head: Head,
        shapes: Sequence[LogprobsShape | None],
        *,
        echo: Echo | None = None,
        prompt_texts: TokenTexts | None = None,
    ) -> None:
        """`shapes`: one for each choice, None where the client asked for no logprobs.
        `prompt_texts`: set when it asked for the prompt's."""
        self._form = form
        self._head = head
        self._shapes = shapes
        self._echo = echo
        self._prompt_texts = prompt_texts
        self._prompt: list[generation.TokenLogprobs] = []
        self._choices = [_WholeChoice() for _ in shapes]
        self._totals = Totals(len(shapes))

    def add(self, response: generation.GenerateResponse) -> None:
        """Takes the next message of the flow."""
        choice = self._choices[response.choice]
        choice.texts.append(response.text)
        choice.entries.extend(response.logprobs)
        self._prompt.extend(response.prompt_logprobs)
        if response.HasField("finish"):
            choice.reason = _REASONS[response.finish.reason]
            self._totals.add(response)

    def body(self) -> bytes:
        """The reply, once the last message has come."""
        assert self._totals.is_over
        choices = [self._choice(index) for index in range(len(self._choices))]
        values = self._head.values(self._form, self._form.whole_object) | {
            "choices": choices,
            "usage": self._totals.usage(),
            "hocket": self._totals.own_fields(),
        }
        if self._prompt_texts is not None:
            told = {"prompt_logprobs": prompt_logprobs(self._prompt, self._prompt_texts)}
            # vLLM has them here for a chat, there for a completion.
            for holder in [values] if self._form is CHAT else choices:
                holder |= told
        return _json(values).encode()

    def _choice(self, index: int) -> dict[str, Any]:
        choice, shape, echo = self._choices[index], self._shapes[index], self._echo
        text, entries = "".join(choice.texts), choice.entries
        if echo is not None:
            text, entries = echo.text + text, [*echo.entries(self._prompt), *entries]
        told: dict[str, Any] = {"index": index}
        if self._form is CHAT:
            told["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            told["text"] = text
        told["logprobs"] = None if shape is None else shape.take(entries)
        told["finish_reason"] = choice.reason
        return told


class Totals:
    """What all choices consumed and made together, once each has ended."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._finishes: dict[int, generation.Finish] = {}

    @property
    def is_over(self) -> bool:
        return len(self._finishes) == self._num_choices

    def add(self, last: generation.GenerateResponse) -> None:
        """Takes the last message of a choice."""
        self._finishes[last.choice] = last.finish

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage. The prompt counts once, as the first choice read it."""
        first = self._finishes[0].usage
        output_tokens = sum(finish.usage.output_tokens for finish in self._finishes.values())
        return {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": first.prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": first.cached_tokens},
        }

    def own_fields(self) -> dict[str, Any]:
        """What OpenAI has no word for: the seed that gives these tokens again, the drafting, and
        what drafts could do to the output where they could."""
        usages = [finish.usage for finish in self._finishes.values()]
        told: dict[str, Any] = {
            "seed": self._finishes[0].seed,
            "drafted_tokens": sum(usage.drafted_tokens for usage in usages),
            "accepted_tokens": sum(usage.accepted_tokens for usage in usages),
            "verify_steps": sum(usage.verify_steps for usage in usages),
        }
        acceptance = max(finish.acceptance for finish in self._finishes.values())
        if acceptance != generation.ACCEPTANCE_EXACT:
            name = generation.Acceptance.Name(acceptance)
            told["acceptance"] = name.removeprefix("ACCEPTANCE_").lower()
        return told


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
