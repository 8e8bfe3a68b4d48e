"""What steps cost on this machine, measured before the first request: the draft controller's start.

A few draft and verify passes over made-up sequences, from one row to a full batch; the blocks that
they write into are given back. Real steps refine the curves later (`hocket.scheduling.step_costs`).
"""

from __future__ import annotations

import logging

import torch

from hocket.clock import Clock
from hocket.execution.model_runner import ModelRunner
from hocket.execution.sequence import Sequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.step_costs import Point, StepCosts, StepTimes
from hocket.types import RequestKey

_LEAST_REPEATS, _MOST_REPEATS, _REPEAT_S = 3, 30, 0.05
"""A kind of step is taken so often, and for so long: the first ones are slow."""
_MOST_S = 3.0
"""Larger batches are not measured any more once this much time has passed."""
_CONTEXT_TOKENS = 32

_logger = logging.getLogger(__name__)


def measure_step_costs(
    runner: ModelRunner, max_batch: int, max_drafts: int, clock: Clock
) -> StepCosts:
    """Times steps of 1, 2, 4, ... `max_batch` requests, without drafts and with one each, and one
    with `max_drafts` each, of every kind the quickest of some. Takes some seconds at most, and the
    blocks of at least one sequence."""
    started = clock.now()
    sizes = [2**i for i in range(max_batch.bit_length()) if 2**i < max_batch] + [max_batch]
    steps = [(size, drafts) for size in sizes for drafts in (0, 1)] + [(max_batch, max_drafts)]
    draft: list[Point] = []
    quickest: list[StepTimes] = []
    for size, drafts in steps:
        if draft and (size > runner.cache.pool.num_free or clock.now() - started > _MOST_S):
            break
        timings: list[StepTimes] = []
        began = clock.now()
        while len(timings) < _MOST_REPEATS:
            timings.append(_time_step(runner, size, drafts))
            if len(timings) >= _LEAST_REPEATS and clock.now() - began > _REPEAT_S:
                break
        if drafts == 1:
            rows = timings[0].draft_rows
            draft.append((rows[0], min(times.draft_s for times in timings) / len(rows)))
        quickest.append(min(timings, key=lambda times: times.verify_s))
    costs = StepCosts.from_steps(draft, quickest)
    measured = [(step.num_requests, step.verify_rows, step.verify_s) for step in quickest]
    told = {"draft_s": draft, "verify_s": measured, "request_s": costs.request_s}
    _logger.info("step costs measured", extra=told)
    return costs


def _time_step(runner: ModelRunner, size: int, num_drafts: int) -> StepTimes:
    blocks = runner.cache.pool.allocate(size)
    try:
        sequences = [_sequence(runner, index, block) for index, block in enumerate(blocks)]
        runner.decode(sequences, [num_drafts] * size)
    finally:
        runner.cache.pool.free(blocks)
    times = runner.last_step
    assert times is not None, "a step that worked"
    return times


def _sequence(runner: ModelRunner, index: int, block: int) -> Sequence:
    """Of tokens unlike those of the others, so that they meet as many experts as real ones."""
    config, device = runner.model.config, runner.cache.device
    tokens = [(index * 7919 + i * 104729) % config.vocab_size for i in range(_CONTEXT_TOKENS)]
    noise = torch.Generator().manual_seed(index)
    num_rows = max(1, config.num_mtp_layers)
    hidden_RH = torch.randn(num_rows, config.hidden_size, generator=noise)
    return Sequence(
        key=RequestKey(f"measured-{index}"),
        token_ids=tokens,
        prompt_tokens=_CONTEXT_TOKENS - 1,
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(_CONTEXT_TOKENS),
        block_table=[block],
        num_computed=_CONTEXT_TOKENS - 1,
        waiting=WaitingRows(hidden_RH.to(device, runner.model.dtype), num_rows - 1),
    )
