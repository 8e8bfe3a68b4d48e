"""Everything at once for a long time: mixed requests, cancels, killed workers; nothing is left.

    python benchmarks/soak.py                              5,000 requests; some ten minutes
    python benchmarks/soak.py --requests 500 --json soak.json
    python benchmarks/soak.py --set transfer.tls=tcp --set transfer.policy=fail

It starts what `hocket up` starts, two prefill and two decode workers on the embedded model, sends
requests of mixed lengths, greedy and sampled, leaves a share of them at random moments, and kills a
random worker now and then. The exit code is 0 only if at rest no block is missing and no entry left
anywhere, resident memory is flat, and every token that came is the one that the engine in one
process says, whatever happened in between. benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decode_workloads import commit
from rich.console import Console
from soak_load import Clients, Outcome, Wish, make_wishes
from soak_report import Expected, Record, summary, table
from soak_watch import (
    REST_TIMEOUT_S,
    Killer,
    MemoryWatch,
    Rest,
    descendants_named,
    places,
    wait_for_rest,
)

from control_plane.cluster.cluster import Cluster, Serving
from hocket.commands.up import Progress, interruptible, running_cluster
from hocket.config import Config, load_config
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.model.model_config import ModelConfig
from hocket.model.weights import load_model
from hocket.request_params import StoppingParams

OVERRIDES = (
    "gateway.port=0",
    "gateway.http_port=-1",
    "gateway.admin_port=0",
    "prefill.workers=2",
    "decode.workers=2",
    # Chunks of two blocks: most prompts cross in several pieces. Pools that are often full.
    "prefill.chunk_tokens=128",
    "prefill.num_blocks=96",
    "decode.num_blocks=96",
    "redis.renew_s=0.2",
    "redis.lease_s=2.0",
    "cluster.startup_timeout_s=240",
)
LOOK_S = 0.5
_OTHERS = ("raylet", "gcs_server", "valkey-server")


class Run:
    """One cluster from its first request to its rest."""

    def __init__(self, cluster: Cluster, serving: Serving, arguments: argparse.Namespace) -> None:
        self.killer = Killer(arguments.kill_every_s, arguments.max_kills, arguments.seed)
        self.memory = MemoryWatch()
        self._cluster = cluster
        self._serving = serving
        self._concurrency = arguments.concurrency
        self._began_s = 0.0

    async def run(self, wishes: Sequence[Wish]) -> tuple[list[Outcome], float, Rest]:
        """What became of the wishes, in how many seconds, and what was left."""
        self._began_s = time.monotonic()
        clients = Clients(self._serving.gateway_address, wishes, self._began_s)
        asking = asyncio.create_task(clients.run(self._concurrency))
        told = 0
        while not asking.done():
            await asyncio.wait([asking], timeout=LOOK_S)
            await asyncio.to_thread(self._look, clients.num_ended)
            if clients.num_ended - told >= max(1, len(wishes) // 20):
                told = clients.num_ended
                self._tell(told, len(wishes))
        seconds = self._now_s()
        # Whoever was killed last is to be at rest, too.
        while any(kill.back_s is None for kill in self.killer.kills):
            if self._now_s() > seconds + REST_TIMEOUT_S:
                break
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._look, clients.num_ended)
        workers = len(self._serving.workers)
        rest = await wait_for_rest(self._serving.admin_address, workers, REST_TIMEOUT_S)
        return asking.result(), seconds, rest

    def _look(self, num_ended: int) -> None:
        found = places(self._cluster)
        self.killer.turn(self._now_s(), found)
        self.memory.turn(num_ended, found | descendants_named(os.getpid(), _OTHERS))

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _tell(self, num_ended: int, num_all: int) -> None:
        killed = [kill.worker_id for kill in self.killer.kills]
        print(
            f"  {self._now_s():6.0f} s: {num_ended} of {num_all} requests ended, "
            f"{len(killed)} workers killed",
            file=sys.stderr,
            flush=True,
        )


def run_reference(config: Config, wishes: Sequence[Wish]) -> list[Expected]:
    """What the engine in one process answers to all of them, without drafts, in one go."""
    folder = config.model.checkpoint()
    model_config = ModelConfig.from_checkpoint(folder)
    # The embedded model is too small for more.
    torch.set_num_threads(1)
    model = load_model(folder, dtype=model_config.dtype, batch_invariant=True)
    engine = LocalEngine(model, LocalEngineLimits(num_blocks=1024))
    end_tokens = frozenset(model_config.eos_token_ids)
    requests = [
        LocalRequest(
            wish.token_ids,
            wish.sampling,
            StoppingParams(wish.max_tokens, frozenset() if wish.ignore_eos else end_tokens),
        )
        for wish in wishes
    ]
    return [
        Expected(result.token_ids, result.finish_reason) for result in engine.generate(requests)
    ]


def run(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    """The whole story; its summary."""
    wishes = make_wishes(arguments.requests, arguments.cancel_share, arguments.seed)
    progress = Progress(Console(stderr=True, quiet=True))
    with interruptible() as signals, running_cluster(config, progress, signals) as up:
        story = Run(*up, arguments)
        outcomes, seconds, rest = asyncio.run(story.run(wishes))
    print("  the same requests in one process", file=sys.stderr, flush=True)
    record = Record(
        wishes=wishes,
        outcomes=outcomes,
        expected=run_reference(config, wishes),
        kills=story.killer.kills,
        memories=list(story.memory.memories.values()),
        rest=rest,
        seconds=seconds,
        max_mib_per_1000=arguments.max_mib_per_1000,
    )
    return summary(record)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--cancel-share", type=float, default=0.2, help="of requests, 0 to 1")
    parser.add_argument("--kill-every-s", type=float, default=30.0, help="0: never")
    parser.add_argument("--max-kills", type=int, default=1 << 30)
    parser.add_argument("--max-mib-per-1000", type=float, default=2.0, help="growth that is flat")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path, help="where the results go")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    overrides = [*OVERRIDES, *arguments.set]
    told = run(load_config(None, overrides), arguments)
    print(table(told))
    if arguments.json:
        options = {k: v for k, v in vars(arguments).items() if k not in ("json", "set")}
        about = {"commit": commit(), "options": options, "overrides": overrides}
        arguments.json.write_text(json.dumps(about | told, indent=1) + "\n")
    return 1 if told["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
