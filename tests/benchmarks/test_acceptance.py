"""The formulas that `acceptance.py` reports, the pairs it logs, and that it finds what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from acceptance import Options, measure
from acceptance_report import Point, faults
from coupling import argmax_acceptance, coupled_acceptance, filtered, lower_bound, optimum, simulate
from decode_workloads import TINY
from hypothesis import given
from hypothesis import strategies as st

from hocket.execution.sampling.sampler import Sampler
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams

weight = st.sampled_from([0.0, 0.0, 1e-12, 0.1, 0.5, 1.0]) | st.floats(1e-9, 1.0)


@given(st.lists(st.tuples(weight, weight), min_size=1, max_size=12))
def test_the_sorted_formula_is_the_double_sum(pairs: list[tuple[float, float]]) -> None:
    p_V, q_V = np.array(pairs).T.copy()
    p_V[0] += 1e-3  # so that neither is all zero
    q_V[-1] += 1e-3
    p_V, q_V = p_V / p_V.sum(), q_V / q_V.sum()
    both = [x for x in range(len(p_V)) if p_V[x] > 0 and q_V[x] > 0]
    double_sum = sum(1.0 / np.maximum(p_V / p_V[x], q_V / q_V[x]).sum() for x in both)
    assert coupled_acceptance(p_V[None], q_V[None])[0] == pytest.approx(double_sum, abs=1e-12)


def test_an_example_by_hand() -> None:
    p, q = np.array([[0.6, 0.4, 0.0]]), np.array([[0.4, 0.4, 0.2]])
    assert optimum(p, q)[0] == pytest.approx(0.8)
    assert lower_bound(p, q)[0] == pytest.approx(0.8 / 1.2)
    assert argmax_acceptance(p, q)[0] == 0.6
    # x = 0: 1 / (1 + 1 + 0.5), x = 1: 1 / (1.5 + 1 + 0.5)
    assert coupled_acceptance(p, q)[0] == pytest.approx(1 / 2.5 + 1 / 3)
    share = simulate(p, q, 20_000, np.random.default_rng(0)) / 20_000
    assert share == pytest.approx(1 / 2.5 + 1 / 3, abs=0.015)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.8, 0.8), (1.3, 0.5)])
def test_filtered_is_what_the_sampler_samples_from(temperature: float, top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_V = (2.0 * torch.randn(30, generator=generator)).round()  # many ties
    seeds = [SamplingParams(temperature, top_p=top_p, seed=seed) for seed in range(8000)]
    sampled_N = Sampler(30, logits_V.device).sample(
        logits_V.repeat(len(seeds), 1), seeds, [5] * len(seeds)
    )
    shares_V = torch.bincount(sampled_N, minlength=30).numpy() / len(seeds)
    p_V = filtered(logits_V[None].numpy(), temperature, top_p)[0]
    assert (p_V[shares_V > 0.0] > 0.0).all()
    assert (shares_V[p_V > 0.005] > 0.0).all()
    assert np.abs(shares_V - p_V).max() < 4.0 * (0.25 / len(seeds)) ** 0.5


def test_drafts_of_the_embedded_model_are_right_as_often_as_their_logits_say() -> None:
    model = load_model(TINY, "float32", "cpu", batch_invariant=True)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    options = Options(num_prompts=16, output_tokens=24, num_draws=2)
    points = measure(model, options, 3, params)
    assert faults(points) == []
    assert [point.depth for point in points] == [0, 1, 2]
    for point in points:
        assert abs(point.engine - point.coupled) < 4.0 * point.engine_error
        assert point.bound < point.coupled < point.optimum
    # A draft is reached when all before it were right; the last ones of an output may be capped.
    reached = [round(point.num_drafts * point.engine) for point in points]
    assert all(
        points[i + 1].num_drafts <= reached[i] <= points[i + 1].num_drafts + 16 for i in range(2)
    )


def test_an_engine_away_from_the_chance_and_a_broken_bound_are_faults() -> None:
    point = Point(
        k=1,
        depth=0,
        temperature=1.0,
        top_p=1.0,
        num_drafts=10_000,
        optimum=0.7,
        coupled=0.65,
        bound=0.55,
        argmax=0.2,
        slack=0.0,
        simulated=0.65,
        simulated_error=0.002,
        sampled=0.65,
        sampled_error=0.002,
        engine=0.66,
        engine_error=0.004,
    )
    assert faults([point]) == []
    for wrong in (
        replace(point, engine=0.68),
        replace(point, sampled=0.63),
        replace(point, simulated=0.67),
        replace(point, slack=-0.001),
    ):
        assert len(faults([wrong])) == 1
