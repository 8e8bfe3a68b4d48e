"""One output from the tokens of two legs."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from control_plane.detokenizer import OutputText
from control_plane.openai.token_texts import TokenTexts
from control_plane.output import Output
from hocket.errors import InternalError
from hocket.request_params import StoppingParams
from hocket.types import FinishReason, RequestKey, TokenLogprobs, Tokens
from tests.control_plane.tiny_tokenizers import byte_level

KEY = RequestKey("r")


def output(
    tokenizer: Tokenizer,
    *,
    stops: tuple[str, ...] = (),
    ends: set[int] | None = None,
    most: int = 99,
    least: int = 0,
    include_stop: bool = False,
) -> Output:
    text = OutputText(tokenizer, stops, include_stop=include_stop)
    return Output(text, StoppingParams(most, frozenset(ends or ()), least))


def tokens(index: int, *token_ids: int) -> Tokens:
    return Tokens(KEY, index, token_ids, tuple(TokenLogprobs(t, -float(t)) for t in token_ids))


def test_repeated_tokens_are_taken_once(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.add(tokens(0, 10))
    out.add(tokens(0, 10, 11))
    out.add(tokens(1, 11, 12))
    piece = out.take()
    assert piece is not None
    assert piece.token_ids == (10, 11, 12)
    assert [p.token_id for p in piece.logprobs] == [10, 11, 12]
    assert out.take() is None


def test_two_legs_that_differ_about_a_token_are_an_error(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.add(tokens(0, 10))
    with pytest.raises(InternalError, match="differ about output token 0"):
        out.add(tokens(0, 99))


def test_a_gap_is_waited_for_and_an_end_before_it_is_an_error(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.add(tokens(1, 11))
    assert out.take() is None
    with pytest.raises(InternalError, match="token 0 never came"):
        out.end(FinishReason.LENGTH)
    out.add(tokens(0, 10))
    piece = out.take()
    assert piece is not None
    assert piece.token_ids == (10, 11)


@pytest.mark.parametrize(("least", "matched"), [(0, "\ufffd"), (1, "")])
def test_what_the_end_itself_releases_counts_after_the_least_tokens_only(
    tokenizer: Tokenizer, least: int, matched: str
) -> None:
    (first, *_) = tokenizer.encode("世", add_special_tokens=False).ids
    out = output(tokenizer, stops=("\ufffd",), most=1, least=least)
    out.add(tokens(0, first))
    assert out.matched_stop == matched
    piece = out.take()
    assert piece is not None
    assert piece.text == ("" if matched else "\ufffd")


def test_what_came_too_early_is_forgotten_when_others_go_on(tokenizer: Tokenizer) -> None:
    out = output(tokenizer)
    out.add(tokens(1, 11))
    out.drop_early()
    out.add(tokens(0, 10))
    out.add(tokens(1, 12))
    assert out.token_ids == (10, 12)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_and_order_of_tokens_gives_the_same_output(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    whole = tokenizer.encode(" the lazy dog 世界 fox", add_special_tokens=False).ids
    bounds = data.draw(st.sets(st.integers(1, len(whole) - 1)))
    edges = [0, *sorted(bounds), len(whole)]
    messages = [tokens(a, *whole[a:b]) for a, b in pairwise(edges)]
    messages += data.draw(st.lists(st.sampled_from(messages)))
    out, text, token_ids = output(tokenizer, most=len(whole)), "", []
    for message in data.draw(st.permutations(messages)):
        out.add(message)
        piece = out.take()
        if piece is not None:
            assert piece.output_index == len(token_ids)
            assert len(piece.logprobs) == len(piece.token_ids)
            text += piece.text
            token_ids += piece.token_ids
    assert token_ids == whole
    assert text == tokenizer.decode(whole)
    assert out.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("most", "ends", "expected", "reason"),
    [
        (3, set(), [20, 21, 22], FinishReason.LENGTH),
        (99, {22}, [20, 21, 22], FinishReason.STOP),
        (3, {22}, [20, 21, 22], FinishReason.STOP),
        (2, {22}, [20, 21], FinishReason.LENGTH),
        (99, {20}, [20], FinishReason.STOP),
    ],
)
def test_an_accepted_run_is_cut_exactly_where_the_output_ends(
    tokenizer: Tokenizer, most: int, ends: set[int], expected: list[int], reason: FinishReason
) -> None:
    out = output(tokenizer, ends=ends, most=most)
    out.add(tokens(0, 20, 21, 22, 23, 24))
    piece = out.take()
    assert piece is not None
    assert list(piece.token_ids) == expected
    assert [p.token_id for p in piece.logprobs] == expected
    spoken = expected[:-1] if reason is FinishReason.STOP else expected
    assert piece.text == tokenizer.decode(spoken)
    assert out.reason is reason
    out.add(tokens(5, 25))
    assert out.take() is None


def test_a_character_that_never_became_whole_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    (first, *_) = tokenizer.encode("世", add_special_tokens=False).ids
    out = output(tokenizer)
    out.add(tokens(0, first))
    piece = out.take()
    assert piece is not None
    assert piece.text == ""
    out.end(FinishReason.LENGTH)
    last = out.take()
    assert last is not None
    assert (last.output_index, last.token_ids, last.text) == (1, (), "\ufffd")


@dataclass(frozen=True)
class Ends:
    """What may end an output."""

    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    most: int
    least: int
    include_stop: bool


def reference_output(
    tokenizer: Tokenizer, token_ids: list[int], ends: Ends
) -> tuple[list[int], str, FinishReason | None, str]:
    """The definition, token by token and character by character, over the tokens' bytes."""
    texts, characters = TokenTexts(tokenizer), codecs.getincrementaldecoder("utf-8")("replace")
    text = ""

    def ended(added: str, number: int) -> tuple[str, str] | None:
        """The text up to a stop string that one of these characters completes, and which."""
        nonlocal text
        for character in added:
            text += character
            matches = [s for s in ends.stops if text.endswith(s)]
            if matches and number > ends.least:
                stop = max(matches, key=len)
                return (text if ends.include_stop else text[: -len(stop)]), stop
        return None

    for number, token_id in enumerate(token_ids, 1):
        taken = token_ids[:number]
        is_stop = token_id in ends.stop_token_ids and number > ends.least
        is_last = is_stop or number == ends.most
        is_silent = texts.is_special(token_id) or (is_stop and not ends.include_stop)
        spoken = b"" if is_silent else texts.token_bytes(token_id)
        if found := ended(characters.decode(spoken), number):
            return taken, found[0], FinishReason.STOP, found[1]
        if is_last:
            if found := ended(characters.decode(b"", final=True), number):
                return taken, found[0], FinishReason.STOP, found[1]
            return taken, text, FinishReason.STOP if is_stop else FinishReason.LENGTH, ""
    return token_ids, text, None, ""


BYTE_LEVEL = byte_level()
PIECES = ["a", "b", "ab", "aba", "Ġ", "Ġa", "Ã", "©", "Ã©", "ä", "\u00b8", "ä\u00b8", "ĸ", "</s>"]
STOPS = ["a", "aba", "abab", "bb", "a a", "é", "世", "b世a", " a"]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_an_output_ends_where_it_would_end_token_by_token_however_its_tokens_come(
    data: st.DataObject,
) -> None:
    """Stop strings over tokens and messages, over themselves, of several tokens' characters; stop
    tokens; limits from below and above; ends within a character."""
    ids = [BYTE_LEVEL.token_to_id(piece) for piece in PIECES]
    token_ids = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=16))
    ends = Ends(
        stops=tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=3, unique=True))),
        stop_token_ids=frozenset(data.draw(st.sets(st.sampled_from(ids[-3:]), max_size=2))),
        most=data.draw(st.integers(1, 18)),
        least=data.draw(st.integers(0, 10)),
        include_stop=data.draw(st.booleans()),
    )
    out = output(
        BYTE_LEVEL,
        stops=ends.stops,
        ends=set(ends.stop_token_ids),
        most=ends.most,
        least=ends.least,
        include_stop=ends.include_stop,
    )
    expected_ids, expected_text, reason, matched = reference_output(BYTE_LEVEL, token_ids, ends)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, len(token_ids))))), len(token_ids)]
    text, taken = "", list[int]()
    for start, end in pairwise(edges):
        out.add(tokens(start, *token_ids[start:end]))
        piece = out.take() if data.draw(st.booleans()) else None
        if piece is not None:
            text += piece.text
            taken += piece.token_ids
            assert expected_text.startswith(text), "sent too much"
    if reason is None:
        out.end(FinishReason.LENGTH)
        text, taken = _rest(out, text, taken)
        assert taken == token_ids
        return
    text, taken = _rest(out, text, taken)
    assert (taken, text, out.reason, out.matched_stop) == (
        expected_ids, expected_text, reason, matched
    )  # fmt: skip


def _rest(out: Output, text: str, taken: list[int]) -> tuple[str, list[int]]:
    """With what has not been taken yet."""
    piece = out.take()
    return (text, taken) if piece is None else (text + piece.text, [*taken, *piece.token_ids])
