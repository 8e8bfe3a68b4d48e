"""Which prompts advance in the next prefill step, and by how many tokens.

A step computes at most `budget_tokens` prompt tokens, shared by several prompts. The shortest
remaining prompt goes first, which gives the best mean time to first token; a share of every step
is kept for the oldest prompt, so that a long one is never starved by a stream of short ones.
Chunks end on block boundaries where they can: only full blocks cross to the decode worker.

Pure: used by both workers' schedulers, and by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.types import RequestKey

OLDEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far one admitted prompt has come; sizes in tokens."""

    key: RequestKey
    computed_tokens: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        assert 0 <= self.computed_tokens <= self.prompt_tokens, self

    @property
    def remaining_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """The next `num_tokens` prompt tokens of one request; at least one."""

    key: RequestKey
    num_tokens: int


def plan_chunks(
    prompts: Sequence[PromptProgress], budget_tokens: int, block_tokens: int
) -> list[PlannedChunk]:
    """Shares one step's budget among prompts, which come oldest first.

    The chunks come in the order of `prompts`, at most one per prompt, and sum to at most
    `budget_tokens`. The oldest unfinished prompt always gets a chunk. For example, with a budget
    of 256 and blocks of 64, prompts with 1000, 100 and 30 tokens to go get 64, 100 and 30: the
    first could have 126, but ends on a block boundary instead.
    """
    assert min(budget_tokens, block_tokens) > 0, (budget_tokens, block_tokens)
    unfinished = [prompt for prompt in prompts if prompt.remaining_tokens]
    if not unfinished:
        return []

    oldest = unfinished[0]
    kept = max(int(budget_tokens * OLDEST_SHARE), min(block_tokens, budget_tokens))
    granted = {oldest.key: min(kept, oldest.remaining_tokens)}
    left = budget_tokens - granted[oldest.key]

    for prompt in sorted(unfinished, key=lambda prompt: prompt.remaining_tokens):
        before = granted.get(prompt.key, 0)
        wanted = before + min(left, prompt.remaining_tokens - before)
        given = _end_on_block(prompt, wanted, block_tokens)
        left -= given - before
        granted[prompt.key] = given

    return [PlannedChunk(p.key, granted[p.key]) for p in unfinished if granted[p.key]]


def _end_on_block(prompt: PromptProgress, num_tokens: int, block_tokens: int) -> int:
    """`num_tokens` or a little less, so that the chunk ends its prompt or a block if it can."""
    if num_tokens == prompt.remaining_tokens:
        return num_tokens
    past_boundary = (prompt.computed_tokens + num_tokens) % block_tokens
    return num_tokens - past_boundary if past_boundary < num_tokens else num_tokens
