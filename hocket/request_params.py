"""What a client may ask of an output: how its tokens are chosen, and when it ends. No torch.

Plain frozen dataclasses like those of `hocket.types`, in which a `StartRequest` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """How a grammar is written: `JSON_SCHEMA`, `REGEX`, `EBNF` (root rule "root"), or `CHOICE`, a
    JSON list of strings."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, from its first token to its end token."""

    kind: GrammarKind
    source: str


@dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Lossy: also keeps a draft whose probability p exceeds min(epsilon, delta * exp(-H)), H the
    entropy of what the target would sample from (arXiv 2401.10774, section 3.3.1)."""

    epsilon: float
    delta: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen: penalties (repetition, frequency, presence), logit bias,
    grammar, temperature, top-k, top-p, min-p, then seeded noise.

    `repetition_penalty` counts prompt and output, the two others output only. `temperature` 0 is
    greedy. `top_k` 0 keeps all. `choice` and `seed` address the noise. `top_logprobs` None asks for
    no logprobs; 0 for the chosen token's only; `prompt_logprobs` likewise for the prompt's tokens.
    `acceptance` None: drafts never change the output.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    acceptance: TypicalAcceptance | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When an output ends, as far as the worker decides it (stop strings are the gateway's).

    `stop_token_ids` already holds the model's end tokens unless the client ignores them; none of
    them is chosen before `min_tokens` others are, unless a grammar is at its end.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0

    def after(self, num_tokens: int) -> StoppingParams:
        """What is left when `num_tokens` more were put out."""
        min_tokens = max(0, self.min_tokens - num_tokens)
        return StoppingParams(self.max_tokens - num_tokens, self.stop_token_ids, min_tokens)

    def before(self, num_tokens: int) -> StoppingParams:
        """What it was `num_tokens` ago, as far as that matters from now on."""
        min_tokens = self.min_tokens + num_tokens
        return StoppingParams(self.max_tokens + num_tokens, self.stop_token_ids, min_tokens)
