"""One output from the tokens of two legs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from control_plane.detokenizer import OutputText
from control_plane.output import Output
from hocket.errors import InternalError
from hocket.types import FinishReason, RequestKey, TokenLogprobs, Tokens

KEY = RequestKey("r")


def output(
    tokenizer: Tokenizer,
    *,
    stops: tuple[str, ...] = (),
    ends: set[int] | None = None,
    most: int = 99,
) -> Output:
    return Output(OutputText(tokenizer, stops), frozenset(ends or ()), most)


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
