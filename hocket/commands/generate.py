"""`hocket generate`: one request to a gateway, its text printed as it arrives.

`build_request` turns options into the public message, `ask` streams the answer and measures it,
`closing_line` says in one line how it went. The demo uses the same three; `ask_all` is for several
completions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from hocket.commands.doors import GENERATION, cause, check_address, explained
from hocket.errors import HocketError, InvalidRequest, WorkerUnavailable
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from hocket.rpc.status import is_from_grpc

_UTF8 = "valid UTF-8"


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request as the command line gives it; None leaves the choice to the server."""

    text: str
    is_chat: bool = False
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_draft_tokens: int | None = None
    n: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    json_schema: Path | None = None
    regex: str | None = None
    ebnf: Path | None = None
    choices: tuple[str, ...] = ()
    typical_epsilon: float | None = None
    typical_delta: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole completion and the client's own clock readings: seconds from sending the request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: generation.Finish
    first_token_s: float
    last_token_s: float

    @property
    def inter_token_s(self) -> float:
        """Mean time between tokens after the first; 0.0 for a single token."""
        later = len(self.token_ids) - 1
        return (self.last_token_s - self.first_token_s) / later if later > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time, the first token's wait included."""
        return len(self.token_ids) / self.last_token_s if self.last_token_s > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens per decode step; 0.0 without one."""
        usage = self.finish.usage
        return usage.emitted_tokens / usage.verify_steps if usage.verify_steps else 0.0


def build_request(options: GenerateOptions) -> generation.GenerateRequest:
    """The message for these options.

    Raises:
        InvalidRequest: a value that the message's own type cannot hold: a negative count, bytes
            on the command line that are no text.
    """
    request = generation.GenerateRequest()
    holder, name = (
        (request.chat.messages.add(role="user"), "content")
        if options.is_chat
        else (request, "text")
    )
    settings: tuple[tuple[Any, str, Any, str], ...] = (
        (holder, name, options.text, _UTF8),
        (request, "model", options.model, _UTF8),
        (request.sampling, "temperature", options.temperature, "from 0 to 100"),
        (request.sampling, "top_p", options.top_p, "above 0, at most 1"),
        (request.sampling, "top_k", options.top_k, "from 0 to 4294967295"),
        (request.sampling, "min_p", options.min_p, "from 0 to 1"),
        (request.sampling, "seed", options.seed, "from 0 to 18446744073709551615"),
        (request.stopping, "max_tokens", options.max_tokens, "from 1 to the context's limit"),
        (request, "max_draft_tokens", options.max_draft_tokens, "from 0 to 4294967295"),
        (request, "n", options.n, "from 1 to 64"),
        (request.stopping, "min_tokens", options.min_tokens, "from 0 to 4294967295"),
        (request.sampling, "repetition_penalty", options.repetition_penalty, "above 0, at most 2"),
        (request.sampling, "frequency_penalty", options.frequency_penalty, "from -2 to 2"),
        (request.sampling, "presence_penalty", options.presence_penalty, "from -2 to 2"),
        (request.grammar, "json_schema", _content("json_schema", options.json_schema), _UTF8),
        (request.grammar, "regex", options.regex, _UTF8),
        (request.grammar, "ebnf", _content("ebnf", options.ebnf), _UTF8),
        (request.typical_acceptance, "epsilon", options.typical_epsilon, "above 0, at most 1"),
        (request.typical_acceptance, "delta", options.typical_delta, "above 0, at most 1"),
    )
    grammars = ("json_schema", "regex", "ebnf", "choices")
    first, *others = [n for n in grammars if getattr(options, n) not in (None, ())] or [""]
    if others:
        raise InvalidRequest(others[0], str(getattr(options, others[0])), f"absent beside {first}")
    for message, name, value, limit in settings:
        if value is not None:
            try:
                setattr(message, name, value)
            except (ValueError, TypeError) as error:
                raise InvalidRequest(name, value, limit) from error
    lists = ((request.stopping.stop, "stop", options.stop),)
    if options.choices:
        lists += ((request.grammar.choice.strings, "choice", options.choices),)
    for strings, name, values in lists:
        try:
            strings.extend(values)
        except ValueError as error:
            raise InvalidRequest(name, values, _UTF8) from error
    return request


async def ask(
    client: GenerationClient, request: generation.GenerateRequest, write: Callable[[str], None]
) -> Answer:
    """Sends a request for one completion; `write` gets each piece of text. Raises `HocketError`."""
    (answer,) = await ask_all(client, request, lambda _, text: write(text))
    return answer


@dataclass(slots=True)
class _Choice:
    """What has come of one completion."""

    token_ids: list[int] = field(default_factory=list[int])
    pieces: list[str] = field(default_factory=list[str])
    first_s: float = 0.0
    last_s: float = 0.0


async def ask_all(
    client: GenerationClient,
    request: generation.GenerateRequest,
    write: Callable[[int, str], None],
) -> list[Answer]:
    """Sends the request; `write` gets the number of a completion and its next piece of text.
    Raises `HocketError`."""
    started = time.monotonic()
    choices = [_Choice() for _ in range(max(1, request.n))]
    answers: dict[int, Answer] = {}
    async for response in _stream(client, request):
        choice = choices[response.choice]
        if response.token_ids:
            choice.last_s = time.monotonic() - started
            choice.first_s = choice.first_s or choice.last_s
        choice.token_ids.extend(response.token_ids)
        if response.text:
            choice.pieces.append(response.text)
            write(response.choice, response.text)
        if response.HasField("finish"):
            answers[response.choice] = Answer(
                request_id=response.request_id,
                text="".join(choice.pieces),
                token_ids=tuple(choice.token_ids),
                finish=response.finish,
                first_token_s=choice.first_s,
                last_token_s=choice.last_s,
            )
        if len(answers) == len(choices):
            return [answers[index] for index in range(len(choices))]
    raise WorkerUnavailable(
        "the stream ended without a finish; send the request again.",
        output_tokens=sum(len(choice.token_ids) for choice in choices),
    )


async def _stream(
    client: GenerationClient, request: generation.GenerateRequest
) -> AsyncGenerator[generation.GenerateResponse]:
    """The client's stream; that it broke after something had come is said as such."""
    has_begun = False
    try:
        async for response in client.generate(request):
            has_begun = True
            yield response
    except WorkerUnavailable as error:
        if not has_begun or not is_from_grpc(error):
            raise
        raise WorkerUnavailable(
            f"the gateway stopped before the answer was complete ({cause(error)}).",
        ) from None


def closing_line(answer: Answer) -> str:
    """How it went, in one line."""
    usage, hand_off = answer.finish.usage, answer.finish.hand_off
    parts = [
        f"{usage.output_tokens} tokens, {_reason(answer.finish)}",
        f"TTFT {answer.first_token_s * 1e3:.0f} ms",
        f"inter-token {answer.inter_token_s * 1e3:.1f} ms",
        f"{answer.tokens_per_s:.1f} tokens/s",
        f"acceptance length {answer.acceptance_length:.2f}",
    ]
    if hand_off.bytes:
        moved = f"{hand_off.bytes / 1024:.0f} KiB KV moved"
        parts.append(f"{moved} over {hand_off.transport or 'an unknown transport'}")
    else:
        parts.append("no KV moved")
    return " | ".join([*parts, f"seed {answer.finish.seed}"])


def as_dict(answer: Answer) -> dict[str, Any]:
    """The answer for `--json`. 64-bit numbers are numbers, not strings as in protobuf's JSON."""
    finish = MessageToDict(
        answer.finish, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    finish["reason"] = _reason(answer.finish)
    finish["acceptance"] = generation.Acceptance.Name(answer.finish.acceptance).lower()
    finish["acceptance"] = finish["acceptance"].removeprefix("acceptance_")
    finish["seed"] = answer.finish.seed
    if answer.finish.HasField("hand_off"):
        finish["hand_off"]["bytes"] = answer.finish.hand_off.bytes
    return {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        **finish,
        "measured": {
            "first_token_s": round(answer.first_token_s, 6),
            "inter_token_s": round(answer.inter_token_s, 6),
            "tokens_per_s": round(answer.tokens_per_s, 3),
            "acceptance_length": round(answer.acceptance_length, 4),
        },
    }


def run(options: GenerateOptions, address: str, *, as_json: bool) -> int:
    """The command; returns its exit code."""
    is_single = (options.n or 1) == 1
    written: list[str] = []

    def write(_: int, text: str) -> None:
        # Several completions come side by side: they are shown when they are there.
        if is_single and not as_json:
            written.append(text)
            write_now(text)

    try:
        answers = asyncio.run(_ask_once(options, address, write))
    except (HocketError, KeyboardInterrupt) as error:
        if written:
            # What follows stands on a line of its own.
            write_now("\n")
        if isinstance(error, KeyboardInterrupt):
            return 130
        _tell(explained(error, address, GENERATION), as_json)
        return 1
    told = [as_dict(answer) for answer in answers]
    if as_json:
        print(json.dumps(told[0] if is_single else {"choices": told}, ensure_ascii=False))
    elif is_single:
        print(f"\n\n{closing_line(answers[0])}")
    else:
        for index, answer in enumerate(answers):
            print(f"[{index}]\n{answer.text}\n\n{closing_line(answer)}\n")
    if note := acceptance_note(answers[0].finish):
        print(note, file=sys.stderr)
    return 0


def acceptance_note(finish: generation.Finish) -> str:
    """Says it when drafts could change the output; "" when they could not."""
    match finish.acceptance:
        case generation.ACCEPTANCE_TYPICAL:
            return "note: drafts could change this output, as typical acceptance lets them."
        case generation.ACCEPTANCE_SYNTHETIC:
            return "note: this output means nothing: the server keeps drafts at a synthetic rate."
        case _:
            return ""


async def _ask_once(
    options: GenerateOptions, address: str, write: Callable[[int, str], None]
) -> list[Answer]:
    request = build_request(options)
    check_address(address)
    client = GenerationClient(address)
    try:
        return await ask_all(client, request, write)
    finally:
        await client.close()


def _content(name: str, path: Path | None) -> str | None:
    """Of a file that an option names. Raises InvalidRequest when it cannot be read as text."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(name, str(path), f"a file of UTF-8 text ({error})") from error


def write_now(text: str) -> None:
    """To the terminal, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(error: HocketError, as_json: bool) -> None:
    print(f"error: {error}", file=sys.stderr)
    if as_json:
        told = {"reason": error.reason, "code": error.code, "message": str(error)}
        print(json.dumps({"error": {**told, **error.metadata}}, ensure_ascii=False))


def _reason(finish: generation.Finish) -> str:
    """ "stop" or "length"."""
    return generation.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()
