"""Transformers' `generate` as `decode.py` measures it: step by step, in turn with Hocket's steps.

On a machine that does other things too, two windows of time can't be compared. So `generate`'s
own stopping criterion, which it calls once a step, takes a step of Hocket before it returns: both
engines are warm, meet the same load, and each finds the caches as the other left them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from decode_report import Options, Point, format_point
from decode_workloads import Workload, prompts_of

WARM_UP_STEPS = 3


def measure_transformers(
    path: Path,
    workload: Workload,
    options: Options,
    hocket_step_of: Callable[[int], Callable[[], object]],
) -> list[Point]:
    """`generate` on the checkpoint at `path`, every batch size; `hocket_step_of(batch)` gives
    what takes a plain step of that many sequences."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # its load report lists the MTP tensors that it does not use
    logging.disable_progress_bar()
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    points: list[Point] = []
    for batch in options.batches:
        prompts = prompts_of(workload, batch, model.config.vocab_size)
        num_tokens = options.steps + WARM_UP_STEPS
        clock = _StepClock(hocket_step_of(batch))
        cast(Any, model).generate(
            torch.tensor(prompts),
            attention_mask=torch.ones(batch, workload.prompt_tokens, dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=options.temperature > 0,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
        step_s = statistics.median(clock.their_times[WARM_UP_STEPS:])
        point = Point(
            engine="transformers",
            batch=batch,
            step_ms=step_s * 1e3,
            tokens_per_s=batch / step_s,
            t_step_1_ms=step_s * 1e3,
            prefill_tokens_per_s=batch * workload.prompt_tokens / clock.their_times[0],
            hocket_step_ms=statistics.median(clock.our_times[WARM_UP_STEPS:]) * 1e3,
        )
        points.append(point)
        print(f"  {format_point(point)}", file=sys.stderr, flush=True)
    return points


class _StepClock:
    """A stopping criterion that never stops: notes how long each step took, then takes ours."""

    def __init__(self, hocket_step: Callable[[], object]) -> None:
        self.their_times: list[float] = []
        self.our_times: list[float] = []
        self._hocket_step = hocket_step
        self._start = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        end = time.perf_counter()
        self.their_times.append(end - self._start)
        self._hocket_step()
        self._start = time.perf_counter()
        self.our_times.append(self._start - end)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
