"""Load rises and falls, both pools follow: the whole system, measured while it resizes itself.

    python benchmarks/autoscale.py                        about three minutes
    python benchmarks/autoscale.py --json out.json --plot out.svg
    python benchmarks/autoscale.py --short                a minute, to see that it works

It starts what `hocket up` starts, with the autoscaler on, and lets closed-loop clients come and
go: each asks again two seconds after it has its answer; every other one brings a long prompt, the
others want a long output. It writes sizes, offered load and every request's TTFT over time. The
plot needs `pip install -e '.[bench]'`. benchmarks/README.md says how to read it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from control_plane.cluster.cluster import Cluster
from control_plane.cluster.scaling_store import ScalingStore
from hocket.config import Config, RedisSettings, load_config
from hocket.errors import HocketError
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient

OVERRIDES = (
    "gateway.port=0",
    "gateway.http_port=-1",
    "gateway.admin_port=0",
    "cluster.startup_timeout_s=240",
    "prefill.chunk_tokens=128",
    "prefill.num_blocks=512",
    "decode.num_blocks=512",
    "decode.max_batch=4",
    # Decode queues on purpose until it has grown, and prefill's blocks wait as long.
    "transfer.open_timeout_s=120",
    "autoscaler.enabled=true",
    "autoscaler.interval_s=2",
    "autoscaler.ttft_s=1.5",
    "autoscaler.inter_token_s=0.05",
    "autoscaler.queue_drain_s=5",
    "autoscaler.up_window_s=4",
    "autoscaler.down_window_s=20",
    "autoscaler.trial_after_s=600",
    "autoscaler.prefill.max_workers=2",
    "autoscaler.decode.max_workers=2",
)
# Seconds, clients.
PHASES = ((30.0, 2), (60.0, 12), (60.0, 2), (30.0, 0))
SHORT_PHASES = ((5.0, 2), (25.0, 12), (30.0, 0))
# Between an answer and the next question.
THINK_S = 2.0
LONG_PROMPT, SHORT_OUTPUT = 1200, 8
SHORT_PROMPT, LONG_OUTPUT = 60, 120
SAMPLE_S = 0.5
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A moment: seconds since the first phase, clients, and of both pools (size, ready, starting,
    draining)."""

    at_s: float
    clients: int
    prefill: tuple[int, int, int, int]
    decode: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Request:
    """asked_s: when, since the first phase. fault: "" when its answer was whole."""

    asked_s: float
    prompt_tokens: int
    ttft_s: float
    total_s: float
    fault: str


@dataclass(frozen=True, slots=True)
class Move:
    """Sizes changed: the decision's reasons."""

    at_s: float
    prefill: int
    decode: int
    reasons: tuple[str, ...]


@dataclass(slots=True)
class Record:
    """What a run leaves; written by one event loop and read after it."""

    samples: list[Sample] = field(default_factory=list[Sample])
    requests: list[Request] = field(default_factory=list[Request])
    moves: list[Move] = field(default_factory=list[Move])


class Clients:
    """Closed-loop clients whose number follows the phases. All on one event loop."""

    def __init__(self, address: str, record: Record, began: float) -> None:
        self._client = GenerationClient(address)
        self._record = record
        self._began = began
        self._wanted = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def set_number(self, number: int) -> None:
        """More start at once; those that are too many end with their present answer."""
        for index in range(self._wanted, number):
            task = asyncio.create_task(self._ask_on(index))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._wanted = number

    async def close(self) -> None:
        """Waits for the last answers."""
        self._wanted = 0
        await asyncio.gather(*self._tasks)
        await self._client.close()

    async def _ask_on(self, index: int) -> None:
        number = 0
        while index < self._wanted:
            await self._ask(index, number)
            await asyncio.sleep(THINK_S)
            number += 1

    async def _ask(self, index: int, number: int) -> None:
        is_long = index % 2 == 0
        prompt, output = (LONG_PROMPT, SHORT_OUTPUT) if is_long else (SHORT_PROMPT, LONG_OUTPUT)
        message = generation.GenerateRequest()
        start = index * 131 + number * 17
        message.token_ids.ids.extend(3 + (start + i * 7) % 900 for i in range(prompt))
        message.stopping.max_tokens = output
        message.stopping.ignore_eos = True
        asked = time.monotonic()
        first = 0.0
        num_tokens, fault = 0, ""
        try:
            async for response in self._client.generate(message, timeout_s=TIMEOUT_S):
                if response.token_ids and not first:
                    first = time.monotonic()
                num_tokens += len(response.token_ids)
        except HocketError as error:
            fault = f"{type(error).__name__}: {error}"
        if not fault and num_tokens != output:
            fault = f"{num_tokens} of {output} tokens"
        ended = time.monotonic()
        self._record.requests.append(
            Request(
                asked_s=round(asked - self._began, 3),
                prompt_tokens=prompt,
                ttft_s=round(first - asked, 4) if first else 0.0,
                total_s=round(ended - asked, 3),
                fault=fault,
            )
        )


async def drive(
    address: str, store: ScalingStore, phases: tuple[tuple[float, int], ...], record: Record
) -> None:
    """All phases, and samples meanwhile."""
    began = time.monotonic()
    clients = Clients(address, record, began)
    end = 0.0
    for seconds, number in phases:
        end += seconds
        clients.set_number(number)
        while (now := time.monotonic() - began) < end:
            await asyncio.to_thread(sample, store, now, number, record)
            await asyncio.sleep(SAMPLE_S)
        print(f"  {now:5.0f} s: {number} clients done, {len(record.requests)} answers", flush=True)
    await clients.close()


def sample(store: ScalingStore, at_s: float, clients: int, record: Record) -> None:
    """Notes both pools, and the reasons when a size has moved."""
    status = store.status()
    if status is None:
        return
    pools = [
        (pool.size, pool.ready, pool.starting, pool.draining)
        for pool in (status.prefill, status.decode)
    ]
    record.samples.append(Sample(round(at_s, 2), clients, pools[0], pools[1]))
    before = record.moves[-1] if record.moves else None
    sizes = (status.prefill.size, status.decode.size)
    if before is None or (before.prefill, before.decode) != sizes:
        record.moves.append(Move(round(at_s, 2), *sizes, status.reasons))
        print(f"  {at_s:5.0f} s: prefill {sizes[0]}, decode {sizes[1]}", flush=True)


def run(config: Config, phases: tuple[tuple[float, int], ...]) -> Record:
    """A cluster under the phases."""
    record = Record()
    cluster = Cluster(config, lambda text: None)
    try:
        serving = cluster.start()
        store = ScalingStore(RedisSettings(url=serving.redis_url, prefix=config.redis.prefix))
        try:
            asyncio.run(drive(serving.gateway_address, store, phases, record))
        finally:
            store.close()
    finally:
        cluster.stop()
    return record


def machine() -> dict[str, str | int]:
    """Where and what was measured."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() or "unknown",
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plot", type=Path, help="where the plot goes (SVG)")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="TABLE.KEY=VALUE")
    options = parser.parse_args(arguments)
    phases = SHORT_PHASES if options.short else PHASES
    overrides = [*OVERRIDES, *options.set]
    record = run(load_config(None, overrides), phases)
    results = {
        "about": machine(),
        "overrides": overrides,
        "phases": [{"seconds": seconds, "clients": number} for seconds, number in phases],
        **asdict(record),
    }
    faults = [request.fault for request in record.requests if request.fault]
    print(f"{len(record.requests)} requests, {len(faults)} failed")
    for fault in faults[:5]:
        print(f"  {fault}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results) + "\n")
    if options.plot:
        from autoscale_plot import draw

        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(results, options.plot)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
