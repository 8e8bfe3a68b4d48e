"""What batch-invariant mode costs: its steps over those of fast mode, taken in turn.

    python benchmarks/batch_invariance.py --short                    a few minutes: tiny, bf16
    python benchmarks/batch_invariance.py --json results.json        tiny and peers, both dtypes
    python benchmarks/batch_invariance.py --large --dtypes bfloat16  needs twice 3 GB

The same checkpoint is loaded twice, once in each mode. A plain decode step of one and of the other,
then a verify pass (k = 3) of each, and so on, which of the two is first changing every time: other
load on the machine falls on both alike. Every ratio is the median of the rounds' own ratios. On a
machine that does much else, `--cpu-time` counts the processor time of one thread instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from decode import time_main_pass, timed
from decode_workloads import (
    WORKLOADS,
    Workload,
    commit,
    docstring_tokens,
    prepare_checkpoint,
    truth_tokens,
)

from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.kv.paged_cache import PagedCache
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import RequestKey

CHUNK_TOKENS = 512
VERIFIED_DRAFTS = 3
WARM_UP_ROUNDS = 3
MODES = ("fast", "invariant")


@dataclass(frozen=True)
class Point:
    """One kind of step. Times are medians in milliseconds; `cost` is that of invariant over fast,
    the median of the rounds' own ratios, with the quarters of them below and above it."""

    workload: str
    dtype: str
    step: str
    batch: int
    context: int
    rounds: int
    fast_ms: float
    invariant_ms: float
    cost: float
    cost_low: float
    cost_high: float


HEADER = (
    f"{'workload':9}{'dtype':10}{'step':9}{'batch':>6}{'context':>8}{'fast ms':>9}{'inv ms':>9}"
    f"{'cost':>7}  quartiles"
)


def format_point(point: Point) -> str:
    return (
        f"{point.workload:9}{point.dtype:10}{point.step:9}{point.batch:6d}{point.context:8d}"
        f"{point.fast_ms:9.2f}{point.invariant_ms:9.2f}{point.cost:7.2f}"
        f"  {point.cost_low:.2f} to {point.cost_high:.2f}"
    )


@dataclass(frozen=True)
class Running:
    """One mode's runner and the sequences that it decodes."""

    runner: ModelRunner
    sequences: list[RunningSequence]
    clock: Callable[[], float]

    def plain(self) -> float:
        """Seconds of a plain decode step."""
        no_drafts = [0] * len(self.sequences)
        return timed(lambda: self.runner.decode(self.sequences, no_drafts), self.clock)

    def verify(self) -> float:
        """Seconds of the main pass that verifies three drafts of each sequence."""
        return time_main_pass(self.runner, self.sequences, VERIFIED_DRAFTS, self.clock)

    def prefill(self) -> float:
        """Seconds of a first chunk of `CHUNK_TOKENS`, once more into the same blocks."""
        fresh = [replace(s, token_ids=s.token_ids[:CHUNK_TOKENS]) for s in self.sequences]
        chunks = [PrefillChunk(s, CHUNK_TOKENS) for s in fresh]
        return timed(lambda: self.runner.prefill(chunks), self.clock)


@dataclass(frozen=True)
class Setting:
    """What is measured: a checkpoint in both modes, fast first, and how."""

    models: Sequence[Transformer]
    workload: Workload
    rounds: int
    clock: Callable[[], float]


def start(
    setting: Setting, model: Transformer, batch: int, prompt_tokens: int, max_tokens: int
) -> Running:
    """A runner with a fresh cache and `batch` sequences, not yet prefilled."""
    blocks_each = model.kv_layout().blocks_for(prompt_tokens + max_tokens + 1)
    cache = PagedCache(model.kv_layout(), blocks_each * batch, model.device)
    sequences = [
        RunningSequence(
            key=RequestKey(str(i)),
            token_ids=prompt_of(setting.workload, i, prompt_tokens, model.config.vocab_size),
            prompt_tokens=prompt_tokens,
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=max_tokens),
            block_table=cache.pool.allocate(blocks_each),
        )
        for i in range(batch)
    ]
    return Running(ModelRunner(model, cache), sequences, setting.clock)


def prompt_of(workload: Workload, number: int, length: int, vocab_size: int) -> list[int]:
    if workload.is_synthetic:
        return truth_tokens(number, length, vocab_size)
    tokens = docstring_tokens()
    first = number * length % (len(tokens) - length)
    return tokens[first : first + length]


def in_turn(runs: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Seconds of each run in each round; every other round goes backwards."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + WARM_UP_ROUNDS):
        order = range(len(runs)) if number % 2 else reversed(range(len(runs)))
        taken = {i: runs[i]() for i in order}
        if number >= WARM_UP_ROUNDS:
            for i, seconds in taken.items():
                times[i].append(seconds)
    return times


def measure(setting: Setting, batch: int, prompt_tokens: int) -> list[Point]:
    """The plain step and the verify pass at one batch size."""
    rounds = setting.rounds
    max_tokens = rounds + WARM_UP_ROUNDS + 2
    running = [start(setting, m, batch, prompt_tokens, max_tokens) for m in setting.models]
    for one in running:
        one.runner.prefill([PrefillChunk(s, s.prompt_tokens) for s in one.sequences])
    # Verifying looks back on tokens that are computed already, and writes their slots anew.
    plain = in_turn([one.plain for one in running], rounds)
    verify = in_turn([one.verify for one in running], rounds)
    return [
        point(setting, "plain", batch, prompt_tokens, plain),
        point(setting, f"verify {VERIFIED_DRAFTS}", batch, prompt_tokens, verify),
    ]


def measure_prefill(setting: Setting) -> Point:
    """One prompt's first chunk."""
    running = [start(setting, model, 1, CHUNK_TOKENS, 1) for model in setting.models]
    times = in_turn([one.prefill for one in running], max(2, setting.rounds // 4))
    return point(setting, "prefill", 1, CHUNK_TOKENS, times)


def point(
    setting: Setting, step: str, batch: int, context: int, times: Sequence[Sequence[float]]
) -> Point:
    fast, invariant = times
    low, middle, high = statistics.quantiles(
        [slow / quick for quick, slow in zip(fast, invariant, strict=True)], n=4
    )
    return Point(
        workload=setting.workload.name,
        dtype=str(setting.models[0].dtype).removeprefix("torch."),
        step=step,
        batch=batch,
        context=context,
        rounds=len(fast),
        fast_ms=statistics.median(fast) * 1e3,
        invariant_ms=statistics.median(invariant) * 1e3,
        cost=middle,
        cost_low=low,
        cost_high=high,
    )


def run_workload(
    workload: Workload, dtype: str, folder: Path, options: argparse.Namespace
) -> list[Point]:
    """All steps of one checkpoint in one dtype; prints each as it is there."""
    gc.collect()  # the models before these
    path = prepare_checkpoint(workload, folder)
    models = [load_model(path, dtype, "cpu", mode == "invariant") for mode in MODES]
    clock = time.thread_time if options.cpu_time else time.perf_counter
    setting = Setting(models, workload, options.rounds, clock)
    points: list[Point] = []

    def add(found: Sequence[Point]) -> None:
        points.extend(found)
        print("\n".join(format_point(p) for p in found), flush=True)

    for batch in options.batches:
        add(measure(setting, batch, options.prompt_tokens))
    if options.long_context:
        add(measure(setting, 8, options.long_context))
    add([measure_prefill(setting)])
    return points


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="tiny, bf16, batch 1, 8, 32")
    parser.add_argument("--large", action="store_true", help="the workload `large` as well")
    parser.add_argument("--workloads", default=None, help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--dtypes", default=None, help="default bfloat16,float32")
    parser.add_argument("--batches", type=numbers, default=None, help="default 1,2,4,...,64")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--long-context", type=int, default=1024, help="a second prompt length, batch 8; 0: none"
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="of every step, a quarter for prefill"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, not the wall's")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    options.threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(options.threads)
    names = (options.workloads or ("tiny" if options.short else "tiny,peers")).split(",")
    names += ["large"] if options.large and "large" not in names else []
    dtypes = (options.dtypes or ("bfloat16" if options.short else "bfloat16,float32")).split(",")
    options.batches = options.batches or ((1, 8, 32) if options.short else (1, 2, 4, 8, 16, 32, 64))
    print(f"{options.threads} threads; prompts of {options.prompt_tokens} tokens\n{HEADER}")
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        points = [
            point
            for name in names
            for dtype in dtypes
            for point in run_workload(WORKLOADS[name], dtype, Path(folder), options)
        ]
    if options.json is not None:
        report = {
            "benchmark": "batch_invariance",
            "commit": commit(),
            "machine": {
                "processor": platform.processor() or platform.machine(),
                "threads": options.threads,
                "torch": torch.__version__,
                "capability": torch.backends.cpu.get_cpu_capability(),
            },
            "clock": "processor time" if options.cpu_time else "wall",
            "points": [asdict(point) for point in points],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
