"""Text from tokens: whole characters, exact stops, whatever the cuts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from control_plane.detokenizer import Detokenizer, OutputText, StopStrings
from tests.control_plane.tiny_tokenizers import END, KINDS, byte_fallback


def cut(items: Any, sizes: list[int]) -> list[Any]:
    """`items` cut into pieces of these sizes, the rest one by one."""
    pieces, start = [], 0
    for size in [*sizes, *[1] * len(items)]:
        if start >= len(items):
            break
        pieces.append(items[start : start + size])
        start += size
    return pieces


TEXTS = st.text(st.sampled_from("abc é世界👩‍👧\n"), max_size=30)
SIZES = st.lists(st.integers(1, 5), max_size=20)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, sizes=SIZES)
def test_releases_add_up_to_the_text_and_hold_no_broken_character(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    releases = [detokenizer.add(piece) for piece in cut(token_ids, sizes)]
    assert all("\ufffd" not in release for release in releases)
    assert "".join(releases) + detokenizer.flush() == text == tokenizer.decode(token_ids)


@settings(max_examples=60, deadline=None)
@given(token_ids=st.lists(st.integers(0, 300), max_size=40), sizes=SIZES)
def test_any_tokens_give_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]
) -> None:
    """Random tokens of a byte-level model: most of their bytes are no valid text at all."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(piece) for piece in cut(token_ids, sizes)) + detokenizer.flush()
    assert text == tokenizer.decode(token_ids)


def test_an_endless_run_of_invalid_bytes_is_released_as_it_comes(tokenizer: Tokenizer) -> None:
    (token_id,) = tokenizer.encode("é", add_special_tokens=False).ids[:1]
    detokenizer = Detokenizer(tokenizer)
    lengths = [len(detokenizer.add([token_id])) for _ in range(100)]
    assert sum(lengths) > 80
    assert sum(lengths) + len(detokenizer.flush()) == 100


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("é世👩"), max_size=8), sizes=SIZES)
def test_bytes_of_a_sentencepiece_model_become_whole_characters(
    text: str, sizes: list[int]
) -> None:
    tokenizer = byte_fallback()
    token_ids = [256, *text.encode(), 257, 258]
    detokenizer = Detokenizer(tokenizer)
    releases = [detokenizer.add(piece) for piece in cut(token_ids, sizes)]
    assert "".join(releases) + detokenizer.flush() == f"a{text} bc"
    assert all("\ufffd" not in release for release in releases)


TOKENIZERS = {name: kind() for name, kind in KINDS.items()}
# In byte_fallback: é and 世 byte by byte, wrong bytes, words with and without a space, </s>.
LONE_BYTES = [0xC3, 0xA9, 0xE4, 0xB8, 0x96, 0xFF, 0xF0, 256, 257, 258, 260, 261, 262]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_are_cut_into_messages(
    kind: str, data: st.DataObject
) -> None:
    """Any tokens, special, unknown and broken ones among them."""
    tokenizer = TOKENIZERS[kind]
    size = tokenizer.get_vocab_size() + 2
    ids = st.integers(0, size - 1)
    if kind == "byte_fallback":
        ids = st.sampled_from(LONE_BYTES)
    token_ids = data.draw(st.lists(ids, max_size=24))
    sizes = data.draw(SIZES)
    one_by_one, in_pieces = Detokenizer(tokenizer), Detokenizer(tokenizer)
    expected = "".join([one_by_one.add([t]) for t in token_ids]) + one_by_one.flush()
    text = "".join([in_pieces.add(piece) for piece in cut(token_ids, sizes)]) + in_pieces.flush()
    assert text == expected
    if kind != "byte_fallback":
        assert text == tokenizer.decode(token_ids)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(["é", "世", "👧", "▁a", "▁b", "c", "▁", END]), max_size=12))
@example(parts=["▁a", END, "▁b"])
@example(parts=[END, END, "▁a"])
@example(parts=["▁", "▁b"])
@example(parts=["é", "▁b"])
def test_valid_text_of_lone_bytes_and_words_is_what_decoding_it_at_once_gives(
    parts: list[str],
) -> None:
    """Its leading space goes, and nobody else's: not after a special token, not after bytes."""
    tokenizer = TOKENIZERS["byte_fallback"]
    token_ids: list[int] = []
    for part in parts:
        known = tokenizer.token_to_id(part) if part != "世" else None
        token_ids += part.encode() if known is None else [known]
    detokenizer = Detokenizer(tokenizer)
    releases = [detokenizer.add([token_id]) for token_id in token_ids]
    assert "".join(releases) + detokenizer.flush() == tokenizer.decode(token_ids)
    assert all("\ufffd" not in release for release in releases)


@settings(max_examples=150, deadline=None)
@given(values=st.lists(st.sampled_from(LONE_BYTES[:7]), max_size=16))
def test_wrong_bytes_spoil_no_characters_beside_them(values: list[int]) -> None:
    """Decoding at once gives three replacements for C3 A9 FF, of which C3 A9 is an é."""
    detokenizer = Detokenizer(TOKENIZERS["byte_fallback"])
    text = "".join([detokenizer.add([value]) for value in values]) + detokenizer.flush()
    assert text == bytes(values).decode(errors="replace")


def test_lone_bytes_keep_their_place_among_words_and_special_tokens() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    end, word = tokenizer.token_to_id(END), tokenizer.token_to_id("c")
    for token_ids, text in (
        ([0xE4, end, 0xB8, 0x96], "世"),
        ([0xE4, word, 0xC3, 0xA9], "\ufffdcé"),
        ([word, 0xE4], "c\ufffd"),
    ):
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.add(token_ids) + detokenizer.flush() == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_of_four_tokens_comes_with_its_last(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    girl = "👧"
    token_ids = (
        tokenizer.encode(girl, add_special_tokens=False).ids
        if kind == "byte_level"
        else list(girl.encode())
    )
    assert len(token_ids) == 4
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([t]) for t in token_ids] == ["", "", "", girl]
    assert detokenizer.add(token_ids[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_people_joined_by_zero_width_joiners_stay_together(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    family = "👩‍👩‍👧"
    token_ids = (
        tokenizer.encode(family, add_special_tokens=False).ids
        if kind == "byte_level"
        else list(family.encode())
    )
    detokenizer = Detokenizer(tokenizer)
    releases = [detokenizer.add([t]) for t in token_ids]
    assert [r for r in releases if r] == list(family)
    assert detokenizer.flush() == ""


def test_a_released_character_is_decoded_once_only(tokenizer: Tokenizer) -> None:
    """The window stays short however long the output is."""
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode("hello there " * 50, add_special_tokens=False).ids
    for token_id in token_ids:
        detokenizer.add([token_id])
        window = detokenizer._window
        assert len(window._context) + len(window._open) <= 4


def reference_stop(
    text: str, stops: list[str], num_held: int = 0, *, is_included: bool = False
) -> tuple[str, str | None]:
    """The definition, character by character: none of the first `num_held` ones ends the text."""
    for end in range(num_held + 1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if is_included else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
    sizes=SIZES,
    num_held=st.integers(0, 12),
    is_included=st.booleans(),
)
@example(text="aaaa", stops=["aaa"], sizes=[1, 2], num_held=0, is_included=False)
@example(text="abab", stops=["b", "bab"], sizes=[2], num_held=2, is_included=True)
def test_the_cut_is_where_the_first_stop_string_is_however_the_text_comes(
    text: str, stops: list[str], sizes: list[int], num_held: int, is_included: bool
) -> None:
    strings, sent, matched, num_seen = StopStrings(stops, is_included=is_included), "", None, 0
    expected = reference_stop(text, stops, num_held, is_included=is_included)
    held, rest = text[:num_held], text[num_held:]
    for piece in [*cut(held, sizes), *cut(rest, sizes)]:
        num_seen += len(piece)
        release = strings.add(piece, can_end=num_seen > num_held)
        sent += release.text
        assert expected[0].startswith(sent), "sent too much"
        if release.matched_stop is not None:
            matched = release.matched_stop
            break
    else:
        sent += strings.flush()
    assert (sent, matched) == expected


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    strings = StopStrings(["<end>"])
    assert strings.add("one <e").text == "one "
    assert strings.add("lse").text == "<else"
    assert strings.add(" two").text == " two"


@pytest.mark.parametrize("stop", ["世", "界"])
def test_a_stop_string_may_be_a_character_of_several_tokens(
    tokenizer: Tokenizer, stop: str
) -> None:
    output = OutputText(tokenizer, [stop])
    sent, matched = "", None
    for token_id in tokenizer.encode("ab世界", add_special_tokens=False).ids:
        release = output.add([token_id])
        sent += release.text
        matched = matched or release.matched_stop
        if matched:
            break
    assert (sent, matched) == ("ab世界".split(stop)[0], stop)
