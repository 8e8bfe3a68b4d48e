"""What moving KV blocks costs: Hocket's READs beside raw NIXL and memcpy, in one run.

    python benchmarks/kv_transfer.py                        about two minutes
    python benchmarks/kv_transfer.py --json results.json --seconds 1
    python benchmarks/kv_transfer.py --transports tcp --blocks 4,64 --block-bytes 65536

Blocks cross between two real processes (`kv_transfer_owner.py`, `kv_transfer_reader.py`) through
Hocket's exporter and importer as workers use them: READs by chunk, each fenced, posted to the
importer's thread, which wakes who waits. Raw NIXL has two plain agents in the same two processes.
Then whole hand-offs (`kv_transfer_hand_off.py`): tables, gRPC Export stream and engine threads too.
benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode_workloads import REPOSITORY, TINY, commit
from kv_transfer_report import (
    HAND_OFF_HEADER,
    HEADER,
    HandOff,
    Point,
    format_hand_off,
    format_point,
)

from hocket.environment import TCP_SEGMENT_BYTES, worker_environment
from hocket.model.model_config import ModelConfig

BLOCK_TOKENS = 64
HAND_OFFS = 100
"""Of each size, timed."""


def run_process(script: str, tls: str, *words: str) -> Any:
    """What a script of this folder measured over "auto" (what UCX finds here) or "tcp" on loopback,
    with a worker's environment."""
    with tempfile.TemporaryDirectory(prefix="hocket-bench-") as folder:
        variables = worker_environment(tls, "127.0.0.1", 1, Path(folder))
        path = str(Path(__file__).with_name(script))
        done = subprocess.run(
            [sys.executable, path, tls, variables["UCX_LOG_FILE"], *words],
            env={**os.environ, **variables, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def run_transport(tls: str, arguments: argparse.Namespace) -> list[Point]:
    """Bare READs: all cases over one transport."""
    lists = (arguments.blocks, arguments.block_bytes)
    words = (",".join(str(number) for number in numbers) for numbers in lists)
    points = run_process("kv_transfer_reader.py", tls, *words, str(arguments.seconds))
    return [Point(**point) for point in points]


def run_hand_offs(tls: str, block_bytes: int) -> list[HandOff]:
    """Whole hand-offs of 1 to 64 blocks."""
    words = ("1,4,16,64", str(block_bytes), str(HAND_OFFS))
    measured = run_process("kv_transfer_hand_off.py", tls, *words)
    return [HandOff(**hand_off) for hand_off in measured]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    tiny = ModelConfig.from_checkpoint(TINY).kv_layout("bfloat16", BLOCK_TOKENS).block_bytes
    sizes = f"default {tiny},65536,1048576: the embedded model's, 64 KiB, 1 MiB"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transports", default="auto,tcp", help="of auto,tcp")
    parser.add_argument("--blocks", type=numbers, default=(4, 16, 64, 256), help="4,16,64,256")
    parser.add_argument("--block-bytes", type=numbers, default=(tiny, 65536, 1 << 20), help=sizes)
    parser.add_argument("--seconds", type=float, default=0.8, help="per case, default 0.8")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    transports = arguments.transports.split(",")
    points: list[Point] = []
    print(HEADER)
    for tls in transports:
        measured = run_transport(tls, arguments)
        print("\n".join(format_point(point) for point in measured), flush=True)
        points += measured
    hand_offs: list[HandOff] = []
    print(f"\n{HAND_OFF_HEADER}")
    for tls in transports:
        ended = run_hand_offs(tls, arguments.block_bytes[0])
        print("\n".join(format_hand_off(hand_off) for hand_off in ended), flush=True)
        hand_offs += ended
    if arguments.json is None:
        return
    report: dict[str, Any] = {
        "benchmark": "kv_transfer",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "options": {"seconds": arguments.seconds, "tcp_segment_bytes": TCP_SEGMENT_BYTES},
        "points": [
            asdict(point)
            | {
                "gb_per_s": point.gb_per_s,
                "ratio_to_raw": point.ratio("raw"),
                "ratio_of_whole_to_raw": point.ratio("raw", "whole"),
                "ratio_to_raw_under_the_rule": point.ratio("raw_cut"),
                "ratio_of_whole_to_raw_under_the_rule": point.ratio("raw_cut", "whole"),
                "ratio_to_memcpy": point.ratio("memcpy"),
            }
            for point in points
        ],
        "hand_offs": [asdict(hand_off) for hand_off in hand_offs],
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
