"""The READ of a hand-off, taken apart: beside memcpy and raw NIXL, without fence, with checksums.

    python benchmarks/handoff_reads.py TLS UCX_LOG BLOCKS BLOCK_BYTES SECONDS

Run by `handoff.py`, as a process of its own because UCX reads its settings when it is loaded. The
same blocks of an owner's process cross in each way in turn (`kv_transfer_reader.py` has the owner
and the turns), so that other load falls on all alike. Prints the `ReadPoint`s as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import numpy as np
from handoff_report import ReadPoint, format_read
from kv_transfer_owner import new_blocks, pool_of
from kv_transfer_raw import RawAgent
from kv_transfer_reader import HocketReader, Owner, Way, choose_blocks, measure

from hocket.kv.checksum import checksums_of
from hocket.kv.nixl_agent import (
    Fence,
    NixlAgent,
    NixlOptions,
    Part,
    RegisteredPool,
    cut_for_tcp,
    load_bindings,
    new_agent_name,
)
from hocket.kv.pool_bytes import blocks_of


class BareReader:
    """Our agent without the importer around it: the thread that posts a READ waits for it."""

    def __init__(self, pool: RegisteredPool, owner: Owner, tls: str) -> None:
        self._words = np.zeros(1, dtype=np.uint64)
        self._agent = NixlAgent(load_bindings(""), new_agent_name("bare"), pool, self._words)
        self._link = self._agent.connect(owner.pool)
        self._block_bytes = pool.block_bytes
        self._is_tcp = tls == "tcp"

    def read(self, remote: list[int], local: list[int]) -> None:
        parts = [Part(remote, local, in_pieces=False)]
        if self._is_tcp:
            parts = cut_for_tcp(remote, local, self._block_bytes)
        for part in parts:
            self._finish(self._agent.read_part(self._link, part))

    def read_fenced(self, remote: list[int], local: list[int]) -> None:
        self.read(remote, local)
        self._finish(self._agent.read_epochs(self._link, Fence([0], [0])))

    def _finish(self, handle: int) -> None:
        while not self._agent.is_done(handle):
            pass
        self._agent.release(handle)


class Cases:
    """All ways to move blocks from one owner over one transport."""

    def __init__(self, tls: str, ucx_log: str, num_blocks: int, block_bytes: int) -> None:
        self._tls = tls
        self._owner = Owner(num_blocks, block_bytes)
        self._source = new_blocks(num_blocks, block_bytes, seed=1)
        self._target = new_blocks(num_blocks, block_bytes, seed=7)
        pool = pool_of(self._target)
        self._hocket = HocketReader(pool, NixlOptions(tls=tls, ucx_log=ucx_log), self._owner)
        self._raw = RawAgent(load_bindings(""), new_agent_name("raw"), pool)
        theirs = RegisteredPool(self._owner.pool.base_address, block_bytes, num_blocks)
        self._peer = self._raw.connect(self._owner.raw_metadata, theirs)
        self._bare = BareReader(pool, self._owner, tls)
        self._source_blocks = blocks_of(pool_of(self._source))
        self._sums = checksums_of(self._source_blocks, range(num_blocks))
        self._ways = self._all_ways()
        for name, way in self._ways.items():
            self._target[:] = 0
            way(every := list(range(num_blocks)), every)
            assert name == "sums" or (self._target == self._source).all(), name

    def measure(self, count: int, layout: str, seconds: float) -> ReadPoint:
        most, block_bytes = self._source.shape
        choose = partial(choose_blocks, most, count, layout)
        rounds, median_s, quiet_s = measure(self._ways, choose, seconds)
        transport = self._hocket.importer.transport()
        return ReadPoint(transport, count, block_bytes, layout, rounds, median_s, quiet_s)

    def close(self) -> None:
        self._hocket.importer.close()
        self._owner.end()

    def _all_ways(self) -> dict[str, Way]:
        ways: dict[str, Way] = {
            "memcpy": self._copy,
            "raw": lambda remote, local: self._raw.read(self._peer, remote, local),
            "bare": self._bare.read,
            "fenced": self._bare.read_fenced,
            "hocket": lambda remote, local: self._hocket.read(remote, local, len(remote)),
            "checked": self._read_checked,
            "sums": self._sum,
        }
        if self._tls == "tcp":
            block_bytes = self._source.shape[1]
            ways["raw_cut"] = lambda remote, local: self._raw.read_parts(
                self._peer, cut_for_tcp(remote, local, block_bytes)
            )
        return ways

    def _copy(self, remote: list[int], local: list[int]) -> None:
        for theirs, ours in zip(remote, local, strict=True):
            self._target[ours] = self._source[theirs]

    def _sum(self, remote: list[int], local: list[int]) -> None:
        del local
        checksums_of(self._source_blocks, remote)

    def _read_checked(self, remote: list[int], local: list[int]) -> None:
        sums = [self._sums[block] for block in remote]
        self._hocket.read(remote, local, len(remote), sums)


def main() -> None:
    tls, ucx_log, counts, block_bytes, seconds = sys.argv[1:6]
    num_blocks = [int(word) for word in counts.split(",")]
    # Twice as many as are read at once, so that blocks can lie apart and differ from turn to turn.
    cases = Cases(tls, ucx_log, 2 * max(num_blocks), int(block_bytes))
    points: list[ReadPoint] = []
    for count in num_blocks:
        for layout in ("in order", "scattered"):
            points.append(cases.measure(count, layout, float(seconds)))
            print(format_read(points[-1]), file=sys.stderr, flush=True)
    cases.close()
    print(json.dumps([asdict(point) for point in points]))


if __name__ == "__main__":
    main()
