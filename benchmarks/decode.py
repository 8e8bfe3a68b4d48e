"""Decode speed on one machine: Hocket's engine with k = 0..4 drafts, beside transformers' own.

    python benchmarks/decode.py --short                      about a minute
    python benchmarks/decode.py --json results.json          the long form

Three workloads (benchmarks/README.md says what each shows): `tiny`, the embedded model with its own
drafts on text it never saw; `peers`, a random 108 M model of the shape on which other engines were
measured; `large`, a random model whose weights exceed the last-level cache. On random models the
continuation is scripted and drafts of known accuracy are injected (SYNTHETIC: the cost of drafting
is real, its result is not). Transformers decodes prompts of the same length, step by step in turn
with Hocket.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from decode_report import HEADER, Options, Point, format_point
from decode_transformers import WARM_UP_STEPS, measure_transformers
from decode_workloads import (
    WORKLOADS,
    ForcedSampler,
    Workload,
    commit,
    count_parameters,
    prepare_checkpoint,
    prompts_of,
    truth_tokens,
)

from hocket.execution.drafting.speculation import MTPDraftSource, ScriptedDraftSource
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import DraftCounts, RequestKey


def measure_hocket(model: Transformer, workload: Workload, options: Options) -> list[Point]:
    """Every batch size and k of one checkpoint."""
    points: list[Point] = []
    for batch in options.batches:
        for k in options.drafts:
            points.append(measure_point(model, workload, options, batch, k))
            print(f"  {format_point(points[-1])}", file=sys.stderr, flush=True)
    return points


def measure_point(
    model: Transformer, workload: Workload, options: Options, batch: int, k: int
) -> Point:
    """Steps of `batch` sequences with k drafts, in turn with plain steps of as many others and the
    bare passes, so that whatever else the machine does falls on all of them alike."""
    runner, sequences = start_sequences(model, workload, options, batch, k)
    plain_runner, plain = start_sequences(model, workload, options, batch, 0)
    prefill_s = timed(lambda: runner.prefill([PrefillChunk(s, s.prompt_tokens) for s in sequences]))
    plain_runner.prefill([PrefillChunk(s, s.prompt_tokens) for s in plain])
    runs: dict[str, Callable[[], float]] = {
        "plain": lambda: timed(lambda: plain_runner.decode(plain, [0] * batch)),
        "step": lambda: timed(lambda: runner.decode(sequences, [k] * batch)),
        "verify": lambda: time_main_pass(runner, sequences, k),
        "draft": lambda: time_draft_pass(runner, sequences) if k else 0.0,
    }
    for _ in range(WARM_UP_STEPS):
        for run in runs.values():
            run()
    for sequence in sequences:
        sequence.drafts = DraftCounts()
    times = [{name: run() for name, run in runs.items()} for _ in range(options.steps)]
    middle = {name: statistics.median(t[name] for t in times) for name in runs}

    counts = [sequence.drafts for sequence in sequences]
    length = sum(c.emitted_tokens for c in counts) / sum(c.verify_steps for c in counts)
    drafted = sum(c.drafted_tokens for c in counts)
    return Point(
        engine="hocket",
        batch=batch,
        k=k,
        step_ms=middle["step"] * 1e3,
        tokens_per_s=batch * length / middle["step"],
        acceptance_length=length,
        acceptance_rate=sum(c.accepted_tokens for c in counts) / drafted if drafted else 0.0,
        survival=tuple(
            sum(c.accepted_by_position[i] for c in counts)
            / sum(c.drafted_by_position[i] for c in counts)
            for i in range(k)
        ),
        t_step_1_ms=middle["plain"] * 1e3,
        t_verify_ms=middle["verify"] * 1e3,
        t_draft_ms=middle["draft"] * 1e3,
        gain=length * middle["plain"] / middle["step"] if k else 1.0,
        ceiling=length * middle["plain"] / (middle["verify"] + k * middle["draft"]) if k else 1.0,
        prefill_tokens_per_s=sum(s.prompt_tokens for s in sequences) / prefill_s,
    )


def start_sequences(
    model: Transformer, workload: Workload, options: Options, batch: int, k: int
) -> tuple[ModelRunner, list[RunningSequence]]:
    """A runner with a fresh cache and `batch` sequences that have room for every step."""
    vocab_size = model.config.vocab_size
    prompts = prompts_of(workload, batch, vocab_size)
    max_tokens = (k + 1) * (options.steps + WARM_UP_STEPS + 1) + 1
    length = workload.prompt_tokens + max_tokens
    blocks_each = model.kv_layout().blocks_for(length)
    cache = PagedCache(model.kv_layout(), blocks_each * batch, model.device)
    scripts = [truth_tokens(i, length + k + 1, vocab_size) for i in range(batch)]
    drafting = MTPDraftSource(model, cache) if k else None
    if drafting is not None and workload.is_synthetic:
        truth = {RequestKey(str(i)): script for i, script in enumerate(scripts)}
        drafting = ScriptedDraftSource(truth, options.accuracy, vocab_size, drafting)
    runner = ModelRunner(model, cache, drafting)
    if workload.is_synthetic:
        runner.choice.sampler = cast(Sampler, ForcedSampler(runner.choice.sampler, scripts))
    sequences = [
        RunningSequence(
            key=RequestKey(str(i)),
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=options.temperature, seed=i),
            stopping=StoppingParams(max_tokens=max_tokens),
            block_table=cache.pool.allocate(blocks_each),
        )
        for i, prompt in enumerate(prompts)
    ]
    return runner, sequences


@torch.inference_mode()
def time_main_pass(
    runner: ModelRunner,
    sequences: Sequence[RunningSequence],
    k: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of the bare main pass over k + 1 tokens of each sequence, sampling included."""
    first = [sequence.num_computed - k for sequence in sequences]
    parts: list[SequenceInput] = [
        (s.token_ids[f : f + k + 1], f, s.block_table)
        for s, f in zip(sequences, first, strict=True)
    ]
    params = [sequence.sampling for sequence in sequences for _ in range(k + 1)]
    positions = [f + 1 + i for f in first for i in range(k + 1)]

    def run_once() -> None:
        inputs = StepInputs.build(parts, runner.cache.device)
        logits_TV = runner.model.logits(runner.model.forward(inputs, runner.cache))
        runner.choice.sampler.sample(logits_TV, params, positions).tolist()

    return timed(run_once, clock)


@torch.inference_mode()
def time_draft_pass(runner: ModelRunner, sequences: Sequence[RunningSequence]) -> float:
    """Seconds of one bare draft pass over one token of each sequence, sampling included.

    Its entries lie in slots that the next step writes anew.
    """
    model = runner.model
    hidden_SH = torch.randn(
        len(sequences), model.config.hidden_size, dtype=model.dtype, device=model.device
    )
    parts: list[SequenceInput] = [
        ([s.token_ids[-1]], s.num_computed, s.block_table) for s in sequences
    ]
    params = [sequence.sampling for sequence in sequences]
    positions = [sequence.num_computed + 1 for sequence in sequences]

    def run_once() -> None:
        inputs = StepInputs.build(parts, runner.cache.device)
        logits_SV = model.mtp_logits(model.mtp_forward(inputs, hidden_SH, runner.cache))
        runner.choice.sampler.sample(logits_SV, params, positions).tolist()

    return timed(run_once)


def plain_step(
    model: Transformer, workload: Workload, options: Options, batch: int
) -> Callable[[], object]:
    """Takes one plain step of `batch` sequences, which are prefilled here."""
    runner, sequences = start_sequences(model, workload, options, batch, 0)
    runner.prefill([PrefillChunk(s, s.prompt_tokens) for s in sequences])
    return lambda: runner.decode(sequences, [0] * batch)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that `run` takes."""
    start = clock()
    run()
    return clock() - start


def run_workload(
    workload: Workload, options: Options, with_transformers: bool, folder: Path
) -> dict[str, Any]:
    """Measure one workload, print its table, return its JSON."""
    gc.collect()  # the models before this one
    path = prepare_checkpoint(workload, folder)
    drafts = f"injected, accuracy {options.accuracy}" if workload.is_synthetic else "its own"
    text = f"{workload.name}: {workload.shows}; drafts: {drafts}"
    print(text, file=sys.stderr, flush=True)
    model = load_model(
        path, getattr(torch, options.dtype), torch.device("cpu"), options.is_invariant
    )
    num_parameters = count_parameters(path)
    points = measure_hocket(model, workload, options)
    if with_transformers:
        points += measure_transformers(
            path, workload, options, lambda batch: plain_step(model, workload, options, batch)
        )
    print(
        f"\n{text}\n{num_parameters / 1e6:.0f} M parameters, {options.dtype}, temperature "
        f"{options.temperature}, prompts of {workload.prompt_tokens} tokens\n{HEADER}"
    )
    print("\n".join(format_point(point) for point in points), flush=True)
    return {
        "workload": workload.name,
        "shows": workload.shows,
        "drafts": drafts,
        "num_parameters": num_parameters,
        "prompt_tokens": workload.prompt_tokens,
        "points": [asdict(p) | {"share_of_ceiling": p.share_of_ceiling} for p in points],
    }


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="tiny and peers, few steps")
    parser.add_argument("--workloads", default=None, help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--batches", type=numbers, default=None, help="default 1,8,32")
    parser.add_argument("--drafts", type=numbers, default=None, help="k, default 0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=None, help="timed steps per point, default 48")
    parser.add_argument("--accuracy", type=float, default=0.8, help="of injected drafts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if not arguments.no_transformers and importlib.util.find_spec("transformers") is None:
        sys.exit("transformers is missing: `make setup` installs it, --no-transformers omits it.")
    torch.set_num_threads(arguments.threads)
    is_short = arguments.short
    options = Options(
        batches=arguments.batches or ((1, 8) if is_short else (1, 8, 32)),
        drafts=arguments.drafts or ((0, 1, 3) if is_short else (0, 1, 2, 3, 4)),
        steps=arguments.steps or (12 if is_short else 48),
        accuracy=arguments.accuracy,
        temperature=arguments.temperature,
        dtype=arguments.dtype,
        is_invariant=arguments.batch_invariant,
    )
    names = (arguments.workloads or ("tiny,peers" if is_short else ",".join(WORKLOADS))).split(",")
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        results = [
            run_workload(WORKLOADS[name], options, not arguments.no_transformers, Path(folder))
            for name in names
        ]
    if arguments.json is not None:
        report = {
            "benchmark": "decode",
            "commit": commit(),
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "threads": arguments.threads,
                "torch": torch.__version__,
            },
            "options": asdict(options),
            "results": results,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
