"""Prompts to token ids: the model's own tokenizer and chat template, read from its folder.

Second step of `request_flow`. Text gets the special tokens that `tokenizer.json` itself asks for;
a chat is put into words by the sandboxed template, which writes its own special tokens. Both as
`transformers` does. Long prompts are tokenised off the event loop. The way back, tokens to text,
is `control_plane.detokenizer`.
"""

# Jinja's filters and globals are untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from control_plane.validation import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    prompt_too_long,
)
from hocket.errors import CheckpointError, InvalidRequest

# Below this a prompt is tokenised in less time than a thread takes to be woken.
LONG_PROMPT_CHARACTERS = 4096

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ModelTokenizer:
    """The tokenizer of the checkpoint in `folder`. Its methods may be called from any thread."""

    def __init__(self, folder: str | Path) -> None:
        """Raises CheckpointError when the folder has no tokenizer that can be read."""
        self._folder = Path(folder)
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{self._folder} has no tokenizer.json", path=path)
        try:
            self.backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more exact
            raise CheckpointError(f"{path} cannot be read: {error}", path=path) from error
        config = self._json("tokenizer_config.json")
        self._special_tokens = {
            name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)
        }
        self._template = self._chat_template(config)
        model_config = self._json("config.json")
        self.vocabulary_size = int(
            model_config.get("vocab_size") or self.backend.get_vocab_size(with_added_tokens=True)
        )
        self.end_token_ids = self._end_token_ids(model_config)
        self._longest_token = self._characters_per_token()

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how to put a chat into words."""
        return self._template is not None

    async def tokenize(self, prompt: Prompt, most_tokens: int | None = None) -> tuple[int, ...]:
        """The prompt's token ids, at least one. Raises InvalidRequest.

        A text that surely has more than `most_tokens` is refused without being tokenised: megabytes
        take seconds. One that may fit is not cut short here.
        """
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                field, add_special_tokens = "text", True
            case ChatPrompt(messages):
                text = self.render_chat(messages)
                field, add_special_tokens = "chat", False
        if most_tokens is not None and len(text) > most_tokens * self._longest_token:
            raise prompt_too_long(f"{len(text)} characters", most_tokens)
        if len(text) < LONG_PROMPT_CHARACTERS:
            token_ids = self._encode(text, add_special_tokens)
        else:
            token_ids = await asyncio.to_thread(self._encode, text, add_special_tokens)
        if not token_ids:
            raise InvalidRequest(field, text, "a prompt of at least one token")
        return token_ids

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The text that a chat becomes, ready for the assistant's turn.

        Raises InvalidRequest when there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "chat", f"{len(messages)} messages", "absent: this model has no chat template",
                "Send text or token_ids.",
            )  # fmt: skip
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                "chat.messages", [m.role for m in messages],
                f"what the model's chat template takes ({error})",
            ) from error  # fmt: skip

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _characters_per_token(self) -> float:
        """The most characters of a text that one token can stand for. Byte-level tokens are written
        with a character per byte, so their length is enough; a normalizer may drop characters."""
        if self.backend.normalizer is not None:
            return math.inf
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def _chat_template(self, config: Mapping[str, Any]) -> jinja2.Template | None:
        path = self._folder / "chat_template.jinja"
        source: Any = path.read_text() if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = cast("list[dict[str, str]]", source)
            source = next((t["template"] for t in named if t["name"] == "default"), None)
        if source is None:
            return None
        try:
            return _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template of {self._folder}: {error}") from error

    def _end_token_ids(self, model_config: Mapping[str, Any]) -> frozenset[int]:
        """What ends an output: generation_config.json, else config.json, else the tokenizer."""
        for config in (self._json("generation_config.json"), model_config):
            ids: int | list[int] | None = config.get("eos_token_id")
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        token_id = self.backend.token_to_id(self._special_tokens.get("eos_token", ""))
        return frozenset() if token_id is None else frozenset([token_id])

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty when it is not there."""
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}", path=path) from error
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} is not a JSON object", path=path)
        return cast("dict[str, Any]", found)


def _environment() -> jinja2.Environment:
    """Jinja as chat templates are written for: the settings, filters and names of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _content(token: str | Mapping[str, Any]) -> str:
    """A special token, which configurations write as a string or as an object."""
    return token if isinstance(token, str) else str(token["content"])
