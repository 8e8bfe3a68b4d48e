"""Drafts and target sampled with the same noise: how often they agree, and that nobody can tell.

First the chance that a draft is right: a formula, its bounds, and the sampler against it. Then the
engine's output with three drafts a step, against the exact distribution of a model with so few
tokens that every beginning of an output can be computed; and engines that are wrong on purpose,
which the same test finds.
Shape letters: V vocabulary, N rows or requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.execution.model_runner import ModelRunner
from hocket.execution.sampling.sampler import Sampler
from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams

CPU = torch.device("cpu")
Array = NDArray[np.float64]


def chance(p_V: Array, q_V: Array) -> float:
    """P(both choose the same token), docs/coupled-sampling.md; as it stands there, one by one."""
    tokens = [x for x in range(len(p_V)) if p_V[x] > 0 and q_V[x] > 0]
    return sum(float(1.0 / np.maximum(p_V / p_V[x], q_V / q_V[x]).sum()) for x in tokens)


def distribution(logits_V: torch.Tensor, params: SamplingParams) -> Array:
    """What the sampler should sample from, in the order of the filters as documented."""
    weights = np.exp((logits_V - logits_V.max()).double().numpy() / params.temperature)
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: params.top_k or None]
    before = np.concatenate([[0.0], weights[order].cumsum()[:-1]])
    is_in_nucleus = before < params.top_p * weights[order].sum()
    kept = [token for token, keep in zip(order, is_in_nucleus, strict=True) if keep]
    kept = [token for token in kept if weights[token] >= params.min_p * weights.max()]
    p_V = np.zeros(len(weights))
    p_V[kept] = weights[kept] / weights[kept].sum()
    return p_V


# The chance that a draft is right.

weight = st.just(0.0) | st.floats(1e-6, 1.0)


@given(st.lists(st.tuples(weight, weight), min_size=1, max_size=12))
def test_shared_noise_agrees_within_its_bounds_whatever_the_distributions(
    pairs: list[tuple[float, float]],
) -> None:
    p_V, q_V = np.array(pairs).T.copy()
    p_V[0] += 1e-3  # so that neither is all zero
    q_V[-1] += 1e-3
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    overlap = float(np.minimum(p_V, q_V).sum())  # 1 - D
    assert overlap / (2.0 - overlap) <= chance(p_V, q_V) + 1e-12
    assert chance(p_V, q_V) <= overlap + 1e-12
    assert chance(p_V, q_V) == pytest.approx(chance(q_V, p_V))
    assert chance(p_V, p_V) == pytest.approx(1.0)


def name(params: SamplingParams) -> str:
    return f"T={params.temperature} k={params.top_k} p={params.top_p} min_p={params.min_p}"


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=0.8, top_p=0.8),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=1.5, top_k=7),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.05),
]
NUM_SEEDS = 4000


def agreement(
    target_V: torch.Tensor, draft_V: torch.Tensor, params: SamplingParams, draft_offset: int = 0
) -> float:
    """Share of seeds with which the sampler says the same from both rows."""
    sampler = Sampler(len(target_V), CPU)
    seeds = [replace(params, seed=seed) for seed in range(NUM_SEEDS)]
    target_N = sampler.sample(target_V.repeat(NUM_SEEDS, 1), seeds, [17] * NUM_SEEDS)
    draft_N = sampler.sample(draft_V.repeat(NUM_SEEDS, 1), seeds, [17 + draft_offset] * NUM_SEEDS)
    return float((target_N == draft_N).double().mean())


@pytest.mark.parametrize("params", FILTERS, ids=name)
@pytest.mark.parametrize("error", [0.3, 1.0])
def test_the_sampler_agrees_with_itself_as_often_as_the_formula_says(
    params: SamplingParams, error: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    target_V = 2.0 * torch.randn(60, generator=generator)
    draft_V = target_V + error * torch.randn(60, generator=generator)
    p_V, q_V = distribution(target_V, params), distribution(draft_V, params)
    expected = chance(p_V, q_V)
    tolerance = 4.0 * math.sqrt(expected * (1.0 - expected) / NUM_SEEDS)
    assert abs(agreement(target_V, draft_V, params) - expected) < tolerance


def test_with_noise_of_its_own_a_draft_is_right_by_luck_only() -> None:
    logits_V = torch.linspace(0.0, 1.0, 60)
    p_V = distribution(logits_V, SamplingParams())
    assert agreement(logits_V, logits_V, SamplingParams()) == 1.0
    by_luck = agreement(logits_V, logits_V, SamplingParams(), draft_offset=1)
    assert by_luck == pytest.approx(p_V @ p_V, abs=0.01)


# The engine's output.

VOCAB_SIZE = 8
PROMPT = (1, 2, 3)
NUM_OUTPUT = 4  # tokens whose distribution is looked at
SMALL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    experts_per_token=2,
    num_dense_layers=1,
    num_mtp_layers=1,
)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = random_checkpoint(SMALL, tmp_path_factory.mktemp("small"), seed=2, dtype="float32")
    return load_model(folder, "float32", "cpu", False)


@pytest.fixture(scope="module")
def logits(small_model: Transformer) -> torch.Tensor:
    """The model's own after every beginning (a, b, c) of an output: [V, V, V, 4, V], of which
    [a, b, c, j] follows its first j tokens."""
    beginnings = list(product(range(VOCAB_SIZE), repeat=NUM_OUTPUT - 1))
    cache = PagedCache(small_model.kv_layout(), len(beginnings), CPU)
    parts: list[SequenceInput] = [
        ([*PROMPT, *tokens], 0, [block]) for block, tokens in enumerate(beginnings)
    ]
    with torch.inference_mode():
        hidden_TH = small_model.forward(StepInputs.build(parts, CPU), cache)
        logits_TV = small_model.logits(hidden_TH)
    rows = logits_TV.view(len(beginnings), -1, VOCAB_SIZE)[:, len(PROMPT) - 1 :]
    return rows.reshape(*[VOCAB_SIZE] * (NUM_OUTPUT - 1), NUM_OUTPUT, VOCAB_SIZE)


def exact(logits: torch.Tensor, params: SamplingParams) -> Array:
    """P(a, b, c, d) of the first four tokens, [V, V, V, V]."""
    joint = np.ones([VOCAB_SIZE] * NUM_OUTPUT)
    for a, b, c in product(range(VOCAB_SIZE), repeat=NUM_OUTPUT - 1):
        p0, p1, p2, p3 = (distribution(row, params) for row in logits[a, b, c])
        joint[a, b, c] = p0[a] * p1[b] * p2[c] * p3
    return joint


class StaleNoiseSampler(Sampler):
    """Wrong: two neighbours share their noise."""

    def sample(
        self, logits_NV: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> torch.Tensor:
        return super().sample(logits_NV, params, [position // 2 for position in positions])


def outputs(
    model: Transformer,
    params: SamplingParams,
    num_requests: int,
    sampler: type[Sampler] = Sampler,
    synthetic_acceptance: float = 0.0,
) -> tuple[Array, float]:
    """Counts of the first four tokens of requests with other seeds, [V, V, V, V], from an engine
    with three drafts a step; and the share of drafts that were right."""
    limits = LocalEngineLimits(num_blocks=512, num_drafts=3, max_batch=512, chunk_tokens=2048)
    engine = LocalEngine(model, limits)
    engine.runner = ModelRunner(
        model,
        engine.cache,
        MTPDraftSource(model, engine.cache),
        synthetic_acceptance=synthetic_acceptance,
    )
    engine.runner.choice.sampler = sampler(VOCAB_SIZE, CPU)
    stopping = StoppingParams(NUM_OUTPUT + 1)  # one more, so that the fourth can be a draft
    requests = [
        LocalRequest(PROMPT, replace(params, seed=seed), stopping) for seed in range(num_requests)
    ]
    counts = np.zeros([VOCAB_SIZE] * NUM_OUTPUT)
    drafted = accepted = 0
    for result in engine.generate(requests):
        counts[result.token_ids[:NUM_OUTPUT]] += 1
        drafted += result.usage.drafts.drafted_tokens
        accepted += result.usage.drafts.accepted_tokens
    return counts, accepted / drafted


def p_values(counts: Array, joint: Array) -> dict[str, float]:
    """Of chi-square tests of each token, each pair of neighbours, and all four together."""
    every = range(NUM_OUTPUT)
    groups = [*([j] for j in every), *([j, j + 1] for j in every[:-1]), list(every)]
    found: dict[str, float] = {}
    for group in groups:
        others = tuple(j for j in every if j not in group)
        found[str(group)] = chi_square(
            counts.sum(axis=others).ravel(), joint.sum(axis=others).ravel() * counts.sum()
        )
    return found


def chi_square(counts: Array, expected: Array) -> float:
    """P(a deviation at least as large); cells with less than 5 expected are one. 0 when something
    came that can't."""
    if counts[expected == 0.0].any():
        return 0.0
    is_large = expected >= 5.0
    observed = np.append(counts[is_large], counts[~is_large].sum())
    wanted = np.append(expected[is_large], expected[~is_large].sum())
    observed, wanted = observed[wanted > 0.0], wanted[wanted > 0.0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half = torch.tensor([(len(wanted) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


SAMPLED = [
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=5, min_p=0.1),
]


@pytest.mark.parametrize("params", SAMPLED, ids=name)
def test_output_with_drafts_has_the_models_own_distribution(
    small_model: Transformer, logits: torch.Tensor, params: SamplingParams
) -> None:
    counts, share_right = outputs(small_model, params, 3000)
    found = p_values(counts, exact(logits, params))
    assert min(found.values()) > 1e-3, found
    assert 0.1 < share_right < 0.9


def test_the_same_test_finds_noise_that_comes_twice(
    small_model: Transformer, logits: torch.Tensor
) -> None:
    counts, _ = outputs(small_model, SAMPLED[0], 1000, StaleNoiseSampler)
    assert min(p_values(counts, exact(logits, SAMPLED[0])).values()) < 1e-9


def test_the_same_test_finds_drafts_that_are_kept_too_often(
    small_model: Transformer, logits: torch.Tensor
) -> None:
    counts, _ = outputs(small_model, SAMPLED[0], 3000, synthetic_acceptance=0.2)
    assert min(p_values(counts, exact(logits, SAMPLED[0])).values()) < 1e-9
