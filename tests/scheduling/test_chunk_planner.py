"""Claims about how a prefill step's budget is shared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling.chunk_planner import PlannedChunk, PromptProgress, plan_chunks
from hocket.types import RequestKey


def progress(name: str, prompt_tokens: int, computed: int = 0) -> PromptProgress:
    return PromptProgress(RequestKey(name), computed, prompt_tokens)


def planned(chunks: list[PlannedChunk]) -> dict[str, int]:
    return {chunk.key.request_id: chunk.num_tokens for chunk in chunks}


def test_one_prompt_gets_the_whole_budget() -> None:
    assert planned(plan_chunks([progress("a", 1000)], 256, 64)) == {"a": 256}


def test_a_short_prompt_is_not_held_up_by_a_long_one_before_it() -> None:
    chunks = planned(plan_chunks([progress("long", 100_000), progress("short", 150)], 256, 64))
    assert chunks["short"] == 150
    assert chunks["long"] == 64


def test_a_long_prompt_advances_however_many_short_ones_come() -> None:
    computed = 0
    for step in range(40):
        shorts = [progress(f"s{step}-{i}", 60) for i in range(20)]
        chunks = planned(plan_chunks([progress("long", 2000, computed), *shorts], 256, 64))
        assert chunks["long"] >= 64 or computed + chunks["long"] == 2000
        computed += chunks["long"]
        if computed == 2000:
            return
    raise AssertionError(f"the long prompt got only {computed} tokens")


def test_unfinished_chunks_end_on_a_block_boundary() -> None:
    chunks = planned(plan_chunks([progress("a", 500, 10), progress("b", 500)], 300, 64))
    assert (10 + chunks["a"]) % 64 == 0


def test_a_budget_smaller_than_a_block_still_makes_progress() -> None:
    assert planned(plan_chunks([progress("a", 500, 3)], 16, 64)) == {"a": 16}


def test_finished_prompts_get_nothing() -> None:
    assert plan_chunks([progress("a", 5, 5)], 16, 64) == []


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), max_size=12),
    budget=st.integers(1, 700),
    block_tokens=st.sampled_from([1, 4, 64]),
)
def test_a_plan_never_exceeds_budget_or_prompt_and_always_serves_the_oldest(
    sizes: list[tuple[int, int]], budget: int, block_tokens: int
) -> None:
    prompts = [progress(str(i), n, min(c, n)) for i, (n, c) in enumerate(sizes)]
    chunks = planned(plan_chunks(prompts, budget, block_tokens))
    assert sum(chunks.values()) <= budget
    unfinished = [p for p in prompts if p.remaining_tokens]
    for prompt in unfinished:
        assert chunks.get(prompt.key.request_id, 1) in range(1, prompt.remaining_tokens + 1)
    if unfinished:
        assert unfinished[0].key.request_id in chunks
