"""What the gateway costs: requests/s and latency beside a bare `grpc.aio` server, in one run.

    python benchmarks/gateway.py                             about a minute
    python benchmarks/gateway.py --json results.json --text  text prompts instead of token ids

The gateway, its stub workers (no model), the bare server and the client are processes of their
own. Both servers answer the same client with 16 small messages a request, in turn, for several
rounds: what else the machine does falls on both alike, and a ratio is the median of the rounds'.
benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from gateway_processes import (
    Job,
    Measured,
    bare_server,
    client,
    gateway,
    stub_description,
    stub_worker,
)

from hocket.types import Role

PROCESSES = multiprocessing.get_context("spawn")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HEADER = (
    "server    conc    req/s   p50 ms   p99 ms  first ms  p99 first  msgs/req  cpu ms/req (server,"
    " workers, client)"
)


class ServerProcess:
    """A process that sent its port; closing its pipe ends it."""

    def __init__(self, body: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=body, args=(theirs, *arguments))
        self._process.start()
        theirs.close()
        self.port: int = self.pipe.recv()

    def cpu_s(self) -> float:
        """Processor time used so far, in user and kernel."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def close(self) -> None:
        self.pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


@dataclass(frozen=True)
class Round:
    """One server under one load for a while. CPU times are per request, in milliseconds."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    first_p50_ms: float
    first_p99_ms: float
    messages_per_request: float
    server_cpu_ms: float
    workers_cpu_ms: float
    client_cpu_ms: float

    @property
    def cpu_ms(self) -> float:
        """Of all processes."""
        return self.server_cpu_ms + self.workers_cpu_ms + self.client_cpu_ms


@dataclass(frozen=True)
class Point:
    """Both servers at one concurrency: the rounds, and the medians over them."""

    concurrency: int
    gateway: list[Round]
    bare: list[Round]

    def ratio(self, value: Callable[[Round], float]) -> float:
        """Median of gateway / bare over the rounds."""
        pairs = zip(self.gateway, self.bare, strict=True)
        return statistics.median(value(ours) / value(bare) for ours, bare in pairs)


def measure_round(
    job: Job, driver: ServerProcess, server: ServerProcess, workers: Sequence[ServerProcess]
) -> Round:
    """Runs one job. Processor times are taken over all of it, so all its requests share them."""
    processes = ([server], list(workers), [driver])
    before = [sum(p.cpu_s() for p in group) for group in processes]
    driver.pipe.send(job)
    measured: Measured = driver.pipe.recv()
    after = [sum(p.cpu_s() for p in group) for group in processes]
    num_requests = len(measured.latencies_s)
    assert num_requests > 1, f"{num_requests} requests ended in {job.seconds} s"
    cpu_ms = [(b - a) * 1e3 / measured.num_all for a, b in zip(before, after, strict=True)]
    return Round(
        requests_per_s=num_requests / job.seconds,
        p50_ms=percentile(measured.latencies_s, 50) * 1e3,
        p99_ms=percentile(measured.latencies_s, 99) * 1e3,
        first_p50_ms=percentile(measured.first_message_s, 50) * 1e3,
        first_p99_ms=percentile(measured.first_message_s, 99) * 1e3,
        messages_per_request=measured.num_messages / num_requests,
        server_cpu_ms=cpu_ms[0],
        workers_cpu_ms=cpu_ms[1],
        client_cpu_ms=cpu_ms[2],
    )


def measure(options: argparse.Namespace) -> list[Point]:
    """Starts everything, takes every round, ends everything."""
    with ExitStack() as stack:

        def run(body: Callable[..., None], *arguments: Any) -> ServerProcess:
            process = ServerProcess(body, *arguments)
            stack.callback(process.close)
            return process

        step_s = options.step_ms / 1e3
        workers = [run(stub_worker, role, step_s) for role in Role]
        descriptions = [stub_description(r, w.port) for r, w in zip(Role, workers, strict=True)]
        ours = run(gateway, descriptions)
        bare = run(bare_server, options.messages)
        driver = run(client)
        points: list[Point] = []
        for concurrency in options.concurrency:
            point = Point(concurrency, [], [])
            for _ in range(options.rounds):
                for server, helpers, rounds in (
                    (bare, [], point.bare),
                    (ours, workers, point.gateway),
                ):
                    job = Job(
                        port=server.port,
                        concurrency=concurrency,
                        num_tokens=options.messages,
                        is_text=options.text,
                        warm_up_s=options.warm_up,
                        seconds=options.seconds,
                    )  # fmt: skip
                    rounds.append(measure_round(job, driver, server, helpers))
            points.append(point)
            print(format_point(point), flush=True)
        return points


def percentile(values: list[float], percent: int) -> float:
    """The value below which that share lies, of at least two."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def medians(rounds: Sequence[Round]) -> Round:
    """Each figure's median over the rounds."""
    return Round(
        **{name: statistics.median(asdict(r)[name] for r in rounds) for name in asdict(rounds[0])}
    )


def format_point(point: Point) -> str:
    """Three lines: bare server, gateway, ratio."""
    lines: list[str] = []
    for name, rounds in (("bare", point.bare), ("gateway", point.gateway)):
        m = medians(rounds)
        lines.append(
            f"{name:8s} {point.concurrency:5d} {m.requests_per_s:8.1f} {m.p50_ms:8.2f}"
            f" {m.p99_ms:8.2f} {m.first_p50_ms:9.2f} {m.first_p99_ms:10.2f}"
            f" {m.messages_per_request:9.2f}"
            f"  {m.server_cpu_ms:.2f}, {m.workers_cpu_ms:.2f}, {m.client_cpu_ms:.2f}"
        )
    lines.append(
        f"{'ratio':8s} {point.concurrency:5d} {point.ratio(lambda r: r.requests_per_s):8.2f}"
        f" {point.ratio(lambda r: r.p50_ms):8.2f} {point.ratio(lambda r: r.p99_ms):8.2f}"
        f" {point.ratio(lambda r: r.first_p50_ms):9.2f}"
        f" {point.ratio(lambda r: r.first_p99_ms):10.2f}"
        f" {point.ratio(lambda r: r.messages_per_request):9.2f}"
        f"  {1 / point.ratio(lambda r: r.cpu_ms):.2f} by processor time"
    )
    return "\n".join(lines)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrency", type=numbers, default=(1, 32, 256))
    parser.add_argument("--messages", type=int, default=16, help="of one token each, per request")
    parser.add_argument("--text", action="store_true", help="text prompts, not token ids")
    parser.add_argument("--step-ms", type=float, default=0.0, help="pause before a stub's step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.2, help="counted, per round and server")
    parser.add_argument("--warm-up", type=float, default=0.4, help="seconds before each round")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    print(HEADER, flush=True)
    points = measure(options)
    if options.json is None:
        return
    from decode_workloads import commit

    report = {
        "benchmark": "gateway",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "grpcio": grpc.__version__,
            "python": sys.version.split()[0],
        },
        "options": {k: v for k, v in vars(options).items() if k != "json"},
        "points": [asdict(point) for point in points],
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
