"""Requests with any mixture of sampling parameters that a client may ask for."""

from __future__ import annotations

from random import Random

from hocket.execution.local_engine import LocalRequest
from hocket.request_params import SamplingParams, StoppingParams


def random_sampling(random: Random, vocab_size: int) -> SamplingParams:
    """All but a grammar; half of the values are defaults, some are at their limits."""
    choose = random.choice
    return SamplingParams(
        temperature=choose([0.0, 0.0, 0.3, 0.8, 1.0, 1.0, 2.0, 100.0]),
        top_k=choose([0, 0, 0, 1, 2, 7, 40, vocab_size - 1, vocab_size]),
        top_p=choose([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
        min_p=choose([0.0, 0.0, 0.02, 0.3, 1.0]),
        seed=random.getrandbits(64),
        choice=random.randrange(4),
        top_logprobs=choose([None, None, 0, 1, 5, 20]),
        prompt_logprobs=choose([None, None, None, None, 0, 3]),
        repetition_penalty=choose([1.0, 1.0, 0.5, 1.1, 2.0]),
        frequency_penalty=choose([0.0, 0.0, -1.3, 0.7, 2.0]),
        presence_penalty=choose([0.0, 0.0, -2.0, 0.3, 1.7]),
        logit_bias=tuple(
            (token, choose([-100.0, -1.7, 0.3, 5.0, 100.0]))
            for token in sorted(random.sample(range(vocab_size), choose([0, 0, 1, 9])))
        ),
    )


def random_stopping(random: Random, vocab_size: int, most_tokens: int) -> StoppingParams:
    max_tokens = random.randint(1, most_tokens)
    stop = random.sample(range(vocab_size), random.choice([0, 1, 8, vocab_size // 3]))
    min_tokens = random.choice([0, 0, random.randint(1, max_tokens)])
    return StoppingParams(max_tokens, frozenset(stop), min_tokens)


def random_tokens(random: Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(random.randrange(vocab_size) for _ in range(length))


def random_request(random: Random, vocab_size: int, most_tokens: int) -> LocalRequest:
    """Prompts of lengths at which chunks of 48 and blocks of 64 tokens begin and end, too."""
    length = random.choice([1, 2, 9, 30, 47, 48, 49, 63, 64, 65])
    return LocalRequest(
        random_tokens(random, vocab_size, length),
        random_sampling(random, vocab_size),
        random_stopping(random, vocab_size, most_tokens),
    )
