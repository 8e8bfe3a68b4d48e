"""The output of one request as its client sees it, put together from what two workers say.

`request_flow` gives it the tokens of both legs. It puts them in order by output index, takes each
index once (decode repeats the first token), turns them into text and decides where the output
ends: at a stop token, a stop string or max_tokens, whichever comes first, exactly there, and no
stop before min_tokens. `take` gives what is new since the last message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.detokenizer import OutputText
from hocket.errors import InternalError
from hocket.request_params import StoppingParams
from hocket.types import FinishReason, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """What is new: tokens from `output_index` on, the text they released, their logprobs."""

    output_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]


_Entry = tuple[int, TokenLogprobs | None]


class Output:
    """Collects one output until it is over."""

    def __init__(self, text: OutputText, stopping: StoppingParams) -> None:
        self._text = text
        self._stopping = stopping
        self._token_ids: list[int] = []
        # Tokens that came before one of lower index, by index.
        self._early: dict[int, _Entry] = {}
        self.num_taken = 0
        # Tokens that are turned into text together, when it is asked for.
        self._unspoken: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self.reason: FinishReason | None = None
        self.matched_stop = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that belong to the output so far."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """These tokens."""
        return tuple(self._token_ids)

    @property
    def is_over(self) -> bool:
        """Whether the output has ended; what comes later is ignored."""
        return self.reason is not None

    def add(self, tokens: Tokens) -> None:
        """Takes tokens of any leg. Raises InternalError when two legs differ about a token."""
        if self.is_over:
            return
        num_known = len(self._token_ids) - tokens.output_index
        if num_known == 0 and not self._early:
            self._append(tokens.token_ids, tokens.logprobs)
        else:
            self._sort_in(tokens, num_known)

    def drop_early(self) -> None:
        """Forgets what came too early: other workers go on, and may choose otherwise."""
        self._early.clear()

    def end(self, reason: FinishReason) -> None:
        """A worker says that the output is over. Raises InternalError when tokens are missing."""
        if self.is_over:
            return
        if self._early:
            raise InternalError(f"output token {self.num_tokens} never came")
        self._finish(reason)

    def take(self) -> OutputPiece | None:
        """What is new since the last call; None when nothing is."""
        self._speak_together()
        token_ids = tuple(self._token_ids[self.num_taken :])
        if not token_ids and not self._new_text:
            return None
        piece = OutputPiece(
            self.num_taken, token_ids, "".join(self._new_text), tuple(self._new_logprobs)
        )
        self.num_taken = len(self._token_ids)
        self._new_text.clear()
        self._new_logprobs.clear()
        return piece

    def _sort_in(self, tokens: Tokens, num_known: int) -> None:
        """Takes tokens of which some are known already, or that come too early."""
        logprobs = tokens.logprobs or (None,) * len(tokens.token_ids)
        entries = list(zip(tokens.token_ids, logprobs, strict=True))
        for offset, (token_id, _) in enumerate(entries[: max(num_known, 0)]):
            self._check_repeat(tokens.output_index + offset, token_id)
        if num_known < 0:
            self._early |= {tokens.output_index + i: entry for i, entry in enumerate(entries)}
            return
        new = entries[num_known:]
        while self._early and (early := self._early.pop(self.num_tokens + len(new), None)):
            new.append(early)
        if new:
            known_logprobs = [entry for _, entry in new if entry is not None]
            self._append([token_id for token_id, _ in new], known_logprobs)

    def _append(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Appends tokens up to the one that ends the output, and their text. Logprobs are there
        for each or for none."""
        end, reason = self._end_of(token_ids)
        # A stop token belongs to the output, not to its text unless that was asked for.
        is_silent = reason is FinishReason.STOP and not self._text.include_stop
        num_spoken = self._speak(token_ids[: end - 1 if is_silent else end])
        if self.matched_stop:
            end, reason = num_spoken, FinishReason.STOP
        self._token_ids += token_ids[:end]
        self._new_logprobs += logprobs[:end]
        if reason is not None:
            self._finish(reason)

    def _end_of(self, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of these tokens belong to the output, as tokens alone tell, and why."""
        room = self._stopping.max_tokens - self.num_tokens
        for index, token_id in enumerate(token_ids[:room]):
            if token_id in self._stopping.stop_token_ids and self._can_end(index + 1):
                return index + 1, FinishReason.STOP
        if len(token_ids) >= room:
            return room, FinishReason.LENGTH
        return len(token_ids), None

    def _can_end(self, num_new: int = 0) -> bool:
        """Whether so many tokens after the present ones are more than the output must have."""
        return self.num_tokens + num_new > self._stopping.min_tokens

    def _speak(self, token_ids: Sequence[int]) -> int:
        """Turns tokens into text, up to the one that completes a stop string; how many."""
        if not self._text.has_stop_strings:
            self._unspoken += token_ids
            return len(token_ids)
        for index, token_id in enumerate(token_ids):
            release = self._text.add([token_id], can_end=self._can_end(index + 1))
            self._release(release.text)
            if release.matched_stop is not None:
                self.matched_stop = release.matched_stop
                return index + 1
        return len(token_ids)

    def _speak_together(self) -> None:
        if self._unspoken:
            self._release(self._text.add(self._unspoken).text)
            self._unspoken.clear()

    def _finish(self, reason: FinishReason) -> None:
        self.reason = reason
        if self.matched_stop:
            return
        self._speak_together()
        release = self._text.flush(can_end=self._can_end())
        self._release(release.text)
        if release.matched_stop is not None:
            self.reason, self.matched_stop = FinishReason.STOP, release.matched_stop

    def _release(self, text: str) -> None:
        if text:
            self._new_text.append(text)

    def _check_repeat(self, index: int, token_id: int) -> None:
        if self._token_ids[index] != token_id:
            raise InternalError(
                f"prefill and decode differ about output token {index}",
                index=index,
                first=self._token_ids[index],
                second=token_id,
            )
