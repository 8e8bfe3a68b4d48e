"""The near side of `kv_transfer.py`: measures one transport, block size by block size.

Run as a process of its own, because UCX reads its settings when it is loaded. For each block size
it starts an owner (`kv_transfer_owner.py`); then, case by case, it moves the same blocks in turn by
memcpy, raw NIXL and Hocket, so that other load falls on all alike, and prints medians as JSON.
"""

from __future__ import annotations

import base64
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kv_transfer_owner import new_blocks, pool_of
from kv_transfer_raw import RawAgent
from kv_transfer_report import Point, format_point

from hocket.kv.nixl_agent import (
    NixlOptions,
    RegisteredPool,
    cut_for_tcp,
    load_bindings,
    new_agent_name,
)
from hocket.kv.nixl_transfer import NixlImporter
from hocket.kv.transfer import PoolDescription, ReadId, ReadState

CHUNK_BLOCKS = 8
"""Blocks of a chunk: 512 tokens, the default of `prefill.chunk_tokens`."""
_MIN_ROUNDS = 5
_MAX_ROUNDS = 200


Way = Callable[[list[int], list[int]], None]


class Owner:
    """The owner's process and how to read it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("kv_transfer_owner.py")),
                str(num_blocks),
                str(block_bytes),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        pool = said["pool"]
        pool["agent_metadata"] = base64.b64decode(pool["agent_metadata"])
        self.pool = PoolDescription(**pool)
        self.raw_metadata = base64.b64decode(said["raw"])
        self.epoch: int = said["epoch"]

    def end(self) -> None:
        self.process.communicate("")


class HocketReader:
    """Reads as a decode worker does: READs go to the importer, whoever waits sleeps meanwhile."""

    def __init__(self, pool: RegisteredPool, options: NixlOptions, owner: Owner) -> None:
        self._owner = owner
        self.importer = NixlImporter(pool, options)
        self._ended = threading.Event()
        self.importer.notify(self._ended.set)

    def read(
        self, remote: list[int], local: list[int], chunk_blocks: int, sums: Sequence[int] = ()
    ) -> None:
        """READs of up to `chunk_blocks` blocks, all posted at once; returns when the last one is
        fenced, and verified where `sums` holds the blocks' checksums."""
        chunks = [slice(i, i + chunk_blocks) for i in range(0, len(remote), chunk_blocks)]
        reads = [
            self.importer.read_blocks(self._owner.pool, 0, remote[c], local[c], sums[c])
            for c in chunks
        ]
        while True:
            self._ended.clear()
            reads = [read for read in reads if not self._has_ended(read)]
            if not reads:
                return
            self._ended.wait()

    def _has_ended(self, read: ReadId) -> bool:
        result = self.importer.poll(read)
        if result.state is ReadState.IN_PROGRESS:
            return False
        assert result.state is ReadState.DONE, result
        assert result.epoch == self._owner.epoch, result
        return True


def measure_block_size(
    tls: str, ucx_log: str, num_blocks: tuple[int, ...], block_bytes: int, seconds: float
) -> list[Point]:
    """All cases of one block size; about `seconds` each."""
    most = max(num_blocks)
    owner = Owner(most, block_bytes)
    source = new_blocks(most, block_bytes, seed=1)
    target = new_blocks(most, block_bytes, seed=7)
    pool = pool_of(target)
    hocket = HocketReader(pool, NixlOptions(tls=tls, ucx_log=ucx_log), owner)
    raw = RawAgent(load_bindings(""), new_agent_name("raw"), pool)
    peer = raw.connect(
        owner.raw_metadata, RegisteredPool(owner.pool.base_address, block_bytes, most)
    )

    def copy(remote: list[int], local: list[int]) -> None:
        for theirs, ours in zip(remote, local, strict=True):
            target[ours] = source[theirs]

    ways: dict[str, Way] = {
        "memcpy": copy,
        "raw": lambda remote, local: raw.read(peer, remote, local),
        "hocket": lambda remote, local: hocket.read(remote, local, CHUNK_BLOCKS),
        "whole": lambda remote, local: hocket.read(remote, local, len(remote)),
    }
    if tls == "tcp":
        ways["raw_cut"] = lambda remote, local: raw.read_parts(
            peer, cut_for_tcp(remote, local, block_bytes)
        )
    for way in ways.values():
        target[:] = 0
        every = list(range(most))
        way(every, random.sample(every, most))
        way(every, every)
        assert (target == source).all()
    points: list[Point] = []
    for count in num_blocks:
        for layout in ("in order", "scattered"):
            choose = partial(choose_blocks, most, count, layout)
            rounds, median_s, quiet_s = measure(ways, choose, seconds)
            transport = hocket.importer.transport()
            points.append(Point(transport, count, block_bytes, layout, rounds, median_s, quiet_s))
            print(format_point(points[-1]), file=sys.stderr, flush=True)
    hocket.importer.close()
    owner.end()
    return points


def choose_blocks(num_blocks: int, count: int, layout: str) -> tuple[list[int], list[int]]:
    """Theirs and ours: other blocks each time, so that no way finds them in its core's cache."""
    if layout == "scattered":
        return random.sample(range(num_blocks), count), random.sample(range(num_blocks), count)
    theirs, ours = (random.randrange(num_blocks - count + 1) for _ in range(2))
    return list(range(theirs, theirs + count)), list(range(ours, ours + count))


def measure(
    ways: dict[str, Way],
    choose: Callable[[], tuple[list[int], list[int]]],
    seconds: float,
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Rounds, and seconds of the ways, taken in turn: medians and 10th percentiles."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < _MIN_ROUNDS or (rounds < _MAX_ROUNDS and time.perf_counter() < end):
        rounds += 1
        # In another order each time: what ran before leaves its mark on the caches.
        for name in random.sample(list(ways), len(ways)):
            remote, local = choose()
            start = time.perf_counter()
            ways[name](remote, local)
            times[name].append(time.perf_counter() - start)
    median_s = {name: statistics.median(taken) for name, taken in times.items()}
    quiet_s = {name: sorted(taken)[rounds // 10] for name, taken in times.items()}
    return rounds, median_s, quiet_s


def main() -> None:
    tls, ucx_log, counts, sizes, seconds = sys.argv[1:6]
    num_blocks = tuple(int(word) for word in counts.split(","))
    points: list[Point] = []
    for block_bytes in sizes.split(","):
        points += measure_block_size(tls, ucx_log, num_blocks, int(block_bytes), float(seconds))
    print(json.dumps([asdict(point) for point in points]))


if __name__ == "__main__":
    main()
