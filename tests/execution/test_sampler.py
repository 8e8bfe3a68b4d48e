"""The sampler against a plain one-row reference, against statistics, and in company."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.execution.sampling.sampler import HEAD_WIDTHS, LEAST_DIRECT_WIDTH, Sampler
from hocket.execution.sampling.token_filters import SMALL_VOCABULARY
from hocket.request_params import SamplingParams
from tests.execution.reference_sampler import (
    kept_tokens,
    random_logits,
    random_params,
    reference_sample,
)

CPU = torch.device("cpu")
VOCABULARIES = [5, 31, 128, 700, SMALL_VOCABULARY, SMALL_VOCABULARY + 1, 12_800, 50_257, 129_280]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(VOCABULARIES), st.randoms(use_true_random=False))
def test_every_row_equals_the_plain_reference(vocab_size: int, random: Random) -> None:
    rows = random.randint(1, 5)
    logits = random_logits(random, rows, vocab_size)
    params = [random_params(random, vocab_size) for _ in range(rows)]
    positions = [random.randrange(10_000) for _ in range(rows)]
    sampled = Sampler(vocab_size, CPU).sample(logits, params, positions).tolist()
    expected = [
        reference_sample(row, row_params, position)
        for row, row_params, position in zip(logits, params, positions, strict=True)
    ]
    assert sampled == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, temperature=0.8),  # the nucleus is near the top
        SamplingParams(top_p=0.95),  # it is not: by hash
        SamplingParams(top_p=0.2, temperature=2.0),  # the best tokens lie outside, again and again
        SamplingParams(min_p=1e-4),
        SamplingParams(min_p=1e-4, top_p=0.9),
        SamplingParams(),
    ],
)
def test_rows_that_the_likeliest_tokens_do_not_decide_equal_the_reference(
    params: SamplingParams,
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 60_000, generator=generator) * 3.0
    rows = [replace(params, seed=seed) for seed in range(40)]
    sampled = Sampler(60_000, CPU).sample(logits, rows, [7] * 40).tolist()
    order = logits.argsort(dim=-1, descending=True).tolist()
    ranks = [row.index(token) for row, token in zip(order, sampled, strict=True)]
    assert max(ranks) >= HEAD_WIDTHS[0]  # else the likeliest tokens were enough
    assert sampled == [reference_sample(*row, 7) for row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("top_p", [0.3, 0.012])
def test_logits_that_are_equal_once_tempered_stand_by_id_in_a_large_nucleus(top_p: float) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(30, 12_800, generator=generator) * 1e-8  # vanishes beside the maximum
    logits[:, 5000] = 3.0
    params = [SamplingParams(top_p=top_p, seed=seed) for seed in range(30)]
    sampled = Sampler(12_800, CPU).sample(logits, params, [0] * 30).tolist()
    assert sampled == [reference_sample(*row, 0) for row in zip(logits, params, strict=True)]
    assert max(set(sampled) - {5000}) < (top_p + 0.01) * 12_800


@pytest.mark.parametrize("vocab_size", [5, 700, 12_801])
def test_rows_without_a_number_get_a_valid_id(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2] = -torch.tensor(torch.nan)
    logits[3, vocab_size // 2] = torch.nan
    logits[4, vocab_size // 2] = torch.inf
    sampler = Sampler(vocab_size, CPU)
    random = Random(1)
    for _ in range(60):
        params = [random_params(random, vocab_size)] * 5
        sampled = sampler.sample(logits, params, [0] * 5)
        assert all(0 <= token < vocab_size for token in sampled.tolist())
        sampler.logprobs(logits, sampled, [3] * 5)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([100, 4096, 50_000]), st.randoms(use_true_random=False))
def test_a_row_is_bit_equal_alone_and_in_any_company(vocab_size: int, random: Random) -> None:
    sampler = Sampler(vocab_size, CPU)
    rows = random.randint(2, 12)
    logits = random_logits(random, rows, vocab_size)
    params = [random_params(random, vocab_size) for _ in range(rows)]
    positions = [random.randrange(10_000) for _ in range(rows)]
    num_top = [row.top_logprobs or 0 for row in params]
    sampled = sampler.sample(logits, params, positions)
    logprobs = sampler.logprobs(logits, sampled, num_top)
    for row in range(rows):
        alone = sampler.sample(logits[row : row + 1], [params[row]], [positions[row]])
        assert alone.tolist() == [sampled[row]]
        part = sampler.logprobs(logits[row : row + 1], alone, [num_top[row]])
        assert part == [logprobs[row]]


def test_greedy_ties_go_to_the_lowest_token_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, [4999, 17, 1234]] = 3.0
    assert Sampler(5000, CPU).sample(
        logits, [SamplingParams(temperature=0.0)] * 2, [1, 2]
    ).tolist() == [0, 17]


def test_top_k_and_top_p_ties_keep_the_lowest_token_ids() -> None:
    sampler = Sampler(1000, CPU)
    logits = torch.zeros(1, 1000)
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.003)):
        rows = [replace(params, seed=seed) for seed in range(60)]
        seen = set(sampler.sample(logits.expand(60, -1), rows, [0] * 60).tolist())
        assert seen == {0, 1, 2}


def test_a_nucleus_of_more_than_the_candidates_is_measured_against_all_that_top_k_left() -> None:
    top_k = LEAST_DIRECT_WIDTH + 44
    sampler = Sampler(3 * LEAST_DIRECT_WIDTH, CPU)
    logits = torch.zeros(400, 3 * LEAST_DIRECT_WIDTH)
    params = [SamplingParams(top_k=top_k, top_p=0.3, seed=seed) for seed in range(400)]
    assert sampler.sample(logits, params, [0] * 400).max().item() < 0.3 * top_k


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1.0, 30.0, 29.9, -torch.inf]])
    sampler = Sampler(4, CPU)
    assert sampler.sample(logits, [SamplingParams(temperature=1e-38)], [0]).item() == 1
    seen = {
        sampler.sample(logits, [SamplingParams(temperature=1e6, seed=seed)], [0]).item()
        for seed in range(100)
    }
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4, temperature=1.5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
    ],
)
def test_samples_follow_the_filtered_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 seeds; the bound is the 0.9999 quantile (Wilson and Hilferty)."""
    logits = torch.tensor([1.2, 0.3, -0.4, 2.0, 0.0, -1.5, 0.9, 1.1, -0.2, 0.5])
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)
    order = probs.argsort(descending=True)
    keep = order[: params.top_k or len(order)]
    before = probs[keep].cumsum(0) - probs[keep]
    keep = keep[before < params.top_p * probs[keep].sum()]
    keep = keep[probs[keep] >= params.min_p * probs.max()]
    target = torch.zeros(10, dtype=torch.float64)
    target[keep] = probs[keep] / probs[keep].sum()

    draws = 20_000
    rows = [
        SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p, seed=s)
        for s in range(draws)
    ]
    sampled = Sampler(10, CPU).sample(logits.expand(draws, 10), rows, [5] * draws)
    counts = torch.bincount(sampled, minlength=10).double()
    assert counts[target == 0].sum() == 0
    expected = target[target > 0] * draws
    chi_square = ((counts[target > 0] - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def test_positions_of_one_request_are_independent_draws() -> None:
    logits = torch.zeros(4000, 8)
    sampled = Sampler(8, CPU).sample(logits, [SamplingParams(seed=5)] * 4000, range(4000))
    pairs = torch.bincount(sampled[:-1] * 8 + sampled[1:], minlength=64).double()
    expected = 3999 / 64
    assert ((pairs - expected) ** 2 / expected).sum().item() < 63 * 1.6


def test_drafts_with_the_same_noise_are_accepted_near_the_optimum() -> None:
    """FACTS: target logits N(0, 3), draft logits off by N(0, 0.3), T = 1, 4,096 tokens.

    Same noise .85, argmax drafts .19, the optimum .89.
    """
    torch.manual_seed(1)
    rows, vocab_size = 600, 4096
    target_logits = torch.randn(rows, vocab_size) * 3.0
    draft_logits = target_logits + torch.randn(rows, vocab_size) * 0.3
    sampler = Sampler(vocab_size, CPU)
    params = [SamplingParams(seed=9)] * rows
    target = sampler.sample(target_logits, params, range(rows))
    coupled = sampler.sample(draft_logits, params, range(rows))
    argmax = draft_logits.argmax(dim=-1)
    accepted = (coupled == target).double().mean().item()
    assert 0.80 < accepted < 0.90
    assert (argmax == target).double().mean().item() < 0.35 * accepted


def test_a_draft_that_ignores_the_filter_of_the_target_is_accepted_less() -> None:
    torch.manual_seed(2)
    rows, vocab_size = 1500, 512
    target_logits = torch.randn(rows, vocab_size) * 3.0
    draft_logits = target_logits + torch.randn(rows, vocab_size) * 0.7
    sampler = Sampler(vocab_size, CPU)
    with_filter = [SamplingParams(seed=3, top_p=0.8)] * rows
    target = sampler.sample(target_logits, with_filter, range(rows))
    same = sampler.sample(draft_logits, with_filter, range(rows))
    ignoring = sampler.sample(draft_logits, [SamplingParams(seed=3)] * rows, range(rows))
    assert (same == target).double().mean() > (ignoring == target).double().mean() + 0.02


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([5, 700, 12_801]), st.randoms(use_true_random=False))
def test_probabilities_are_those_of_the_tokens_that_the_filters_keep(
    vocab_size: int, random: Random
) -> None:
    logits = random_logits(random, 3, vocab_size)
    params = [replace(random_params(random, vocab_size), temperature=t) for t in (0.01, 0.8, 2.0)]
    found = Sampler(vocab_size, CPU).probabilities(logits, params)
    for row, row_params, probabilities in zip(logits, params, found.numpy(), strict=True):
        x, kept = kept_tokens(row, row_params)
        weights = np.zeros(vocab_size)
        weights[kept] = np.exp(x[kept].astype(np.float64))
        np.testing.assert_allclose(probabilities, weights / weights.sum(), rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([5, 700, 12_801]), st.randoms(use_true_random=False))
def test_top_logprobs_are_sorted_by_logit_then_id(vocab_size: int, random: Random) -> None:
    logits = random_logits(random, 3, vocab_size)
    num_top = [random.choice([0, 1, 5, 20]) for _ in range(3)]
    found = Sampler(vocab_size, CPU).logprobs(logits, torch.tensor([0, 1, 4]), num_top)
    expected = torch.log_softmax(logits, dim=-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices.tolist()
    for row, (entry, token, top) in enumerate(zip(found, [0, 1, 4], num_top, strict=True)):
        assert (entry.token_id, entry.logprob) == (token, expected[row, token].item())
        best = order[row][:top]
        assert entry.top == tuple((i, expected[row, i].item()) for i in best)


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
    first, second = Sampler(4, CPU).logprobs(logits, torch.tensor([2, 3]), [3, 0])
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert first.token_id == 2
    assert first.logprob == pytest.approx(expected[0, 2].item(), abs=1e-6)
    assert [token for token, _ in first.top] == [1, 3, 2]
    assert [value for _, value in first.top] == pytest.approx(
        expected[0, [1, 3, 2]].tolist(), abs=1e-6
    )
    assert second.top == ()
    assert second.logprob == pytest.approx(-math.log(4), abs=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_chooses_the_same_tokens() -> None:
    random = Random(5)
    same: list[bool] = []
    for vocab_size in (700, 50_257):
        logits = random_logits(random, 64, vocab_size)
        params = [random_params(random, vocab_size) for _ in range(64)]
        on_cpu = Sampler(vocab_size, CPU).sample(logits, params, range(64))
        cuda = torch.device("cuda")
        on_cuda = Sampler(vocab_size, cuda).sample(logits.to(cuda), params, range(64))
        same += (on_cpu == on_cuda.cpu()).tolist()
    assert sum(same) >= len(same) - 1  # float64 logarithms may differ in their last bit
