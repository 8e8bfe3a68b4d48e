"""The whole system under load: split against aggregated, drafts on and off, one rank and two.

    python benchmarks/serve.py --short                   some minutes
    python benchmarks/serve.py --json serve.json         the long form

Each set-up is a real `hocket up` in this machine's processes: Ray, store, gateway, workers, with as
many compute threads in all as every other. Clients run a closed loop over gRPC, token ids in and
ids out, as InferenceX's fixed-sequence runs do: prompt lengths uniform in [0.8 L, L], a fixed
output length, the end token ignored. Set-ups take turns, forwards and then backwards, so that what
else the machine does falls on all of them. All must answer every request with the same tokens, or
the run fails: that is the quality check that stands beside the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from decode_workloads import TINY, commit, docstring_tokens
from rich.console import Console

from hocket.commands.up import Progress, interruptible, running_cluster
from hocket.config import Config, load_config
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient

PORTS = ("gateway.port=0", "gateway.http_port=0", "gateway.admin_port=0")
SPLIT = ("prefill.workers=1", "decode.workers=1")
SET_UPS: dict[str, tuple[str, ...]] = {
    "split, k=0": (*SPLIT, "decode.draft_tokens=0"),
    "split, k=3": (*SPLIT, "decode.draft_tokens=3"),
    "aggregated, k=0": ("prefill.workers=0", "decode.workers=2", "decode.draft_tokens=0"),
    "aggregated, k=3": ("prefill.workers=0", "decode.workers=2", "decode.draft_tokens=3"),
    "split, 2 ranks, k=3": (*SPLIT, "decode.group_size=2", "decode.draft_tokens=3"),
}


@dataclass(frozen=True)
class Load:
    """What clients send: `concurrency` at a time, of `num_requests` in all."""

    concurrency: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    temperature: float

    def requests(self) -> list[generation.GenerateRequest]:
        """The same for every set-up: text that the embedded model was not trained on."""
        chance = random.Random(self.num_requests)
        texts = docstring_tokens()
        found: list[generation.GenerateRequest] = []
        for seed in range(self.num_requests):
            length = chance.randint(round(0.8 * self.prompt_tokens), self.prompt_tokens)
            start = chance.randrange(len(texts) - length)
            request = generation.GenerateRequest()
            request.token_ids.ids.extend(texts[start : start + length])
            request.sampling.temperature = self.temperature
            request.sampling.seed = seed
            request.stopping.max_tokens = self.output_tokens
            request.stopping.ignore_eos = True
            found.append(request)
        return found


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it; seconds from sending."""

    first_s: float
    total_s: float
    token_ids: tuple[int, ...]
    drafted: int
    accepted: int
    verify_steps: int


@dataclass(frozen=True)
class Point:
    """One set-up under one load, over all rounds."""

    set_up: str
    concurrency: int
    requests: int
    output_tokens_per_s: float
    ttft_median_s: float
    ttft_p99_s: float
    tpot_median_s: float
    acceptance_length: float
    acceptance_rate: float


async def run_load(address: str, load: Load) -> tuple[list[Answer], float]:
    """All answers, in order of the requests, and the seconds that they took together."""
    client = GenerationClient(address)
    requests = load.requests()
    answers: list[Answer | None] = [None] * len(requests)
    waiting = iter(range(len(requests)))

    async def run_client() -> None:
        for at in waiting:
            answers[at] = await ask(client, requests[at])

    started = time.perf_counter()
    try:
        await asyncio.gather(*(run_client() for _ in range(load.concurrency)))
    finally:
        await client.close()
    return [answer for answer in answers if answer], time.perf_counter() - started


async def ask(client: GenerationClient, request: generation.GenerateRequest) -> Answer:
    sent, first_s = time.perf_counter(), 0.0
    token_ids: list[int] = []
    finish = generation.Finish()
    async for response in client.generate(request, timeout_s=600):
        if response.token_ids and not first_s:
            first_s = time.perf_counter() - sent
        token_ids += response.token_ids
        finish = response.finish
    usage = finish.usage
    return Answer(
        first_s=first_s,
        total_s=time.perf_counter() - sent,
        token_ids=tuple(token_ids),
        drafted=usage.drafted_tokens,
        accepted=usage.accepted_tokens,
        verify_steps=usage.verify_steps,
    )


def summarise(set_up: str, load: Load, runs: Sequence[tuple[list[Answer], float]]) -> Point:
    answers = [answer for run, _ in runs for answer in run]
    firsts = sorted(answer.first_s for answer in answers)
    rest = load.output_tokens - 1
    steps = sum(answer.verify_steps for answer in answers)
    drafted = sum(answer.drafted for answer in answers)
    return Point(
        set_up=set_up,
        concurrency=load.concurrency,
        requests=load.num_requests,
        output_tokens_per_s=statistics.median(
            sum(len(answer.token_ids) for answer in run) / seconds for run, seconds in runs
        ),
        ttft_median_s=statistics.median(firsts),
        ttft_p99_s=firsts[int(0.99 * (len(firsts) - 1))],
        tpot_median_s=statistics.median((a.total_s - a.first_s) / rest for a in answers),
        acceptance_length=rest * len(answers) / steps if steps else 1.0,
        acceptance_rate=sum(a.accepted for a in answers) / drafted if drafted else 0.0,
    )


def measure(
    set_ups: Sequence[str], loads: Sequence[Load], overrides: Sequence[str], rounds: int
) -> list[Point]:
    """Raises SystemExit when two set-ups answer a request differently."""
    runs: dict[tuple[str, Load], list[tuple[list[Answer], float]]] = {}
    said: dict[Load, str] = {}
    for turn in range(rounds):
        for set_up in set_ups if turn % 2 == 0 else list(reversed(set_ups)):
            config = load_config(None, [*PORTS, *SET_UPS[set_up], *overrides])
            for load, (answers, seconds) in run_set_up(config, loads):
                runs.setdefault((set_up, load), []).append((answers, seconds))
                words = repr([answer.token_ids for answer in answers]).encode()
                digest = hashlib.sha256(words).hexdigest()
                if said.setdefault(load, digest) != digest:
                    raise SystemExit(f"{set_up} answers differently at {load}")
                rate = sum(len(answer.token_ids) for answer in answers) / seconds
                print(f"  {set_up:22} c={load.concurrency:<3} {rate:8.1f} tok/s", file=sys.stderr)
    return [summarise(set_up, load, runs[set_up, load]) for load in loads for set_up in set_ups]


def run_set_up(
    config: Config, loads: Sequence[Load]
) -> list[tuple[Load, tuple[list[Answer], float]]]:
    """Every load on one cluster, after a warm-up."""
    progress = Progress(Console(stderr=True, quiet=True))
    with interruptible() as signals, running_cluster(config, progress, signals) as (_, serving):
        warm_up = Load(2, 4, 64, 8, 0.0)
        asyncio.run(run_load(serving.gateway_address, warm_up))
        return [(load, asyncio.run(run_load(serving.gateway_address, load))) for load in loads]


def print_table(points: Sequence[Point]) -> None:
    print(
        f"{'set-up':22} {'conc':>4} {'tok/s':>8} {'TTFT ms':>8} {'p99 ms':>8} {'TPOT ms':>8} "
        f"{'AL':>5} {'acc':>5}"
    )
    for p in points:
        print(
            f"{p.set_up:22} {p.concurrency:4} {p.output_tokens_per_s:8.1f} "
            f"{1e3 * p.ttft_median_s:8.1f} {1e3 * p.ttft_p99_s:8.1f} {1e3 * p.tpot_median_s:8.2f} "
            f"{p.acceptance_length:5.2f} {p.acceptance_rate:5.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="one round, few requests")
    parser.add_argument("--set-ups", default="", help=f"of: {'; '.join(SET_UPS)}")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    per_client = 2 if arguments.short else 4
    loads = [
        Load(
            concurrency,
            max(8, per_client * concurrency),
            arguments.prompt_tokens,
            arguments.output_tokens,
            arguments.temperature,
        )
        for concurrency in map(int, arguments.concurrency.split(","))
    ]
    set_ups = [name.strip() for name in arguments.set_ups.split(";") if name] or list(SET_UPS)
    rounds = 1 if arguments.short else arguments.rounds
    points = measure(set_ups, loads, arguments.set, rounds)
    print(f"commit {commit()}, model {TINY.name}, {vars(arguments)}")
    print_table(points)
    if arguments.json:
        record = {
            "commit": commit(),
            "loads": [asdict(load) for load in loads],
            "points": [asdict(point) for point in points],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
