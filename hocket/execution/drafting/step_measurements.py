"""What steps cost on this machine, measured before the first request: the draft controller's start.

A few draft and verify passes over made-up sequences, from one row to a full batch; the blocks that
they write into are given back. Real steps refine the curves later (`hocket.scheduling.step_costs`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from statistics import fmean

import torch

from hocket.clock import Clock
from hocket.execution.model_runner import ModelRunner
from hocket.execution.sequence import Sequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.step_costs import Point, StepCosts, StepTimes
from hocket.types import RequestKey

_REPEATS = 3
_MOST_S = 3.0
"""Larger batches are not measured any more once this much time has passed."""
_CONTEXT_TOKENS = 32

_logger = logging.getLogger(__name__)


def measure_step_costs(
    runner: ModelRunner, max_batch: int, max_drafts: int, clock: Clock
) -> StepCosts:
    """Times steps of 1, 2, 4, ... `max_batch` requests, without drafts and with one each, and one
    with `max_drafts` each. Of every kind the quickest of three; of two with as many rows, of more
    requests or more drafts, the mean. Takes some seconds at most, and the blocks of at least one
    sequence."""
    started = clock.now()
    sizes = [2**i for i in range(max_batch.bit_length()) if 2**i < max_batch] + [max_batch]
    steps = [(size, drafts) for size in sizes for drafts in (0, 1)] + [(max_batch, max_drafts)]
    draft: list[Point] = []
    verify: defaultdict[int, list[float]] = defaultdict(list)
    for size, drafts in steps:
        if draft and (size > runner.cache.pool.num_free or clock.now() - started > _MOST_S):
            break
        timings = [_time_step(runner, size, drafts) for _ in range(_REPEATS)]
        if drafts == 1:
            rows = timings[0].draft_rows
            draft.append((rows[0], min(times.draft_s for times in timings) / len(rows)))
        verify[size * (1 + drafts)].append(min(times.verify_s for times in timings))
    points = [(rows, fmean(seconds)) for rows, seconds in verify.items()]
    _logger.info("step costs measured", extra={"draft_s": draft, "verify_s": points})
    return StepCosts.from_points(draft, points)


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
        waiting=WaitingRows.of(hidden_RH.to(device, runner.model.dtype), num_rows - 1),
    )
