"""Masks and states: what may come next, after the committed tokens and after drafts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import count
from random import Random

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.errors import InternalError, InvalidRequest
from hocket.execution.grammars.states import (
    GrammarState,
    Spent,
    allowed_tokens,
    apply_masks,
    empty_masks,
    mask_logits,
)
from hocket.request_params import Grammar, GrammarKind
from tests.execution.grammar_texts import (
    ALL,
    CHOICE,
    EBNF,
    END,
    REGEX,
    SCHEMA,
    SPECIAL,
    TOKENIZER,
    VOCAB_SIZE,
    compiled,
    mask,
    outputs,
    text_of,
)

ANY_TEXT = Grammar(GrammarKind.REGEX, r"[\s\S]*")


def _ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def _is_sum(text: str) -> bool:
    """Reads `EBNF` by hand."""

    def root(at: int) -> int:
        at = term(at)
        while text[at : at + 1] == "+":
            at = term(at + 1)
        return at

    def term(at: int) -> int:
        if text[at] == "(":
            at = root(at + 1)
            assert text[at] == ")"
            return at + 1
        digits = re.match("[0-9]+", text[at:])
        assert digits
        return at + digits.end()

    return root(0) == len(text)


def test_random_outputs_are_what_the_grammar_says() -> None:
    found = {g.kind: [text_of(t) for t in outputs(compiled(g), 1, 60)] for g in ALL}
    assert min(map(len, found.values())) >= 40
    for text in found[GrammarKind.JSON_SCHEMA]:
        jsonschema.validate(json.loads(text), json.loads(SCHEMA.source))
    for text in found[GrammarKind.REGEX]:
        assert re.fullmatch(REGEX.source, text), text
    for text in found[GrammarKind.EBNF]:
        assert _is_sum(text), text
    assert set(found[GrammarKind.CHOICE]) == set(json.loads(CHOICE.source))


def test_a_wrong_sum_is_none_to_the_hand_parser() -> None:
    assert _is_sum("1+(2+30)")
    for wrong in ("1+2)", "1 2"):
        assert not _is_sum(wrong)


@pytest.mark.parametrize("grammar", ALL, ids=lambda g: g.kind.value)
def test_a_state_made_from_tokens_continues_like_the_one_that_sampled_them(
    grammar: Grammar,
) -> None:
    for tokens in outputs(compiled(grammar), 2, 3, most_tokens=80):
        state = GrammarState(compiled(grammar))
        for position in range(len(tokens) + 1):
            rebuilt = GrammarState(compiled(grammar), tokens[:position])
            np.testing.assert_array_equal(mask(rebuilt), mask(state))
            assert rebuilt.is_over == state.is_over == (position == len(tokens))
            state.commit(tokens[position : position + 1])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_look_ahead_leaves_no_trace(data: st.DataObject) -> None:
    """After any series of drafts, right and wrong, a state is where a fresh one would be."""
    grammar = compiled(data.draw(st.sampled_from(ALL)))
    chance = Random(data.draw(st.integers(0, 1000)))
    some = list(outputs(grammar, chance.randrange(5), 6, most_tokens=60))
    committed = chance.choice(some)
    committed = committed[: chance.randrange(len(committed) + 1)]
    state = GrammarState(grammar, committed)
    for _ in range(data.draw(st.integers(1, 8))):
        drafts = _drafts(GrammarState(grammar, committed), chance)
        fresh = GrammarState(grammar, committed)
        accepted = [token for i, token in enumerate(drafts) if fresh.seek(drafts[: i + 1])]
        fresh.seek(accepted)
        assert state.seek(drafts) == (accepted == drafts)
        assert state.is_over == fresh.is_over
        np.testing.assert_array_equal(mask(state), mask(fresh))
        np.testing.assert_array_equal(
            mask(state), mask(GrammarState(grammar, committed + accepted))
        )
    state.commit(accepted)
    np.testing.assert_array_equal(mask(state), mask(fresh))


def _drafts(state: GrammarState, chance: Random) -> list[int]:
    """Up to six tokens, mostly allowed ones, sometimes any."""
    drafts: list[int] = []
    for _ in range(chance.randrange(7)):
        is_fine = state.seek(drafts) and chance.random() < 0.9
        choices = mask(state).tolist() if is_fine else range(VOCAB_SIZE)
        drafts.append(chance.choice(choices))
    return drafts


def test_a_token_that_the_grammar_refuses_is_named_by_its_position() -> None:
    one, close = _ids("1)")
    with pytest.raises(InternalError, match=f"Output token 1 is {close}"):
        GrammarState(compiled(EBNF), [one, close])
    state = GrammarState(compiled(EBNF), [one])
    with pytest.raises(InternalError, match="Output token 2 is -1"):
        state.commit([one, -1])
    state.commit([one, END])
    assert state.is_over


def test_the_end_token_is_allowed_where_the_grammar_may_end_and_after_it() -> None:
    state = GrammarState(compiled(Grammar(GrammarKind.REGEX, "a|ab+")))
    assert END not in mask(state)
    state.commit(_ids("a"))
    assert {END, *_ids("b")} <= set(mask(state).tolist())
    assert state.seek([END])
    assert state.is_over
    assert mask(state).tolist() == [END]
    assert not state.seek([END, *_ids("b")])
    assert state.seek([END, END, END])
    assert state.seek(_ids("b"))
    assert not state.is_over
    state.commit([*_ids("b"), END, END])
    assert mask(state).tolist() == [END]


@pytest.mark.parametrize("before", ["", "some text"])
def test_special_tokens_are_no_text(before: str) -> None:
    state = GrammarState(compiled(ANY_TEXT), _ids(before))
    assert set(SPECIAL) & set(mask(state).tolist()) == {END}
    assert not state.seek([3])


def test_special_tokens_are_not_in_json_strings_either() -> None:
    anything = compiled(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string"}'))
    allowed = mask(GrammarState(anything, _ids('"')))
    assert len(allowed) > 3000
    assert not set(SPECIAL) & set(allowed.tolist())


def test_a_dead_end_is_an_error_that_names_the_grammar() -> None:
    """But only once it is reached: a draft that leads there may be wrong."""
    dead_end = Grammar(GrammarKind.EBNF, 'root ::= "a" x | "b"\nx ::= x "c"')
    state = GrammarState(compiled(dead_end))
    logits = torch.zeros((2, VOCAB_SIZE))
    apply_masks(state, logits, _ids("a"), 0)
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == sorted(_ids("a") + _ids("b"))
    assert logits[1].isfinite().all()
    state.commit(_ids("a"))
    with pytest.raises(InvalidRequest, match=r"grammar\.ebnf .* can go on from"):
        apply_masks(state, logits, [], 0)
    with pytest.raises(InvalidRequest, match=r"grammar\.ebnf .* can go on from"):
        state.commit(_ids("c"))


def test_a_grammar_that_costs_too_much_time_is_refused_to_all_who_use_it() -> None:
    clock = count(step=0.25)
    grammar = replace(compiled(ANY_TEXT), spent=Spent())
    other = GrammarState(grammar)
    state = GrammarState(grammar, cpu_time=lambda: next(clock))
    assert state.seek(_ids("a"))
    for _ in range(2):
        mask(state)
    with pytest.raises(InvalidRequest, match=r"grammar\.regex .* are followed in 1\.01 s"):
        mask(state)
    with pytest.raises(InvalidRequest, match="a less ambiguous one"):
        mask(other)
    with pytest.raises(InvalidRequest, match="a less ambiguous one"):
        GrammarState(grammar)


def test_masks_of_rows_follow_their_drafts() -> None:
    grammar = compiled(EBNF)
    one, plus, close = _ids("1+)")
    logits = torch.zeros((4, VOCAB_SIZE))
    apply_masks(GrammarState(grammar), logits, [one, plus, close], 0)
    for row, prefix in enumerate(([], [one], [one, plus])):
        allowed = mask(GrammarState(grammar, prefix))
        assert logits[row].isfinite().nonzero()[:, 0].tolist() == allowed.tolist()
    assert logits[3].isfinite().all()  # behind a draft that is surely wrong

    behind = torch.zeros((2, VOCAB_SIZE))
    apply_masks(GrammarState(grammar), behind, [one, plus], 1)
    assert torch.equal(behind, logits[1:3])

    past_end = torch.zeros((2, VOCAB_SIZE))
    apply_masks(GrammarState(grammar), past_end, [one, END], 1)
    assert past_end[1].isfinite().nonzero()[:, 0].tolist() == [END]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab_size", [64, 1000, 4100])
def test_masked_logits_are_minus_infinity_and_others_untouched(
    vocab_size: int, device: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    masks = empty_masks(5, vocab_size).random_(-(1 << 31), (1 << 31) - 1)
    before = torch.randn(7, vocab_size, device=device)
    before[:, 3] = -torch.inf
    logits = before.clone()
    mask_logits(logits[1:6], masks)
    for row, mask_W in enumerate(masks, start=1):
        expected = torch.full((vocab_size,), -torch.inf, device=device)
        allowed = torch.from_numpy(allowed_tokens(mask_W, vocab_size)).to(device)
        expected[allowed] = before[row, allowed]
        assert torch.equal(logits[row], expected)
    assert torch.equal(logits[[0, 6]], before[[0, 6]])


def test_allowed_tokens_reads_bits_from_the_lowest() -> None:
    mask_W = torch.tensor([1, -(1 << 31), 6], dtype=torch.int32)
    assert allowed_tokens(mask_W, 66).tolist() == [0, 63, 65]


def test_a_sum_may_be_nested() -> None:
    """The grammar is no regular one: it counts its parentheses."""
    state = GrammarState(compiled(EBNF), _ids("(" * 3 + "1"))
    assert state.seek(_ids(")))"))
    assert mask(state).tolist()
    assert not state.seek(_ids("))))"))
