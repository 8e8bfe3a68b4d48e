"""xgrammar over one checkpoint's vocabulary: a `Grammar` in, a `CompiledGrammar` out.

`compiler.py` has one in the worker; the process of `trials.py` has another. Making it
imports xgrammar, and transformers with it, which takes seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from hocket.errors import CheckpointError, InvalidRequest
from hocket.execution.grammars.sources import ready
from hocket.execution.grammars.states import CompiledGrammar, refusal
from hocket.request_params import Grammar, GrammarKind

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar as CompiledHandle

MAX_WHITESPACE = 20
"""Between two words of JSON. Without an end to it, weak models write spaces for ever."""

# Role markers of chats are special tokens, even where a tokenizer does not call them so.
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>")
_CONTROL = re.compile(rb"[\0-\t\x0b\x0c\x0e-\x1f]")  # but for line ends
# "[12:00:00] /project/cpp/regex.cc:83: Check failed: (a == b) is false: " in front of messages
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (Warning: )?(Check failed: \(.*?\) is false: )?")


class LibraryArguments(NamedTuple):
    """Of `GrammarLibrary`."""

    folder: str
    vocab_size: int
    stop_token_ids: Sequence[int]
    num_threads: int


class GrammarLibrary:
    """Compiles grammars. Its methods may be called from several threads."""

    def __init__(
        self, folder: str, vocab_size: int, stop_token_ids: Sequence[int], num_threads: int
    ) -> None:
        """`vocab_size` is the model's, which may be larger than its tokenizer's. No stop tokens:
        then the tokenizer's own end token is it. `num_threads` of the compiler, per grammar.

        Raises CheckpointError.
        """
        import xgrammar

        tokenizer = _tokenizer(Path(folder))
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(stop_token_ids) or _end_token(Path(folder), tokenizer)
        found = xgrammar.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str())
        is_byte_level = found["vocab_type"] is xgrammar.VocabType.BYTE_LEVEL

        def tokenizer_info(spelled: list[str]) -> xgrammar.TokenizerInfo:
            return xgrammar.TokenizerInfo(
                spelled,
                found["vocab_type"],
                vocab_size=vocab_size,
                stop_token_ids=sorted(self._stop_token_ids),
                add_prefix_space=found["add_prefix_space"],
            )

        spelled = _spelled_vocabulary(tokenizer, vocab_size, is_byte_level)
        self._any_info = tokenizer_info(spelled)
        # xgrammar lets control characters into JSON strings whose length is limited.
        decoded = self._any_info.decoded_vocab
        self._json_info = tokenizer_info(
            ["" if _CONTROL.search(d) else s for s, d in zip(spelled, decoded, strict=True)]
        )
        self._any_compiler, self._json_compiler = (
            xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
            for info in (self._any_info, self._json_info)
        )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest with the reason. Untried grammars may take for ever, fill the
        memory or end the process: see `trials.py`."""
        text = ready(grammar)
        try:
            match grammar.kind:
                case GrammarKind.JSON_SCHEMA:
                    handle = self._json_compiler.compile_json_schema(
                        text, max_whitespace_cnt=MAX_WHITESPACE
                    )
                case GrammarKind.REGEX:
                    handle = self._any_compiler.compile_regex(text)
                case _:
                    handle = self._any_compiler.compile_grammar(text)
        except (RuntimeError, ValueError, TypeError) as error:  # whatever its C++ code throws
            raise not_compiled(grammar, str(error)) from None
        return self._compiled(grammar, handle)

    def load(self, grammar: Grammar, serialized: str) -> CompiledGrammar:
        """What another process has compiled for the same vocabulary (`handle.serialize_json`)."""
        from xgrammar import CompiledGrammar as Handle

        is_json = grammar.kind is GrammarKind.JSON_SCHEMA
        info = self._json_info if is_json else self._any_info
        return self._compiled(grammar, Handle.deserialize_json(serialized, info))

    def _compiled(self, grammar: Grammar, handle: CompiledHandle) -> CompiledGrammar:
        return CompiledGrammar(
            grammar, handle, self._stop_token_ids, self._vocab_size, handle.memory_size_bytes
        )


def not_compiled(grammar: Grammar, message: str) -> InvalidRequest:
    """The error for what xgrammar says of a grammar."""
    reason = " ".join(_PLACE.sub("", message).split())
    return refusal(grammar, f"one that can be compiled ({reason[:300]})")


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise CheckpointError(f"{path} cannot be read: {error}", path=path) from error


def _end_token(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    path = folder / "tokenizer_config.json"
    name = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
    token = tokenizer.token_to_id(name["content"] if isinstance(name, dict) else name or "")
    if token is None:
        limit = "generation_config.json, config.json nor tokenizer_config.json names an end token"
        raise CheckpointError(f"No output of a grammar could end: neither {limit}.", path=folder)
    return frozenset([token])


def _spelled_vocabulary(tokenizer: Tokenizer, vocab_size: int, is_byte_level: bool) -> list[str]:
    """Every token as the tokenizer's model spells it, by id; "" is never allowed by a mask."""
    spelled = [""] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size:
            spelled[token_id] = token
    bytes_of = ByteLevel(add_prefix_space=False, use_regex=False)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if token_id >= vocab_size:
            continue
        text = added.content
        if added.special or _MARKER.fullmatch(text):
            spelled[token_id] = ""
        elif is_byte_level:  # added tokens are written as text, the others byte by byte
            spelled[token_id] = "".join(part for part, _ in bytes_of.pre_tokenize_str(text))
    return spelled
