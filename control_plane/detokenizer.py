"""Tokens to text as they come, and the end of a text at a stop string.

`Detokenizer` releases whole characters only; `StopStrings` holds back what may become a stop
string. `OutputText` is both together, as `control_plane.output` uses them: token ids in, text out,
the same text however the tokens were cut into messages. One of each per output.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character that is not whole decodes to at most this many replacement characters.
MAX_OPEN_CHARACTERS = 3
# More tokens than this cannot belong to one character: their bytes are no valid text.
MAX_OPEN_TOKENS = 8


class Detokenizer:
    """The text of a growing list of tokens, released in whole characters.

    All releases together are `decode` of all tokens. Where a vocabulary spells out lone bytes,
    that is so for valid UTF-8 only: `decode` spoils a whole run of them for one that is wrong,
    the characters before it included, which are long released. Here each wrong byte stands alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._window = _Window(tokenizer)
        self._lone_bytes, self._special = _lone_bytes(tokenizer)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        if not self._lone_bytes:
            return self._window.add(token_ids)
        return "".join([self._add(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What is still held: a character that will not become whole any more."""
        return self._window.flush() + self._bytes.decode(b"", final=True)

    def _add(self, token_id: int) -> str:
        if token_id in self._special:
            return ""  # is in no text, and may stand within a character
        byte = self._lone_bytes.get(token_id)
        if byte is None:
            return self._bytes.decode(b"", final=True) + self._window.add([token_id])
        text = self._window.flush() + self._bytes.decode(byte)
        self._window.follow(token_id)
        return text


@lru_cache(maxsize=8)
def _lone_bytes(tokenizer: Tokenizer) -> tuple[Mapping[int, bytes], frozenset[int]]:
    """The tokens that stand for one byte each, none unless the tokenizer puts them together; and
    those that are in no text."""
    added = tokenizer.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    found: dict[int, bytes] = {}
    if "ByteFallback" in decoder_kinds(tokenizer):
        for byte in range(256):
            token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
            if token_id is not None:
                found[token_id] = bytes([byte])
    return found, special


def decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The names of the steps by which a tokenizer puts tokens together."""
    decoder: Any = tokenizer.decoder
    if decoder is None:
        return set()
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return {step["type"] for step in [state, *state.get("decoders", [])]}


class _Window:
    """Only a short window is decoded per token: the tokens of the last release, because a token's
    text may depend on its predecessor (a leading space), and those since. All releases together
    are `decode` of all tokens, as long as a token's text depends on no more than that.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens of the last release, and how much of their text has been released.
        self._context: list[int] = []
        self._num_released = 0
        self._open: list[int] = []
        self._is_holding = False

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._open.extend(token_ids)
        if not self._open:
            return ""
        num_open = len(self._open)
        # A character that is not whole is at the end, and made of few tokens.
        for end in range(num_open, max(0, num_open - MAX_OPEN_CHARACTERS - 1), -1):
            window = self._tokenizer.decode(self._context + self._open[:end])
            if not window.endswith(REPLACEMENT):
                return self._release(window, end, num_held=0)
        if num_open <= MAX_OPEN_TOKENS:
            return ""
        window = self._tokenizer.decode(self._context + self._open)
        num_trailing = len(window) - len(window.rstrip(REPLACEMENT))
        # What the open tokens did not make themselves has been held for long enough.
        num_made = len(self._tokenizer.decode(self._open))
        return self._release(window, num_open, min(num_trailing, MAX_OPEN_CHARACTERS, num_made))

    def follow(self, token_id: int) -> None:
        """A token was put out elsewhere: what comes now stands behind it."""
        self._context, self._open, self._is_holding = [token_id], [], False
        self._num_released = len(self._tokenizer.decode(self._context))

    def flush(self) -> str:
        """What is still held."""
        if not self._open and not self._is_holding:
            return ""
        window = self._tokenizer.decode(self._context + self._open)
        return self._release(window, len(self._open), num_held=0)

    def _release(self, window: str, end: int, num_held: int) -> str:
        """Releases the window, made of the context and `end` open tokens, but its last `num_held`
        characters; those tokens become the context."""
        text = window[self._num_released : len(window) - num_held]
        if end:
            spoken, self._open = self._open[:end], self._open[end:]
            if text or num_held:
                self._context = spoken
            elif not self._num_released:
                # A leading space that was dropped counts for the next token.
                self._context = [*self._context, *spoken][:MAX_OPEN_TOKENS]
            # Tokens without text, as special ones, must not hide those before them.
        self._num_released = len(self._tokenizer.decode(self._context)) - num_held
        self._is_holding = num_held > 0
        return text


@dataclass(frozen=True, slots=True)
class Release:
    """Text that may be sent; `matched_stop` when it ended at that stop string."""

    text: str
    matched_stop: str | None = None


class StopStrings:
    """Ends a text before, or behind, the first of some strings.

    First means: the one that is complete first, and of those the one that began first. That is
    independent of how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """`is_included`: the stop string is part of the text."""
        self._stops = tuple(stops)
        self._is_included = is_included
        self._held = ""

    def add(self, text: str, *, can_end: bool = True) -> Release:
        """What may be sent of the held text and this one. A stop string counts only where `can_end`
        was given with the text that completes it."""
        if not self._stops:
            return Release(text)
        num_old = len(self._held)
        held = self._held + text
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            # One that lies within the old text was complete when it did not count.
            if can_end and (start := held.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if ends:
            end, start, stop = min(ends)
            self._held = ""
            return Release(held[: end if self._is_included else start], stop)
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return Release(held[: len(held) - keep])

    def flush(self) -> str:
        """What is still held: it did not become a stop string."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one output: detokenised, ended by stop strings."""

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str], *, include_stop: bool = False
    ) -> None:
        """`include_stop`: what ends the output is part of its text."""
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop_strings, is_included=include_stop)
        self.has_stop_strings = bool(stop_strings)
        self.include_stop = include_stop

    def add(self, token_ids: Sequence[int], *, can_end: bool = True) -> Release:
        """The text that these tokens release. With stop strings give it one token at a time: the
        token that completes the stop string, where it `can_end` the output, is its last."""
        return self._stops.add(self._detokenizer.add(token_ids), can_end=can_end)

    def flush(self, *, can_end: bool = True) -> Release:
        """The rest, at the end of the output. It may still hold a stop string."""
        release = self._stops.add(self._detokenizer.flush(), can_end=can_end)
        if release.matched_stop is not None:
            return release
        return Release(release.text + self._stops.flush())


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins (but is not complete)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
