"""Reads owners' blocks over real NIXL and prints what it saw as JSON; run by test_nixl_transfer.

UCX reads its settings from the environment when it is loaded, so each mode is a process.
"""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from nixl_owner import Blocks, pattern

from hocket.kv.faults import FaultyImporter
from hocket.kv.nixl_agent import NixlOptions
from hocket.kv.nixl_transfer import NixlImporter
from hocket.kv.self_read import read_own_block
from hocket.kv.transfer import KVImporter, PoolDescription, ReadId, ReadResult, ReadState
from hocket.transfer_settings import FaultSettings

NUM_BLOCKS = 64
BLOCK_BYTES = 64 * 1024
SENTINEL = 0xA5
UCX_LOG, MEMORY = sys.argv[1:3]


def pool_of(said: str) -> PoolDescription:
    pool = json.loads(said)["pool"]
    pool["agent_metadata"] = base64.b64decode(pool["agent_metadata"])
    return PoolDescription(**pool)


class Owner:
    """An owner's process and how to read it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        arguments = [*(str(n) for n in (seed, NUM_BLOCKS, BLOCK_BYTES)), MEMORY]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("nixl_owner.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @cached_property
    def said(self) -> str:
        """How to read it; waits until the process has started."""
        return self._line()

    @property
    def pool(self) -> PoolDescription:
        return pool_of(self.said)

    @property
    def epoch(self) -> int:
        return json.loads(self.said)["epoch"]

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def blocks(self) -> np.ndarray:
        return np.stack([pattern(self.seed, b, BLOCK_BYTES) for b in range(NUM_BLOCKS)])

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


class Reader:
    """Reads owners' blocks. `options` are `NixlOptions`'. With `faults` its timers never fire but
    when they are told to: `due`."""

    def __init__(self, faults: FaultSettings | None = None, **options: Any) -> None:
        self.blocks = Blocks(np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), MEMORY)
        self.options = NixlOptions(self.blocks.cuda_version, ucx_log=UCX_LOG, **options)
        importer = NixlImporter(self.blocks.pool, self.options)
        self.importer: KVImporter = importer
        self.due: list[Callable[[], None]] = []
        if faults is not None:
            self.importer = FaultyImporter(importer, faults, lambda _, f: self.due.append(f))
        self.ended = threading.Event()
        self.importer.notify(self.ended.set)

    def post(
        self,
        owner: Owner,
        remote: list[int],
        local: list[int],
        slot: int = 1,
        checksums: Sequence[int] = (),
    ) -> ReadId:
        return self.importer.read_blocks(owner.pool, slot, remote, local, checksums)

    def wait(self, read: ReadId, timeout_s: float = 10.0) -> tuple[ReadResult, float]:
        """Polls only when the importer said that something ended."""
        start = time.perf_counter()
        while True:
            self.ended.clear()
            result = self.importer.poll(read)
            seconds = time.perf_counter() - start
            if result.state is not ReadState.IN_PROGRESS or seconds > timeout_s:
                return result, seconds
            self.ended.wait(timeout_s - seconds)

    def read(self, owner: Owner, remote: list[int], local: list[int]) -> tuple[ReadResult, float]:
        return self.wait(self.post(owner, remote, local))


def plain_reads(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    expected = owner.blocks()
    result, said["first_read_s"] = reader.read(owner, [3], [5])
    said["first_read"] = result.state.name
    said["one_block_equal"] = bool((reader.blocks.read()[5] == expected[3]).all())
    remote = np.random.default_rng(0).permutation(NUM_BLOCKS).tolist()
    local = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    reader.blocks.fill(0)
    result, _ = reader.read(owner, remote, local)
    said["scattered_equal"] = bool((reader.blocks.read()[local] == expected[remote]).all())
    said["epoch_promised"], said["epoch_read"] = owner.epoch, result.epoch
    said["contiguous_gb_per_s"] = bandwidth(reader, owner, list(range(NUM_BLOCKS)))
    said["scattered_gb_per_s"] = bandwidth(reader, owner, remote)
    said["transport"] = reader.importer.transport()


def bandwidth(reader: Reader, owner: Owner, index: list[int]) -> float:
    """GB/s of the best of a few READs of all blocks, fence included."""
    seconds = min(reader.read(owner, index, index)[1] for _ in range(8))
    return len(index) * BLOCK_BYTES / seconds / 1e9


def fence(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    said["epoch_bumped"] = int(owner.ask("bump 1"))
    result, _ = reader.read(owner, [0], [0])
    said["epoch_after_bump"] = result.epoch


def many_at_once(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    """READs of three slots' blocks wait together; one of the slots is in its next epoch."""
    bumped = int(owner.ask("bump 2"))
    reader.blocks.fill(0)
    slots = [0, 2, 3, 2, 0, 0, 3, 2] * 8
    posted = [reader.post(owner, [b], [63 - b], slot) for b, slot in enumerate(slots)]
    results = [reader.wait(read)[0] for read in posted]
    said["many_equal"] = bool((reader.blocks.read()[::-1] == owner.blocks()).all())
    said["many_epochs"] = [result.epoch for result in results]
    said["many_epochs_promised"] = [bumped if slot == 2 else owner.epoch for slot in slots]


def self_read(said: dict[str, Any]) -> None:
    """As a worker does before it serves, in a pool of its own."""
    blocks = Blocks(np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), MEMORY)
    options = NixlOptions(blocks.cuda_version, ucx_log=UCX_LOG)
    start = time.perf_counter()
    said["self_read"] = read_own_block(blocks.pool, options)
    said["self_read_s"] = time.perf_counter() - start
    said["self_read_leaves_zeros"] = not blocks.read().any()


def checksums(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    sums = json.loads(owner.ask("sums 7 8 9"))
    result, _ = reader.wait(reader.post(owner, [7, 8, 9], [1, 2, 3], checksums=sums))
    said["checksums_right"] = result.state.name
    owner.ask("spoil 8")
    result, _ = reader.wait(reader.post(owner, [7, 8, 9], [1, 2, 3], checksums=sums))
    said["checksums_wrong"], said["checksums_error"] = result.state.name, result.error
    said["checksums_epoch"] = result.epoch
    owner.ask("spoil 8")


def faults(owner: Owner, said: dict[str, Any]) -> None:
    """Each kind of fault, on blocks 7 to 9 of a pool that is empty before."""
    sums = json.loads(owner.ask("sums 7 8 9"))
    for kind in ("corrupted", "truncated", "failed"):
        reader = Reader(FaultSettings(**{kind: 1.0}))
        result, _ = reader.wait(reader.post(owner, [7, 8, 9], [7, 8, 9]))
        differ = (reader.blocks.read() != owner.blocks())[7:10].sum(axis=1)
        said[f"{kind}_unchecked"] = [result.state.name, *(int(n) for n in differ)]
        result, _ = reader.wait(reader.post(owner, [7, 8, 9], [1, 2, 3], checksums=sums))
        said[f"{kind}_checked"] = result.state.name
        reader.importer.close()
    reader = Reader(FaultSettings(dropped=1.0))
    read = reader.post(owner, [7, 8, 9], [7, 8, 9])
    said["dropped"] = reader.wait(read, timeout_s=0.5)[0].state.name
    reader.importer.rebuild()
    said["dropped_and_rebuilt"] = reader.wait(read)[0].state.name
    (late,) = reader.due
    reader.blocks.fill(SENTINEL)
    late()
    said["dropped_lands_late"] = bool((reader.blocks.read() != SENTINEL).any())
    reader.importer.close()


def required(owner: Owner, other: Owner, said: dict[str, Any]) -> None:
    """Readers of which one may only use RDMA, and one should have. The READs are too large to
    travel in one batch; all of one peer bring the same bytes to the same blocks."""
    reader = Reader(require="rdma")
    half = NUM_BLOCKS // 2
    ours, theirs = list(range(half)), list(range(half, NUM_BLOCKS))
    posts = [(owner, ours), (other, theirs)] * 6
    reads = [reader.post(peer, blocks, blocks) for peer, blocks in posts]
    results = [reader.wait(read)[0] for read in reads]
    said["required"] = sorted({result.state.name for result in results})
    said["required_errors"] = sorted({result.error for result in results} - {""})
    said["required_refused"] = reader.importer.counters.refused_reads
    said["required_again"] = reader.read(owner, [0], [0])[0].state.name
    reader.importer.close()
    reader = Reader(has_rdma_devices=True)
    said["downgraded"] = reader.read(owner, [0], [0])[0].state.name
    said["downgraded_peers"] = reader.importer.counters.downgraded_peers
    reader.importer.close()


def idle(owner: Owner, said: dict[str, Any]) -> None:
    before, owner_before = time.process_time(), float(owner.ask("cpu"))
    time.sleep(1.0)
    said["idle_reader_cores"] = time.process_time() - before
    said["idle_owner_cores"] = float(owner.ask("cpu")) - owner_before


def stopped_peer(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    """The peer hangs under a READ; a rebuild fences it, and nothing lands when it goes on."""
    owner.process.send_signal(signal.SIGSTOP)
    read = reader.post(owner, list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
    result, _ = reader.wait(read, timeout_s=0.5)
    said["stopped_peer"] = result.state.name
    if result.state is ReadState.IN_PROGRESS:
        reader.importer.rebuild()
        result, said["rebuild_s"] = reader.wait(read)
        said["after_rebuild"] = result.state.name
    reader.blocks.fill(SENTINEL)
    owner.process.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    said["stopped_peer_survives"] = owner.process.poll() is None
    said["nothing_landed_late"] = bool((reader.blocks.read() == SENTINEL).all())


def killed_peer(reader: Reader, owner: Owner, said: dict[str, Any]) -> None:
    owner.process.kill()
    owner.process.wait()
    result, said["killed_s"] = reader.read(owner, [0], [0])
    said["killed"], said["killed_error"] = result.state.name, result.error


def killed_readers(owner: Owner, said: dict[str, Any]) -> None:
    """Readers die in the middle of many READs."""
    for _ in range(2):
        command = [sys.executable, __file__, UCX_LOG, MEMORY, owner.said]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert victim.stdout is not None
        victim.stdout.readline()
        time.sleep(0.1)
        victim.kill()
        victim.communicate()
        time.sleep(0.1)
    said["owner_survives_killed_readers"] = owner.process.poll() is None


def read_until_killed(pool: PoolDescription) -> None:
    reader = Reader()
    every = list(range(NUM_BLOCKS))
    print("reading", flush=True)
    while True:
        for read in [reader.importer.read_blocks(pool, 1, every, every) for _ in range(8)]:
            reader.wait(read)


def same_bytes(reader: Reader, owner: Owner) -> bool:
    reader.blocks.fill(0)
    result, _ = reader.read(owner, list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS)))
    return result.epoch == owner.epoch and bool((reader.blocks.read() == owner.blocks()).all())


def stopped_peer_first(reader: Reader, owner: Owner, stopped: Owner, said: dict[str, Any]) -> None:
    """A peer hangs before it was ever connected; another one is read meanwhile."""
    assert stopped.said
    stopped.process.send_signal(signal.SIGSTOP)
    hung = reader.post(stopped, [0], [0])
    said["read_beside_a_stopped_peer"] = reader.read(owner, [1], [1])[0].state.name
    stopped.process.kill()
    result, _ = reader.wait(hung)
    said["unconnected_killed"] = result.state.name


def main() -> None:
    said: dict[str, Any] = {}
    owners = [Owner(seed) for seed in range(1, 5)]
    reader = Reader()
    try:
        first, second, third, fourth = owners
        plain_reads(reader, first, said)
        fence(reader, first, said)
        many_at_once(reader, first, said)
        self_read(said)
        checksums(reader, first, said)
        faults(first, said)
        required(first, second, said)
        idle(first, said)
        stopped_peer(reader, first, said)
        said["other_peer_equal"] = same_bytes(reader, second)
        reader.importer.rebuild()
        said["after_rebuild_equal"] = same_bytes(reader, second)
        stopped_peer_first(reader, second, third, said)
        killed_readers(second, said)
        killed_peer(reader, second, said)
        said["restarted_equal"] = same_bytes(reader, fourth)
        reader.importer.forget_peer(second.pool.agent)
        reader.importer.close()
    finally:
        for owner in owners:
            owner.end()
    print(json.dumps(said))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        read_until_killed(pool_of(sys.argv[3]))
    else:
        main()
