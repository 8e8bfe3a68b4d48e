"""What a hand-off costs a client: the wait for the second token, and the READ inside it.

    python benchmarks/handoff.py                         some ten minutes
    python benchmarks/handoff.py --short                 a minute, to see that it works
    python benchmarks/handoff.py --json out.json --plot out.svg
    python benchmarks/handoff.py --set transfer.checksum=xxh3 --transports tcp

Prompts of 256 to 16k tokens go through a prefill and a decode worker on a random checkpoint: the
wait between the first token and the second, when blocks cross while prefill computes and when all
cross at the end (`handoff_wait.py`). Then the READ alone: beside memcpy and raw NIXL for the same
descriptors, without its fence, with checksums (`handoff_reads.py`). The plot needs
`pip install -e '.[bench]'`. benchmarks/README.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode_workloads import commit
from handoff_report import (
    READ_HEADER,
    WAIT_HEADER,
    ReadPoint,
    Wait,
    WaitPoint,
    format_read,
    format_wait,
    wait_points,
)
from handoff_wait import MODEL, STREAMING, measure_waits, running_pairs
from kv_transfer import numbers, run_process

from hocket.model.random_checkpoint import random_checkpoint

CHUNK_TOKENS = 512
PROMPT_TOKENS = (256, 1024, 4096, 8192, 16_384)
SHORT_PROMPT_TOKENS = (256, 1024)
GOAL_TOKENS, GOAL_SHARE, GOAL_RATIO = 4096, 0.02, 0.8


async def run_waits(
    tls: str, checkpoint: Path, folder: Path, arguments: argparse.Namespace
) -> list[Wait]:
    """Over one transport."""
    waits: list[Wait] = []
    overrides = (f"transfer.tls={tls}", *arguments.set)
    async with running_pairs(checkpoint, folder, overrides, CHUNK_TOKENS) as pairs:
        async for wait in measure_waits(pairs, arguments.prompt_tokens, arguments.rounds):
            waits.append(wait)
            print(
                f"  {wait.transport} {wait.mode} {wait.prompt_tokens}: prefill "
                f"{wait.prefill_s:.2f} s, added {wait.added_s * 1e3:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
    return waits


def run_reads(tls: str, arguments: argparse.Namespace) -> list[ReadPoint]:
    """The READs of the same prompts over one transport."""
    blocks = sorted({max(1, tokens // 64) for tokens in arguments.prompt_tokens})
    block_bytes = MODEL.kv_layout("bfloat16").block_bytes
    words = (",".join(map(str, blocks)), str(block_bytes), str(arguments.seconds))
    return [ReadPoint(**point) for point in run_process("handoff_reads.py", tls, *words)]


def verdict(points: Sequence[WaitPoint], reads: Sequence[ReadPoint]) -> dict[str, Any]:
    """The goals, and the worst figure for each."""
    long = [p for p in points if p.mode == STREAMING and p.prompt_tokens >= GOAL_TOKENS]
    ratios = [p.ratio("raw", quiet=True) for p in reads]
    worst_share = max((p.share for p in long), default=None)
    return {
        "goal_added_share": GOAL_SHARE,
        "worst_added_share": worst_share,
        "is_added_share_met": None if worst_share is None else worst_share < GOAL_SHARE,
        "goal_ratio_to_raw": GOAL_RATIO,
        "worst_ratio_to_raw": min(ratios),
        "ratios_to_raw_met": sum(ratio >= GOAL_RATIO for ratio in ratios),
        "ratios_to_raw": len(ratios),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed as it comes; the results."""
    waits: list[Wait] = []
    reads: list[ReadPoint] = []
    transports = arguments.transports.split(",")
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as name:
        folder = Path(name)
        checkpoint = random_checkpoint(MODEL, folder / "model", seed=1, dtype="bfloat16")
        for tls in transports:
            waits += asyncio.run(run_waits(tls, checkpoint, folder, arguments))
    points = wait_points(waits)
    print(WAIT_HEADER)
    print("\n".join(format_wait(point) for point in points), flush=True)
    for tls in transports:
        reads += run_reads(tls, arguments)
    print(f"\n{READ_HEADER}")
    print("\n".join(format_read(point) for point in reads), flush=True)
    return {
        "benchmark": "handoff",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "options": {
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "chunk_tokens": CHUNK_TOKENS,
            "overrides": arguments.set,
            "kv_bytes_per_token": MODEL.kv_layout("bfloat16").block_bytes // 64,
        },
        "goals": verdict(points, reads),
        "waits": [asdict(point) for point in points],
        "reads": [
            asdict(point)
            | {
                "gb_per_s": point.gb_per_s,
                "ratio_to_memcpy": point.ratio("memcpy"),
                "ratio_to_raw": point.ratio("raw"),
                "ratio_to_raw_quiet": point.ratio("raw", quiet=True),
                "ratio_to_raw_under_the_rule": point.ratio("raw_cut"),
                "fence_s": point.cost("fenced", "bare"),
                "verify_s": point.cost("checked", "hocket"),
            }
            for point in reads
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", default="auto,tcp", help="of auto,tcp")
    parser.add_argument("--prompt-tokens", type=numbers, default=PROMPT_TOKENS, help="256,1024,...")
    parser.add_argument("--rounds", type=int, default=8, help="of short prompts; long ones fewer")
    parser.add_argument("--seconds", type=float, default=2.0, help="per case of a READ")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plot", type=Path, help="where the plot goes (SVG)")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.prompt_tokens, arguments.rounds = SHORT_PROMPT_TOKENS, 2
        arguments.seconds = 0.2
    return arguments


def main() -> None:
    arguments = parse_arguments()
    results = run(arguments)
    print(f"\n{json.dumps(results['goals'])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.plot:
        from handoff_plot import draw

        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
