"""What choosing tokens costs, beside `torch.topk(logits, 64)` of the same logits.

    python benchmarks/sampler.py                            about half a minute
    python benchmarks/sampler.py --json sampler.json --rounds 41
    python benchmarks/sampler.py --rows 32 --vocabularies 129280 --device cuda

Each round times the sampler and `topk` once, one after the other, so that whatever else the machine
does falls on both alike. benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from decode_workloads import commit
from torch import Tensor

from hocket.execution.sampling.sampler import Sampler
from hocket.request_params import SamplingParams

WARM_UP_ROUNDS = 3
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "T 1": SamplingParams(),
    "top-k 40": SamplingParams(top_k=40),
    "top-p .9, T .8": SamplingParams(top_p=0.9, temperature=0.8),
    "top-p .95, T 1": SamplingParams(top_p=0.95),
    "min-p .05": SamplingParams(min_p=0.05),
}
HEADER = (
    f"{'vocab':>7} {'rows':>4} {'logits':6} {'sampling':14}"
    f" {'ms':>8} {'topk ms':>8} {'ratio':>6} {'in head':>7}"
)


@dataclass(frozen=True)
class Point:
    """Medians of the rounds; `ratio` is the median of the rounds' ratios.

    `in_head` is the share of rows whose token is among the 32 likeliest.
    """

    vocab_size: int
    rows: int
    logits: str
    sampling: str
    ms: float
    topk_ms: float
    ratio: float
    in_head: float


def logits_like(name: str, rows: int, vocab_size: int, device: str) -> Tensor:
    """`normal`: N(0, 3), a thousand tokens in a nucleus of 0.9; `peaky`: and twenty tokens above
    them by 6 to 16, as in a model that knows what it says."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab_size, generator=generator) * 3.0
    if name == "peaky":
        peaks = torch.randint(0, vocab_size, (rows, 20), generator=generator)
        logits.scatter_add_(1, peaks, torch.rand(rows, 20, generator=generator) * 10.0 + 6.0)
    return logits.to(device)


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(logits: Tensor, kind: str, sampling: str, rounds: int) -> Point:
    rows, vocab_size = logits.shape
    device = logits.device.type
    sampler = Sampler(vocab_size, logits.device)
    params = [replace(PARAMS[sampling], seed=seed) for seed in range(rows)]
    times: list[tuple[float, float]] = []
    for round_ in range(-WARM_UP_ROUNDS, rounds):
        positions = [100 + round_] * rows
        topk_ms = timed(lambda: torch.topk(logits, min(64, vocab_size)), device)
        ms = timed(lambda positions=positions: sampler.sample(logits, params, positions), device)
        if round_ >= 0:
            times.append((ms, topk_ms))
    tokens = sampler.sample(logits, params, [0] * rows)
    is_in_head = torch.topk(logits, min(32, vocab_size)).indices == tokens[:, None]
    return Point(
        vocab_size,
        rows,
        kind,
        sampling,
        ms=statistics.median(ms for ms, _ in times),
        topk_ms=statistics.median(topk_ms for _, topk_ms in times),
        ratio=statistics.median(ms / topk_ms for ms, topk_ms in times),
        in_head=is_in_head.any(dim=-1).double().mean().item(),
    )


def format_point(p: Point) -> str:
    return (
        f"{p.vocab_size:7} {p.rows:4} {p.logits:6} {p.sampling:14}"
        f" {p.ms:8.2f} {p.topk_ms:8.2f} {p.ratio:6.2f} {p.in_head:7.2f}"
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32))
    parser.add_argument("--vocabularies", type=numbers, default=(4096, 129_280))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()
    points: list[Point] = []
    print(HEADER, flush=True)
    for vocab_size, rows, kind in product(options.vocabularies, options.rows, ("normal", "peaky")):
        logits = logits_like(kind, rows, vocab_size, options.device)
        for sampling in PARAMS:
            points.append(measure(logits, kind, sampling, options.rounds))
            print(format_point(points[-1]), flush=True)
    if options.json is None:
        return
    report = {
        "benchmark": "sampler",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "torch": torch.__version__,
            "load_before": load,
            "load_after": os.getloadavg(),
        },
        "options": {"rounds": options.rounds, "device": options.device},
        "points": [asdict(point) for point in points],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
