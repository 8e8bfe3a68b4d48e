"""Acceptance and the token-by-token end of an output; scripted drafts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.execution.drafting.speculation import (
    ScriptedDraftSource,
    accept,
    append_until_finished,
)
from hocket.execution.sequence import Sequence
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import FinishReason, RequestKey

tokens = st.integers(0, 3)


def sequence_of(
    prompt: list[int], max_tokens: int, stop: frozenset[int] = frozenset(), seed: int = 0
) -> Sequence:
    return Sequence(
        key=RequestKey("r"),
        token_ids=list(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=seed),
        stopping=StoppingParams(max_tokens, stop),
        block_table=[0],
    )


@given(st.lists(tokens, max_size=5), st.data())
def test_a_step_emits_the_longest_right_prefix_and_one_token_more(
    drafts: list[int], data: st.DataObject
) -> None:
    sampled = data.draw(st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    emitted = accept(drafts, sampled)
    accepted = len(emitted) - 1
    assert emitted == sampled[: accepted + 1]
    assert accepted == len(drafts) or drafts[accepted] != sampled[accepted]


@given(st.lists(st.tuples(tokens, st.booleans()), max_size=5), st.data())
def test_a_kept_draft_is_emitted_whatever_the_target_said(
    kept: list[tuple[int, bool]], data: st.DataObject
) -> None:
    drafts, is_kept = [draft for draft, _ in kept], [keep for _, keep in kept]
    sampled = data.draw(st.lists(tokens, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    emitted = accept(drafts, sampled, is_kept)
    accepted = len(emitted) - 1
    assert emitted == [*drafts[:accepted], sampled[accepted]]
    if drafts:
        assert all(is_kept[:accepted])
        assert accepted == len(drafts) or not is_kept[accepted]


@given(st.lists(tokens, min_size=1, max_size=8), st.integers(1, 9), st.sets(tokens, max_size=2))
def test_a_run_ends_where_single_tokens_would_end_it(
    run: list[int], max_tokens: int, stop: set[int]
) -> None:
    together = sequence_of([9], max_tokens, frozenset(stop))
    count, reason = append_until_finished(together, run)
    single = sequence_of([9], max_tokens, frozenset(stop))
    expected: FinishReason | None = None
    for token in run:
        single.token_ids.append(token)
        expected = single.finish_reason()
        if expected is not None:
            break
    assert together.token_ids == single.token_ids
    assert (count, reason) == (single.output_tokens, expected)


def test_a_stop_token_at_the_last_allowed_place_counts_as_stop() -> None:
    sequence = sequence_of([9], max_tokens=2, stop=frozenset({3}))
    assert append_until_finished(sequence, [1, 3, 5]) == (2, FinishReason.STOP)


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.8, 1.0])
def test_scripted_drafts_are_right_as_often_as_asked_and_never_differ_between_runs(
    accuracy: float,
) -> None:
    truth = list(range(4000))
    source = ScriptedDraftSource({RequestKey("r"): truth}, accuracy, vocab_size=10_000)
    proposed = [
        source.propose([sequence_of(truth[:length], 4000)], [4])[0] for length in range(1, 3990, 4)
    ]
    right = sum(
        draft == truth[1 + 4 * step + depth]
        for step, drafts in enumerate(proposed)
        for depth, draft in enumerate(drafts)
    )
    assert right / (4 * len(proposed)) == pytest.approx(accuracy, abs=0.03)
    assert source.propose([sequence_of(truth[:1], 4000)], [4])[0] == proposed[0]
