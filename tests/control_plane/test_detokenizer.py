"""Text from tokens: whole characters, exact stops, whatever the cuts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from control_plane.detokenizer import Detokenizer, OutputText, StopStrings


def cut(items: Any, sizes: list[int]) -> list[Any]:
    """`items` cut into pieces of these sizes, the rest one by one."""
    pieces, start = [], 0
    for size in [*sizes, *[1] * len(items)]:
        if start >= len(items):
            break
        pieces.append(items[start : start + size])
        start += size
    return pieces


def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece models have it: words with a leading mark, unknown text byte by byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "▁b": 257, "c": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


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
    tokenizer = byte_fallback_tokenizer()
    token_ids = [256, *text.encode(), 257, 258]
    detokenizer = Detokenizer(tokenizer)
    releases = [detokenizer.add(piece) for piece in cut(token_ids, sizes)]
    assert "".join(releases) + detokenizer.flush() == f"a{text} bc"
    assert all("\ufffd" not in release for release in releases)


def test_a_released_character_is_decoded_once_only(tokenizer: Tokenizer) -> None:
    """The window stays short however long the output is."""
    detokenizer = Detokenizer(tokenizer)
    token_ids = tokenizer.encode("hello there " * 50, add_special_tokens=False).ids
    for token_id in token_ids:
        detokenizer.add([token_id])
        assert len(detokenizer._context) + len(detokenizer._open) <= 4


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, character by character."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("ab"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=4), max_size=3),
    sizes=SIZES,
)
def test_the_cut_is_where_the_first_stop_string_begins_however_the_text_comes(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    strings, sent, matched = StopStrings(stops), "", None
    for piece in cut(text, sizes):
        release = strings.add(piece)
        sent += release.text
        assert reference_stop(text, stops)[0].startswith(sent), "sent too much"
        if release.matched_stop is not None:
            matched = release.matched_stop
            break
    else:
        sent += strings.flush()
    assert (sent, matched) == reference_stop(text, stops)


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
