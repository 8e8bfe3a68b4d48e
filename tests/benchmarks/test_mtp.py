"""What the benchmark of multi-token prediction counts; how long anything took decides nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decode_workloads import PEERS_CONFIG, TINY, WORKLOADS, Workload, prepare_checkpoint, prompts_of
from mtp import Options, make_variants, measure_point, run_pass, set_up_controller
from mtp_report import Point, Row, format_point, goals

from hocket.execution.local_engine import LocalEngine, LocalRequest
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams

OPTIONS = Options((1, 2), (0, 2), (0.8,), accuracy=1.0, seconds=0.0, scale=0.25)
SMALL = Workload(
    "small",
    "few small layers",
    replace(PEERS_CONFIG, vocab_size=512, hidden_size=64, num_layers=2, num_experts=4),
    prompt_tokens=8,
)


def test_all_variants_put_out_what_the_engine_says_and_count_the_same_tokens() -> None:
    model = load_model(TINY, torch.bfloat16, "cpu", batch_invariant=True)
    controller = set_up_controller(model, 2, 2)
    tiny = WORKLOADS["tiny"]
    span = OPTIONS.span(tiny, batch=2)
    assert span.num_requests > span.batch, "seats pass from one request to the next"
    variants = list(make_variants(model, tiny, OPTIONS, 0.8, span, controller))
    for _ in range(2):
        run_pass(variants)

    prompts = prompts_of(tiny, span.num_requests, model.config.vocab_size)
    stopping = StoppingParams(span.tokens_each + 1)  # the first one is prefill's
    told = LocalEngine(model).generate(
        [
            LocalRequest(tuple(prompt), SamplingParams(temperature=0.8, seed=i), stopping)
            for i, prompt in enumerate(prompts)
        ]
    )
    for variant in variants:
        assert [variant.outputs[key] for key in sorted(variant.outputs, key=str)] == [
            result.token_ids[1:] for result in told
        ]
        assert all(len(step.seconds) == 2 for step in variant.steps)
    plain, drafting = variants[0], variants[1]
    assert plain.num_steps == span.tokens_each
    assert drafting.num_steps < span.tokens_each
    assert sum(step.seats for step in plain.steps) == span.num_requests * span.tokens_each


def test_scripted_drafts_that_are_all_right_emit_k_plus_1_tokens_a_step(tmp_path: Path) -> None:
    path = prepare_checkpoint(SMALL, tmp_path)
    model = load_model(path, torch.bfloat16, "cpu", batch_invariant=True)
    controller = set_up_controller(model, 2, 2)
    points = [measure_point(model, SMALL, OPTIONS, (0.8, batch), controller) for batch in (1, 2)]
    for point in points:
        plain, drafting, adaptive = point.rows
        assert (plain.acceptance_length, plain.gain) == (1.0, 1.0)
        assert drafting.acceptance_length == pytest.approx(3.0)
        assert drafting.survival == (1.0, 1.0)
        assert adaptive.drafts <= 2.0
        assert point.is_synthetic
        assert "adaptive" in format_point(point)


def row(variant: str, tokens_per_s: float, ceiling: float = 0.0) -> Row:
    gain = tokens_per_s / 100.0
    return Row(variant, tokens_per_s, 1.0, gain, 2.0, 0.5, (0.5,), 1.0, ceiling=ceiling)


def point(adaptive: float, batch: int = 1) -> Point:
    rows = (row("k=0", 100.0), row("k=1", 150.0, 1.6), row("k=2", 120.0, 1.5))
    return Point("tiny", False, 0.0, batch, 8, 32, 1, (*rows, row("adaptive", adaptive)))


def test_goals_look_at_batch_1_and_at_the_worst_of_adaptive() -> None:
    gain, share, against_best, against_none = goals([point(149.0), point(90.0, batch=8)])
    assert gain.found == pytest.approx(1.5)
    assert gain.is_met
    assert share.found == pytest.approx(1.2 / 1.5)
    assert "k=2" in share.where
    assert not share.is_met
    assert against_best.found == pytest.approx(0.6)
    assert "1 below the goal" in against_best.where
    assert against_none.found == pytest.approx(0.9)
    assert not against_none.is_met
    assert all(goal.is_met for goal in goals([point(149.0)])[2:])
