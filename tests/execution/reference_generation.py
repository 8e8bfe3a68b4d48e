"""What an output has to be, written down plainly: one token at a time, each from nothing.

For every new token the model computes the whole prefix in one forward pass over a fresh cache; its
logits are processed densely, in the order and by the formulas of `constraints.py` and `sampler.py`
in `hocket/execution/sampling`, but in other code: of that it takes the noise function only. In
batch-invariant mode an engine has to say the same, whatever it drafts, caches and batches.

Arithmetic is float32 wherever bits decide (logits, temperature, noise); weights are float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch
import xgrammar

from hocket.execution.sampling.noise import gumbel_noise, keys_tensor, position_key
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import FinishReason, TokenLogprobs

F32 = np.float32
LOGPROB_TOLERANCE = 4e-6
"""Half a dozen float32 roundings of values below 16."""


@dataclass(frozen=True)
class Generated:
    """An output; `logprobs` is empty or one per token, `prompt_logprobs` begin with the second
    token of the prompt."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def generate(
    model: Transformer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    stopping: StoppingParams,
    grammar: xgrammar.CompiledGrammar | None = None,
) -> Generated:
    """The output that follows `prompt`; `grammar` is what `sampling.grammar` compiles to."""
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    while True:
        raw_TV = raw_logits(model, [*prompt, *output])
        if not output and sampling.prompt_logprobs is not None:
            prompt_logprobs = [
                token_logprobs(row, token, sampling.prompt_logprobs)
                for row, token in zip(raw_TV, prompt[1:], strict=False)
            ]
        processed = constrained(raw_TV[-1], prompt, output, sampling, stopping, grammar)
        token = sample(processed, sampling, position=len(prompt) + len(output))
        output.append(token)
        if sampling.top_logprobs is not None:
            logprobs.append(token_logprobs(raw_TV[-1], token, sampling.top_logprobs))
        is_stop = token in stopping.stop_token_ids
        if is_stop or len(output) == stopping.max_tokens:
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            return Generated(tuple(output), reason, tuple(logprobs), tuple(prompt_logprobs))


def raw_logits(model: Transformer, token_ids: Sequence[int]) -> np.ndarray:
    """The logits behind every token, float32 [T, V], from one pass over an empty cache."""
    layout = model.kv_layout()
    cache = PagedCache(layout, layout.blocks_for(len(token_ids)), model.device)
    table = list(range(cache.pool.num_blocks))
    with torch.inference_mode():
        hidden_TH = model.forward(StepInputs.build([(token_ids, 0, table)], model.device), cache)
        return model.logits(hidden_TH).numpy()


def constrained(
    raw: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
    stopping: StoppingParams,
    grammar: xgrammar.CompiledGrammar | None = None,
) -> np.ndarray:
    """Penalties, bias, masks: float32 [V], of the position behind prompt and output."""
    logits = raw.copy()
    penalty = F32(sampling.repetition_penalty)
    for token in {*prompt, *output}:
        old = logits[token]
        logits[token] = old / penalty if old > 0 else old * penalty
    for token, count in Counter(output).items():
        often = F32(sampling.frequency_penalty) * F32(count)
        logits[token] -= often + F32(sampling.presence_penalty)
    for token, bias in sampling.logit_bias:
        logits[token] += F32(bias)
    if grammar is not None:
        for token in set(range(len(logits))) - allowed_tokens(grammar, output, len(logits)):
            logits[token] = -np.inf
    if len(output) < stopping.min_tokens:
        held_back = logits.copy()
        held_back[sorted(stopping.stop_token_ids)] = -np.inf
        if held_back.max() > -np.inf:  # else nothing but the end can follow
            logits = held_back
    return logits


def allowed_tokens(
    grammar: xgrammar.CompiledGrammar, output: Sequence[int], vocab_size: int
) -> set[int]:
    """What a matcher that has taken all of `output` from the start lets follow; the end, if
    anything, follows the end."""
    end_tokens = set(grammar.tokenizer_info.stop_token_ids)
    matcher = xgrammar.GrammarMatcher(grammar)
    for token in output:
        if matcher.is_terminated():
            assert token in end_tokens, (token, output)
        else:
            assert matcher.accept_token(token), (token, output)
    if matcher.is_terminated():
        return end_tokens
    bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
    matcher.fill_next_token_bitmask(bitmask)
    words = bitmask[0].tolist()
    return {token for token in range(vocab_size) if words[token // 32] >> token % 32 & 1}


def sample(logits: np.ndarray, sampling: SamplingParams, position: int) -> int:
    """Temperature, top-k, top-p, min-p, noise, the largest; ties to the lowest id."""
    if sampling.temperature == 0.0:
        return first_of_largest(logits, range(len(logits)))
    tempered = (logits - logits.max()) / F32(sampling.temperature)
    values = tempered.tolist()
    kept = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        weights = [math.exp(values[token]) for token in kept]
        needed = sampling.top_p * math.fsum(weights)
        reached = list(accumulate(weights))
        kept = kept[: 1 + sum(weight < needed for weight in reached[:-1])]
    if sampling.min_p > 0.0:
        kept = [token for token in kept if math.exp(values[token]) >= sampling.min_p]
    key = position_key(sampling.seed, sampling.choice, position)
    every_token = torch.arange(len(values))[None]
    noise = gumbel_noise(keys_tensor([key], every_token.device), every_token)[0].numpy()
    return first_of_largest(tempered + noise, kept)


def first_of_largest(scores: np.ndarray, tokens: Sequence[int]) -> int:
    return min(tokens, key=lambda token: (-scores[token], token))


def token_logprobs(raw: np.ndarray, chosen: int, num_top: int) -> TokenLogprobs:
    """Of the model's own distribution."""
    values = raw.tolist()
    largest = max(values)
    total = largest + math.log(math.fsum(math.exp(value - largest) for value in values))
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))[:num_top]
    top = tuple((token, values[token] - total) for token in best)
    return TokenLogprobs(chosen, values[chosen] - total, top)


def assert_logprobs_equal(
    actual: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]
) -> None:
    """The same tokens in the same order, the same values but for float32 rounding."""
    assert [told.token_id for told in actual] == [told.token_id for told in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        values = [ours.logprob, *(value for _, value in ours.top)]
        assert values == pytest.approx(
            [theirs.logprob, *(value for _, value in theirs.top)], rel=0, abs=LOGPROB_TOLERANCE
        )
