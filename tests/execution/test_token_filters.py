"""What the pyramid finds, against looking at everything."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.execution.sampling.token_filters import (
    SMALL_VOCABULARY,
    Draws,
    LogitPyramid,
    true_places,
)
from tests.execution.reference_sampler import random_logits

VOCABULARIES = st.sampled_from([5, 128, 700, SMALL_VOCABULARY + 1, 12_800])


def draws_of(logits: torch.Tensor, rows: list[int], temperature: float) -> Draws:
    rows_R = torch.tensor(rows)
    column = torch.full((len(rows),), temperature)
    nothing = torch.zeros(len(rows))
    return Draws(rows_R, logits[rows_R].amax(dim=-1), column, *[nothing] * 5)


def some_rows(random: Random, rows: int) -> list[int]:
    return sorted(random.sample(range(rows), random.randint(1, rows)))


@settings(max_examples=60, deadline=None)
@given(VOCABULARIES, st.sampled_from([1, 32, 64, 300]), st.randoms(use_true_random=False))
def test_heads_are_the_beginning_of_the_sorted_rows(
    vocab_size: int, width: int, random: Random
) -> None:
    logits = random_logits(random, 4, vocab_size)
    rows = some_rows(random, 4)
    draws = draws_of(logits, rows, random.choice([0.3, 1.0, 3.0]))
    pyramid = LogitPyramid(logits)
    ids, values = pyramid.heads(draws.rows_R, draws.max_R, draws.temperature_R, width)
    expected = draws.tempered(logits[rows]).sort(dim=-1, descending=True, stable=True)
    width = min(width, vocab_size)
    assert ids[:, :width].tolist() == expected.indices[:, :width].tolist()
    assert values[:, :width].tolist() == expected.values[:, :width].tolist()
    assert (ids[:, width:] >= vocab_size).all()
    assert pyramid.argmax(draws.rows_R).tolist() == logits[rows].argmax(dim=-1).tolist()


@settings(max_examples=60, deadline=None)
@given(VOCABULARIES, st.randoms(use_true_random=False))
def test_tokens_from_a_logit_on_are_all_listed(vocab_size: int, random: Random) -> None:
    logits = random_logits(random, 4, vocab_size)
    draws = draws_of(logits, some_rows(random, 4), 0.7)
    least = logits[draws.rows_R, random.randrange(vocab_size)]
    listed = LogitPyramid(logits).at_least(draws, least)
    found = {
        (draw, token): value
        for draw, token, value in zip(
            listed.draws_E.tolist(), listed.ids_E.tolist(), listed.values_E.tolist(), strict=True
        )
        if token < vocab_size
    }
    tempered = draws.tempered(logits[draws.rows_R])
    expected = (logits[draws.rows_R] >= least[:, None]).nonzero().tolist()
    assert found == {(draw, token): tempered[draw, token].item() for draw, token in expected}


@settings(max_examples=60, deadline=None)
@given(VOCABULARIES, st.randoms(use_true_random=False))
def test_totals_are_the_weight_of_whole_rows(vocab_size: int, random: Random) -> None:
    logits = random_logits(random, 6, vocab_size)
    draws = draws_of(logits, some_rows(random, 6), 0.7)
    totals = LogitPyramid(logits).totals(draws.rows_R, draws.max_R, draws.temperature_R)
    expected = draws.tempered(logits[draws.rows_R]).double().exp().sum(dim=-1)
    torch.testing.assert_close(totals, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_true_places_are_those_of_nonzero(share: float) -> None:
    mask = torch.rand(50, 32, generator=torch.Generator().manual_seed(1)) < share
    assert true_places(mask).tolist() == mask.flatten().nonzero()[:, 0].tolist()
