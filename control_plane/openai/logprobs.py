"""Logprobs in the shapes that OpenAI's two endpoints have for them, and vLLM for a prompt's.

`replies.py` puts them into chunks and whole replies.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable
from typing import Any, Protocol

from control_plane.openai.token_texts import TokenTexts, shown
from hocket.rpc import generation_pb2 as generation


class LogprobsShape(Protocol):
    """Turns the logprobs of one choice into one of OpenAI's shapes, in the order in which they
    come."""

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

    An offset counts the characters of the text before those that the token begins. An entry whose
    logprob is NaN has none: it is the first token of an echoed prompt.
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
            has_logprob = not math.isnan(entry.logprob)
            top = ((self._texts.token_bytes(t.token_id), t.logprob) for t in entry.top)
            likeliest = {shown(token): _finite(p) for token, p in top}
            shape["tokens"].append(shown(token))
            shape["token_logprobs"].append(_finite(entry.logprob) if has_logprob else None)
            shape["top_logprobs"].append(likeliest if has_logprob else None)
            shape["text_offset"].append(self._offset)
            if not self._texts.is_special(entry.token_id):
                self._offset += len(self._decoder.decode(token))
        return shape


def prompt_logprobs(
    entries: Iterable[generation.TokenLogprobs], texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each token of the prompt {id: {logprob, rank, decoded_token}}, its own
    first and the likeliest ones; null for the first token. The rank is null where it is not known.
    """
    shape: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranks = {top.token_id: rank for rank, top in enumerate(entry.top, 1)}
        shape.append(
            {
                str(e.token_id): {
                    "logprob": _finite(e.logprob),
                    "rank": ranks.get(e.token_id),
                    "decoded_token": shown(texts.token_bytes(e.token_id)),
                }
                for e in (entry, *entry.top)
            }
        )
    return shape


def _finite(logprob: float) -> float:
    """JSON has no infinity; a token that cannot be gets what other servers write."""
    return max(logprob, -9999.0)
