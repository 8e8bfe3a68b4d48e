"""Logits of several prefixes at once, each as if its prefix were all there is.

Against the dense reference of `reference_generation.py`, against Hugging Face's formulas, and by
hand; bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from hocket.execution.sampling.constraints import Constraints
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import RequestKey
from tests.execution.reference_generation import constrained

CPU = torch.device("cpu")
VOCAB = 12
ENDLESS = StoppingParams(100)


def constraints_of(
    sampling: SamplingParams, stopping: StoppingParams = ENDLESS, prompt: Sequence[int] = ()
) -> Constraints:
    return Constraints(sampling, stopping, prompt, None, CPU)


def random_tokens(random: Random, most: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(random.randint(0, most))]


def random_params(random: Random) -> tuple[SamplingParams, StoppingParams]:
    sampling = SamplingParams(
        repetition_penalty=random.choice([1.0, 0.3, 1.7]),
        frequency_penalty=random.choice([0.0, -0.7, 1.3]),
        presence_penalty=random.choice([0.0, -0.9, 0.35]),
        logit_bias=tuple(
            (token, random.uniform(-100, 100))
            for token in random.sample(range(VOCAB), random.randrange(4))
        ),
    )
    stop = frozenset(random.sample(range(VOCAB), random.randrange(4)))
    return sampling, StoppingParams(100, stop, random.randrange(9))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_every_row_is_that_of_its_own_prefix(seed: int) -> None:
    """Verification: row i follows i drafts. Drafting: one row behind the drafts made so far."""
    random = Random(seed)
    sampling, stopping = random_params(random)
    prompt, output, drafts = (random_tokens(random, most) for most in (9, 9, 5))
    generator = torch.Generator().manual_seed(seed)
    raw_RV = torch.randn(len(drafts) + 1, VOCAB, generator=generator) * 4
    expected_RV = [
        constrained(row.numpy(), prompt, [*output, *drafts[:i]], sampling, stopping).tolist()
        for i, row in enumerate(raw_RV)
    ]
    constraints = constraints_of(sampling, stopping, prompt)
    cut = random.randint(0, len(output))
    constraints.commit(output[:cut])
    constraints.commit(output[cut:])
    first = random.randint(0, len(drafts))
    for start, end in ((0, len(drafts) + 1), (first, first + 1), (first, len(drafts) + 1)):
        rows = raw_RV[start:end].clone()
        constraints.apply(rows, drafts[: end - 1], first=start)
        assert rows.tolist() == expected_RV[start:end]
    assert constraints.num_output == len(output)


@given(st.integers(0, 2**32))
def test_a_repetition_penalty_is_that_of_hugging_face(seed: int) -> None:
    random = Random(seed)
    penalty = random.choice([0.5, 1.1, 1.7])
    prompt, output = random_tokens(random, 9), random_tokens(random, 9)
    raw_1V = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    constraints = constraints_of(SamplingParams(repetition_penalty=penalty), prompt=prompt)
    constraints.commit(output)
    ours = raw_1V.clone()
    constraints.apply(ours)
    seen = torch.tensor([[*prompt, *output]], dtype=torch.int64)
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(seen, raw_1V))


def test_the_formulas_by_hand() -> None:
    """Token 0 is in the prompt, 1 twice and 2 once in the output, and 3 is new."""
    sampling = SamplingParams(
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=1.0,
        logit_bias=((2, 8.0), (3, -8.0)),
    )
    constraints = constraints_of(sampling, prompt=[0, 0])
    constraints.commit([1, 2, 1])
    for logit, seen in ((4.0, 2.0), (-4.0, -8.0)):
        rows = torch.full((1, 4), logit)
        constraints.apply(rows)
        assert rows.tolist() == [[seen, seen - 1.5, seen - 1.25 + 8.0, logit - 8.0]]


def test_min_tokens_counts_drafts_as_output() -> None:
    constraints = constraints_of(SamplingParams(), StoppingParams(100, frozenset({1}), 3))
    constraints.commit([0])
    rows = torch.zeros(4, 3)
    constraints.apply(rows, [0, 0, 0])
    assert rows[:, 1].tolist() == [-torch.inf, -torch.inf, 0.0, 0.0]
    assert rows[:, [0, 2]].eq(0.0).all()


def test_a_stop_token_is_masked_even_under_a_bias() -> None:
    biased = SamplingParams(logit_bias=((1, 100.0),))
    rows = torch.zeros(1, 3)
    constraints_of(biased, StoppingParams(100, frozenset({1}), 1)).apply(rows)
    assert rows.tolist() == [[0.0, -torch.inf, 0.0]]


@pytest.mark.parametrize("stop", [frozenset[int](), frozenset({1})])
def test_min_tokens_wants_no_stop_token_to_be_there(stop: frozenset[int]) -> None:
    rows = torch.zeros(2, 3)
    constraints_of(SamplingParams(), StoppingParams(100, stop, 5)).apply(rows, [0])
    assert rows.isinf().sum() == 2 * len(stop)


def test_a_request_without_any_is_left_alone() -> None:
    assert not Constraints.are_needed(SamplingParams(temperature=0.3, top_k=3), ENDLESS)
    for change in (
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": -0.1},
        {"logit_bias": ((1, 0.5),)},
    ):
        assert Constraints.are_needed(replace(SamplingParams(), **change), ENDLESS)
    assert Constraints.are_needed(SamplingParams(), replace(ENDLESS, min_tokens=1))


COUNTED = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.2)


@pytest.mark.parametrize("num_generated", range(5))
def test_a_sequence_knows_the_output_of_earlier_attempts_from_its_prompt(
    num_generated: int,
) -> None:
    """What was said before counts as output, the first token once, and so does what is left of
    min_tokens: whatever was said by whom, the next logits are the same."""
    prompt, output = [3, 3, 4], [3, 5, 5, 6]
    stopping = StoppingParams(9, frozenset({8}), 6)
    sequence = RunningSequence(
        key=RequestKey("r"),
        token_ids=[*prompt, *output],
        prompt_tokens=len(prompt) + num_generated,
        sampling=COUNTED,
        stopping=stopping.after(num_generated),
        block_table=[0],
        num_generated=num_generated,
    )
    raw = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    drafts = [6, 7, 3]
    for _ in range(2):  # as when a step failed and is repeated
        rows = raw.clone()
        sequence.constrain(rows, drafts)
        for i, row in enumerate(rows):
            said = [*output, *drafts[:i]]
            expected = constrained(raw[i].numpy(), prompt, said, COUNTED, stopping)
            assert row.tolist() == expected.tolist()
    assert rows.isinf().any(dim=1).tolist() == [True, True, False, False]


def test_a_sequence_takes_what_was_accepted_and_forgets_what_was_drafted() -> None:
    sequence = RunningSequence(
        key=RequestKey("r"),
        token_ids=[1, 2],
        prompt_tokens=2,
        sampling=COUNTED,
        stopping=ENDLESS,
        block_table=[0],
    )
    random = Random(0)
    for step in range(20):
        drafts = random_tokens(random, 3)
        raw = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(step))
        rows = raw.expand(len(drafts) + 1, -1).clone()
        sequence.constrain(rows, drafts)
        expected = constrained(raw[0].numpy(), [1, 2], sequence.token_ids[2:], COUNTED, ENDLESS)
        assert rows[0].tolist() == expected.tolist()
        sequence.token_ids += [*drafts[: random.randint(0, len(drafts))], random.randrange(VOCAB)]
