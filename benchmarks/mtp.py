"""What multi-token prediction brings on one machine: k = 0..5 drafts a step, and as many as pay.

    python benchmarks/mtp.py --short                                   two minutes
    python benchmarks/mtp.py --json mtp.json --plot mtp.svg            the long form

Four workloads (benchmarks/README.md): `tiny`, the embedded model with its own drafts; `peers`,
`large` and `large-dense`, random models whose continuation and drafts are scripted (SYNTHETIC: what
drafting and verifying cost is real, what the drafts say is not). Constant k and the draft
controller, with costs measured first as a decode worker does, take their steps in turn, over the
same tokens (`mtp_variants.py`). Exits 1 when two variants did not put out the same tokens; missed
goals are printed.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from decode import start_sequences
from decode_report import Options as DecodeOptions
from decode_workloads import WORKLOADS, Workload, commit, count_parameters, prepare_checkpoint
from mtp_report import (
    ADAPTIVE,
    HEADER,
    Point,
    Row,
    format_goal,
    format_point,
    goals,
    summary,
)
from mtp_variants import Span, Variant

from hocket.clock import SystemClock
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.drafting.step_measurements import measure_step_costs
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.kv.paged_cache import PagedCache
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.scheduling.draft_controller import DraftController, DraftPolicy


@dataclass(frozen=True)
class Options:
    """What to measure. `accuracy` of scripted drafts. `seconds`: passes of a point are repeated as
    far as they fit; one is made anyhow. `scale` shortens requests."""

    batches: tuple[int, ...] | None
    drafts: tuple[int, ...]
    temperatures: tuple[float, ...]
    accuracy: float
    seconds: float
    scale: float

    def batches_of(self, workload: Workload) -> tuple[int, ...]:
        return self.batches or ((1, 2, 4, 8) if is_large(workload) else (1, 2, 4, 8, 16, 32, 64))

    def span(self, workload: Workload, batch: int) -> Span:
        """More where acceptance depends on the text."""
        if workload.is_synthetic:
            num_requests, tokens = max(batch, 4), 40
        else:
            num_requests, tokens = max(batch, 8), 64
        return Span(batch, max(8, round(tokens * self.scale)), num_requests)


def is_large(workload: Workload) -> bool:
    """Whether a step takes a tenth of a second."""
    return workload.name.startswith("large")


def measure_point(
    model: Transformer,
    workload: Workload,
    options: Options,
    case: tuple[float, int],
    controller: DraftController,
) -> Point:
    """All variants at one (temperature, batch). Raises SystemExit when outputs differ."""
    temperature, batch = case
    span = options.span(workload, batch)
    variants = list(make_variants(model, workload, options, temperature, span, controller))
    for variant in variants:
        variant.warm_up()
    passes, started = 0, perf_counter()
    while not passes or (perf_counter() - started) * (1 + 1 / passes) < options.seconds:
        run_pass(variants)
        passes += 1
    if any(variant.outputs != variants[0].outputs for variant in variants):
        sys.exit(f"{workload.name}, {case}: variants did not decode the same tokens")
    point = Point(
        workload=workload.name,
        is_synthetic=workload.is_synthetic,
        temperature=temperature,
        batch=batch,
        requests=span.num_requests,
        tokens_each=span.tokens_each,
        passes=passes,
        rows=tuple(make_rows(variants, span)),
    )
    best = variants[point.rows.index(point.best)]
    return replace(point, spreads=(spread(best, variants[-1]), spread(variants[0], variants[-1])))


def make_variants(
    model: Transformer,
    workload: Workload,
    options: Options,
    temperature: float,
    span: Span,
    controller: DraftController,
) -> Iterator[Variant]:
    """Constants first, in the order of `drafts`, then the adaptive one."""
    setting = DecodeOptions(
        batches=(span.batch,),
        drafts=options.drafts,
        steps=span.tokens_each,
        accuracy=options.accuracy,
        temperature=temperature,
        dtype="bfloat16",
        is_invariant=model.is_batch_invariant,
    )
    for k in (*options.drafts, None):
        most = controller.policy.max_drafts if k is None else k
        runner, sequences = start_sequences(model, workload, setting, span.num_requests, most)
        runner.prefill([PrefillChunk(sequence, sequence.prompt_tokens) for sequence in sequences])
        yield Variant(runner, sequences, span, k, controller if k is None else None)


def run_pass(variants: Sequence[Variant]) -> None:
    """Takes each variant over the span; the one that is least far takes the next step, so other
    load on the machine falls on all of them alike."""
    for variant in variants:
        variant.begin_pass()
    while waiting := [variant for variant in variants if not variant.is_done]:
        min(waiting, key=lambda variant: variant.progress).take_step()


def make_rows(variants: Sequence[Variant], span: Span) -> Iterator[Row]:
    """One a variant; the first is k = 0, whose mean step is t_step(1)."""
    plain, num_tokens = variants[0], span.num_requests * span.tokens_each
    draft_s = [seconds for variant in variants for seconds in variant.draft_s]
    t_draft = statistics.median(draft_s) if draft_s else 0.0
    for variant in variants:
        k, counts, length = variant.k, variant.counts, span.tokens_each / variant.num_steps
        pairs = zip(counts.accepted_by_position, counts.drafted_by_position, strict=True)
        row = Row(
            variant=ADAPTIVE if k is None else f"k={k}",
            tokens_per_s=num_tokens / variant.seconds(),
            step_ms=variant.step_s * 1e3,
            gain=plain.seconds() / variant.seconds(),
            acceptance_length=length,
            acceptance_rate=counts.acceptance_rate,
            survival=tuple(accepted / drafted for accepted, drafted in pairs),
            drafts=counts.drafted_tokens / counts.verify_steps,
            decide_ms=statistics.fmean(variant.decide_s or [0.0]) * 1e3,
        )
        if k:
            t_verify = statistics.median(variant.verify_s)
            ceiling = length * plain.step_s / (t_verify + k * t_draft)
            times_ms = {"t_verify_ms": t_verify * 1e3, "t_draft_ms": t_draft * 1e3}
            row = replace(row, **times_ms, ceiling=ceiling)
        yield row


def spread(other: Variant, adaptive: Variant) -> float:
    """Half of what the speed of adaptive over that of the other ranges over, pass by pass."""
    passes = range(len(adaptive.steps[0].seconds))
    ratios = [other.seconds(number) / adaptive.seconds(number) for number in passes]
    return (max(ratios) - min(ratios)) / 2


def set_up_controller(model: Transformer, max_batch: int, max_drafts: int) -> DraftController:
    """As a decode worker does: steps are measured first."""
    cache = PagedCache(model.kv_layout(), max_batch, model.device)
    runner = ModelRunner(model, cache, MTPDraftSource(model, cache))
    costs = measure_step_costs(runner, max_batch, max_drafts, SystemClock())
    return DraftController(DraftPolicy(max_drafts), costs)


def run_workload(workload: Workload, options: Options, folder: Path) -> tuple[str, list[Point]]:
    """Measures one workload and prints its table; its title and points."""
    gc.collect()  # the models before this one
    path = prepare_checkpoint(workload, folder)
    model = load_model(path, torch.bfloat16, torch.device("cpu"), batch_invariant=True)
    scripted = f"SYNTHETIC, scripted to be right with {options.accuracy:.0%} at each position"
    drafts = scripted if workload.is_synthetic else "its own"
    millions = count_parameters(path) / 1e6
    title = f"{workload.name}: {workload.shows}; {millions:.0f} M parameters; drafts: {drafts}"
    print(f"\n{title}\n{HEADER}", flush=True)
    batches = options.batches_of(workload)
    controller = set_up_controller(model, max(batches), max(options.drafts))
    points: list[Point] = []
    for case in product(options.temperatures, batches):
        points.append(measure_point(model, workload, options, case, controller))
        print(format_point(points[-1]), flush=True)
    return title, points


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def drafts(text: str) -> tuple[int, ...]:
    """k = 0 is what the others are compared with."""
    return tuple(sorted({0, *numbers(text)}))


def temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="tiny and peers, few tokens")
    parser.add_argument("--workload", default=None, help=f"of {','.join(WORKLOADS)}; default all")
    parser.add_argument("--batches", type=numbers, default=None, help="default 1,2,4,..64; large 8")
    parser.add_argument("--drafts", type=drafts, default=None, help="k, default 0,1,2,3,4,5")
    parser.add_argument("--temperatures", type=temperatures, default=None, help="default 0,0.8")
    parser.add_argument("--seconds", type=float, default=None, help="for a point, default 6")
    parser.add_argument("--accuracy", type=float, default=0.8, help="of scripted drafts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="SVG; needs matplotlib")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    is_short = arguments.short
    options = Options(
        batches=arguments.batches or ((1, 8) if is_short else None),
        drafts=arguments.drafts or (0, 1, 2, 3, 4, 5),
        temperatures=arguments.temperatures or ((0.0,) if is_short else (0.0, 0.8)),
        accuracy=arguments.accuracy,
        seconds=arguments.seconds or (1.0 if is_short else 6.0),
        scale=0.5 if is_short else 1.0,
    )
    titles: dict[str, str] = {}
    points: list[Point] = []
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        names = arguments.workload or ("tiny,peers" if is_short else ",".join(WORKLOADS))
        for name in names.split(","):
            titles[name], found = run_workload(WORKLOADS[name], options, Path(folder))
            points += found
    print(f"\n{summary(points)}\n")
    print("\n".join(format_goal(goal) for goal in goals(points)))
    report = {
        "benchmark": "mtp",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": arguments.threads,
            "torch": torch.__version__,
        },
        "options": asdict(options),
        "workloads": titles,
        "points": [as_json(point) for point in points],
        "goals": [asdict(goal) | {"is_met": goal.is_met} for goal in goals(points)],
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        from mtp_plot import draw

        draw(json.loads(json.dumps(report)), arguments.plot)


def as_json(point: Point) -> dict[str, Any]:
    """The point with what its properties say."""
    rows = [asdict(row) | {"share_of_ceiling": row.share_of_ceiling} for row in point.rows]
    comparison = {
        "best_constant": point.best.variant,
        "against_best": point.against_best,
        "against_none": point.against_none,
    }
    return asdict(point) | comparison | {"rows": rows}


if __name__ == "__main__":
    main()
