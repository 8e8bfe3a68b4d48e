"""OpenAI's request bodies as the `GenerateRequest` of the gRPC door.

`app.py` gives the parsed body; what comes out goes to `request_flow`, which checks values (ranges,
lengths, vocabulary) for both doors alike. Here only what is OpenAI's own is decided:

- a field that we know and do not serve is accepted with the value that changes nothing (`n: 1`,
  `logit_bias: {}`), and refused with any other: silence would be a wrong answer;
- a field that cannot change the output (`user`, `store`, `metadata`, ...), or that nobody knows,
  is ignored, so that newer clients keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from control_plane.openai.fields import MAX_UINT32, Fields, checked_text
from control_plane.validation import MAX_TOP_LOGPROBS
from hocket.errors import InvalidRequest
from hocket.rpc import generation_pb2 as generation

# What we know and do not serve: the values that change nothing. Null never does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for: `message` for the flow, the rest for the shape of the reply.

    `wants_usage`: a chunk with the usage ends the stream.
    """

    message: generation.GenerateRequest
    is_stream: bool
    wants_usage: bool


def completion_request(fields: Fields) -> Asked:
    """The body of POST /v1/completions. Raises InvalidRequest."""
    message = _common(fields)
    _set_prompt(message, fields)
    _set_max_tokens(message, fields, "max_tokens")
    logprobs = fields.integer("logprobs", high=MAX_TOP_LOGPROBS)
    if logprobs is not None:
        message.top_logprobs = logprobs
    return _asked(message, fields)


def chat_request(fields: Fields) -> Asked:
    """The body of POST /v1/chat/completions. Raises InvalidRequest."""
    message = _common(fields)
    messages = fields.items("messages")
    if not messages:
        raise fields.wrong("messages", "a list of at least one message")
    for index, item in enumerate(messages):
        role, content = _chat_message(item, f"messages[{index}]")
        message.chat.messages.add(role=role, content=content)
    _set_max_tokens(message, fields, "max_completion_tokens", "max_tokens")
    num_top = fields.integer("top_logprobs", high=MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        message.top_logprobs = num_top or 0
    elif num_top:
        raise fields.wrong("top_logprobs", "0 or absent", "Set logprobs to true with it.")
    return _asked(message, fields)


def _common(fields: Fields) -> generation.GenerateRequest:
    """What both kinds of request say in the same words."""
    _refuse_unserved(fields)
    message = generation.GenerateRequest(model=fields.text("model") or "")
    numbers: tuple[tuple[str, Callable[[float], None]], ...] = (
        ("temperature", lambda value: setattr(message.sampling, "temperature", value)),
        ("top_p", lambda value: setattr(message.sampling, "top_p", value)),
        ("min_p", lambda value: setattr(message.sampling, "min_p", value)),
    )
    for name, assign in numbers:
        number = fields.number(name)
        if number is not None:
            assign(number)
    top_k = fields.integer("top_k", low=-1)
    if top_k is not None:
        message.sampling.top_k = max(top_k, 0)  # -1 is another way to say: all
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    if seed is not None:
        message.sampling.seed = seed % 2**64
    _set_stopping(message.stopping, fields)
    max_drafts = fields.integer("max_draft_tokens")
    if max_drafts is not None:
        message.max_draft_tokens = max_drafts
    return message


def _refuse_unserved(fields: Fields) -> None:
    for name, neutral in NEUTRAL.items():
        value = fields.value(name)
        if value is None or value in neutral:
            continue
        allowed = " or ".join([*(repr(v) for v in neutral), "absent"])
        raise fields.wrong(name, allowed, "Anything else is not served.")


def _set_stopping(stopping: generation.Stopping, fields: Fields) -> None:
    stop = fields.value("stop")
    if isinstance(stop, str):
        stopping.stop.append(checked_text(stop, "stop"))
    else:
        for index, item in enumerate(fields.items("stop") or []):
            stopping.stop.append(checked_text(item, f"stop[{index}]"))
    token_ids = fields.items("stop_token_ids")
    if token_ids:
        stopping.stop_token_ids.extend(_token_ids(token_ids, "stop_token_ids"))
    stopping.ignore_eos = fields.boolean("ignore_eos")


def _set_max_tokens(message: generation.GenerateRequest, fields: Fields, *names: str) -> None:
    """The first of `names` that is there counts."""
    for name in names:
        max_tokens = fields.integer(name, low=1)
        if max_tokens is not None:
            message.stopping.max_tokens = max_tokens
            return


def _set_prompt(message: generation.GenerateRequest, fields: Fields) -> None:
    """A string, a list of token ids, or a list of one of those."""
    prompt: Any = fields.value("prompt")
    several = _listed(prompt)
    if len(several) > 1 and isinstance(several[0], str | list):
        raise InvalidRequest(
            "prompt", f"{len(several)} prompts", "one prompt", "Send one request for each."
        )
    if len(several) == 1 and not isinstance(several[0], int):
        prompt = several[0]
    values = _listed(prompt)
    if isinstance(prompt, str) and prompt:
        message.text = checked_text(prompt, "prompt")
    elif values:
        message.token_ids.ids.extend(_token_ids(values, "prompt"))
    else:
        raise fields.wrong("prompt", "a string or a list of token ids, and not empty")


def _listed(value: object) -> list[Any]:
    """A list as it is, anything else as no list at all."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def _token_ids(values: list[Any], name: str) -> list[int]:
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= MAX_UINT32:
            raise InvalidRequest(f"{name}[{index}]", value, "a token id")
    return cast("list[int]", values)


def _chat_message(item: object, name: str) -> tuple[str, str]:
    """Role and text of a message; its text parts are put together as they are."""
    if not isinstance(item, dict):
        raise InvalidRequest(name, item, "an object with role and content")
    fields = Fields(cast("dict[str, Any]", item), f"{name}.")
    for unserved in ("tool_calls", "function_call", "audio"):
        if fields.value(unserved):
            raise fields.wrong(unserved, "absent", "Tools and audio are not served.")
    role = fields.text("role") or ""
    content = fields.value("content")
    if isinstance(content, list):
        parts = cast("list[Any]", content)
        text = "".join(_text_part(p, f"{name}.content[{i}]") for i, p in enumerate(parts))
    else:
        text = checked_text(content, f"{name}.content")
    return ("system" if role == "developer" else role), text


def _text_part(part: object, name: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(name, part, "an object")
    fields = Fields(cast("dict[str, Any]", part), f"{name}.")
    if fields.value("type") != "text":
        raise fields.wrong("type", "'text'", "Only text is served.")
    return checked_text(fields.value("text"), f"{name}.text")


def _asked(message: generation.GenerateRequest, fields: Fields) -> Asked:
    is_stream = fields.boolean("stream")
    options = fields.table("stream_options")
    if options is not None and not is_stream:
        raise fields.wrong("stream_options", "absent", "It goes with stream = true only.")
    wants_usage = options is not None and options.boolean("include_usage")
    return Asked(message, is_stream, wants_usage)
