"""OpenAI's request bodies as the `GenerateRequest` of the gRPC door.

`app.py` gives the parsed body; what comes out goes to `request_flow`, which checks values (ranges,
lengths, vocabulary) for both doors alike. Here only what is OpenAI's own is decided:

- a field that we know and do not serve is accepted with the value that changes nothing
  (`tools: []`, `suffix: ""`), and refused with any other: silence would be a wrong answer;
- a field that cannot change the output (`user`, `store`, `metadata`, ...), or that nobody knows,
  is ignored, so that newer clients keep working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from control_plane.openai.fields import MAX_UINT32, Fields, checked_text
from control_plane.openai.grammars import set_grammar
from control_plane.param_checks import MAX_TOP_LOGPROBS
from control_plane.validation import MAX_CHOICES
from hocket.errors import InvalidRequest
from hocket.rpc import generation_pb2 as generation

# What we know and do not serve: the values that change nothing. Null never does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for: `message` for the flow, the rest for the shape of the reply.

    `wants_usage`: a chunk with the usage ends the stream. `wants_echo`: the text begins with the
    prompt. `wants_prompt_logprobs`: of themselves, not as part of an echo. `params`: what errors
    must call a field where that differs from request to request.
    """

    message: generation.GenerateRequest
    is_stream: bool
    params: Mapping[str, str]
    wants_usage: bool = False
    wants_echo: bool = False
    wants_prompt_logprobs: bool = False


def completion_request(fields: Fields) -> Asked:
    """The body of POST /v1/completions. Raises InvalidRequest."""
    asked = _asked(fields, "prompt")
    message = asked.message
    _set_prompt(message, fields)
    _set_max_tokens(message, fields, "max_tokens")
    logprobs = fields.integer("logprobs", high=MAX_TOP_LOGPROBS)
    if logprobs is not None:
        message.top_logprobs = logprobs
    wants_echo = fields.boolean("echo")
    if wants_echo and logprobs is not None and not asked.wants_prompt_logprobs:
        message.prompt_logprobs = logprobs
    best_of = fields.integer("best_of")
    if best_of not in (None, 1, message.n):
        raise fields.wrong("best_of", "1, n or absent", "Choosing among more is not served.")
    return replace(asked, wants_echo=wants_echo)


def chat_request(fields: Fields) -> Asked:
    """The body of POST /v1/chat/completions. Raises InvalidRequest."""
    asked = _asked(fields, "messages")
    message = asked.message
    if fields.boolean("echo"):
        raise fields.wrong("echo", "false or absent", "Anything else is not served.")
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
    return asked


def _asked(fields: Fields, prompt_param: str) -> Asked:
    """What both kinds of request say in the same words."""
    _refuse_unserved(fields)
    is_stream = fields.boolean("stream")
    options = fields.table("stream_options")
    if options is not None and not is_stream:
        raise fields.wrong("stream_options", "absent", "It goes with stream = true only.")
    message = generation.GenerateRequest(model=fields.text("model") or "")
    message.n = fields.integer("n", low=1, high=MAX_CHOICES) or 1
    _set_sampling(message.sampling, fields)
    _set_stopping(message.stopping, fields)
    max_drafts = fields.integer("max_draft_tokens")
    if max_drafts is not None:
        message.max_draft_tokens = max_drafts
    typical = fields.table("typical_acceptance")
    if typical is not None:
        message.typical_acceptance.SetInParent()
        _set_numbers(message.typical_acceptance, typical, "epsilon", "delta")
    prompt_logprobs = fields.integer("prompt_logprobs", high=MAX_TOP_LOGPROBS)
    if prompt_logprobs is not None:
        if is_stream:
            raise fields.wrong("prompt_logprobs", "absent in a stream")
        message.prompt_logprobs = prompt_logprobs
    return Asked(
        message,
        is_stream,
        params={"prompt": prompt_param, "grammar": set_grammar(message, fields)},
        wants_usage=options is not None and options.boolean("include_usage"),
        wants_prompt_logprobs=prompt_logprobs is not None,
    )


def _set_sampling(sampling: generation.Sampling, fields: Fields) -> None:
    _set_numbers(
        sampling, fields, "temperature", "top_p", "min_p", "repetition_penalty",
        "frequency_penalty", "presence_penalty",
    )  # fmt: skip
    top_k = fields.integer("top_k", low=-1)
    if top_k is not None:
        sampling.top_k = max(top_k, 0)  # -1 is another way to say: all
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    if seed is not None:
        sampling.seed = seed % 2**64
    bias = fields.table("logit_bias") or Fields({})
    for name in bias.names():
        value = bias.number(name)
        is_token_id = name.isdecimal() and len(name) <= 10 and int(name) <= MAX_UINT32
        # Not "03" either: beside "3" it would be the same token twice.
        if not is_token_id or str(int(name)) != name or value is None:
            raise InvalidRequest("logit_bias", name, "token ids with a number each")
        sampling.logit_bias[int(name)] = value


def _set_numbers(message: Any, fields: Fields, *names: str) -> None:
    """Fields that the message has under the same names, where they are there."""
    for name in names:
        number = fields.number(name)
        if number is not None:
            setattr(message, name, number)


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
    stopping.min_tokens = fields.integer("min_tokens") or 0
    stopping.include_stop = fields.boolean("include_stop_str_in_output")


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
