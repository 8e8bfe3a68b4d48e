"""Tokens to text as they come, and the end of a text at a stop string.

`Detokenizer` releases whole characters only; `StopStrings` holds back what may become a stop
string. `OutputText` is both together, as `request_flow` uses them: token ids in, text out, the
same text however the tokens were cut into messages. One of each per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# A character that is not whole decodes to at most this many replacement characters.
MAX_OPEN_CHARACTERS = 3
# More tokens than this cannot belong to one character: their bytes are no valid text.
MAX_OPEN_TOKENS = 8


class Detokenizer:
    """The text of a growing list of tokens, released in whole characters.

    Only a short window is decoded per token: the tokens of the last release, because a token's
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

    def flush(self) -> str:
        """What is still held: a character that will not become whole any more."""
        if not self._open and not self._is_holding:
            return ""
        window = self._tokenizer.decode(self._context + self._open)
        return self._release(window, len(self._open), num_held=0)

    def _release(self, window: str, end: int, num_held: int) -> str:
        """Releases the window, made of the context and `end` open tokens, but its last `num_held`
        characters; those tokens become the context."""
        text = window[self._num_released : len(window) - num_held]
        if end:
            self._context, self._open = self._open[:end], self._open[end:]
        self._num_released = len(self._tokenizer.decode(self._context)) - num_held
        self._is_holding = num_held > 0
        return text


@dataclass(frozen=True, slots=True)
class Release:
    """Text that may be sent; `matched_stop` when it ended at that stop string."""

    text: str
    matched_stop: str | None = None


class StopStrings:
    """Ends a text before the first of some strings.

    First means: the one that is complete first, and of those the one that began first. That is
    independent of how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> Release:
        """What may be sent of the held text and this one."""
        if not self._stops:
            return Release(text)
        held = self._held + text
        ends = [(start + len(s), start, s) for s in self._stops if (start := held.find(s)) >= 0]
        if ends:
            _, start, stop = min(ends)
            self._held = ""
            return Release(held[:start], stop)
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return Release(held[: len(held) - keep])

    def flush(self) -> str:
        """What is still held: it did not become a stop string."""
        held, self._held = self._held, ""
        return held


class OutputText:
    """The text of one output: detokenised, ended by stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop_strings)
        self.has_stop_strings = bool(stop_strings)

    def add(self, token_ids: Sequence[int]) -> Release:
        """The text that these tokens release. With stop strings give it one token at a time: the
        token that completes the stop string is the last of the output."""
        return self._stops.add(self._detokenizer.add(token_ids))

    def flush(self) -> Release:
        """The rest, at the end of the output. It may still hold a stop string."""
        release = self._stops.add(self._detokenizer.flush())
        if release.matched_stop is not None:
            return release
        return Release(release.text + self._stops.flush())


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins (but is not complete)."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
