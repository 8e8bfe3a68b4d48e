"""How long decode waits for a hand-off: both workers' halves, in two processes, without models.

    python benchmarks/kv_transfer_hand_off.py TLS UCX_LOG BLOCKS BLOCK_BYTES ROUNDS

Run by `kv_transfer.py`. Servers, engine threads, tables, gRPC Export stream and NIXL are those of
workers; an engine here only hands its table what comes and tells when a prompt was imported.
Prints the `HandOff`s as JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import queue
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer_owner import new_blocks, pool_of
from kv_transfer_report import HandOff

from decode_workers.group_peers import GroupPeers
from decode_workers.import_stream import EventArrived, Imported, ImportSettings, ReadsEnded
from decode_workers.kv_import import ImportTable
from decode_workers.server import ImportStreams
from hocket.errors import HocketError
from hocket.execution.engine_thread import PULSE_S, StepOutput
from hocket.execution.worker_server import WorkerParts, WorkerServer, bind
from hocket.kv.block_pool import BlockPool
from hocket.kv.nixl_agent import NixlOptions
from hocket.kv.nixl_transfer import NixlExporter, NixlImporter
from hocket.types import (
    Bundle,
    ExportHandle,
    Fingerprint,
    Load,
    RequestKey,
    Role,
    Usage,
    WorkerDescription,
)
from prefill_workers.export_stream import ExportSettings
from prefill_workers.kv_export import ExportTable
from prefill_workers.server import ExportStreams

FINGERPRINT = Fingerprint("weights", "layout", 64, "bfloat16", "n")
NUM_BLOCKS = 256
# As much hidden state as the embedded model hands over.
BUNDLE = Bundle(7, None, None, Usage(prompt_tokens=64, output_tokens=1), bytes(192 * 2))


@dataclass(frozen=True)
class BeginExport:
    key: RequestKey
    num_blocks: int


@dataclass(frozen=True)
class PromptComputed:
    """All of it, in one chunk."""

    key: RequestKey


@dataclass(frozen=True)
class BeginImport:
    key: RequestKey
    handle: ExportHandle


class PrefillHalf:
    """An engine that computes nothing. `answers` gets a handle per BeginExport, and the moment in
    which the blocks of a prompt were ready."""

    def __init__(self, exports: ExportTable, pool: BlockPool) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._exports = exports
        self._pool = pool

    def take(self, command: Any, now: float) -> None:
        match command:
            case BeginExport(key, num_blocks):
                blocks = self._pool.allocate(num_blocks)
                self.answers.put(self._exports.begin(key, blocks, now))
            case PromptComputed(key):
                num_blocks = len(self._exports.blocks(key))
                self.answers.put(time.monotonic())
                self._exports.chunk_ready(key, 0, num_blocks, now)
                self._exports.finish(key, BUNDLE, now)
            case _:
                self._exports.take(command, now)

    def step(self, now: float) -> StepOutput[Any]:
        self._exports.tick(now)
        return self.collect(now)

    def fail_all(self, error: HocketError, now: float) -> None:
        raise error

    def collect(self, now: float) -> StepOutput[Any]:
        messages = tuple(self._exports.take_messages())
        wait_s = self._exports.next_tick_s(now)
        return StepOutput((), messages, Load(), PULSE_S if wait_s is None else wait_s, False)


class DecodeHalf:
    """An engine that frees what was imported. `answers` gets, per prompt, the moments in which its
    chunk was announced here and in which it was published."""

    def __init__(self, imports: ImportTable, pool: BlockPool) -> None:
        self.answers: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()
        self._imports = imports
        self._pool = pool
        self._blocks: dict[RequestKey, list[int]] = {}
        self._announced = 0.0

    def take(self, command: Any, now: float) -> None:
        if isinstance(command, BeginImport):
            blocks = self._pool.allocate(command.handle.num_blocks)
            self._blocks[command.key] = blocks
            self._imports.open(command.key, command.handle, now)
            self._imports.receive(command.key, blocks, now)
            return
        if isinstance(command, EventArrived) and command.event.HasField("chunk"):
            self._announced = now
        self._imports.take(command, now)

    def step(self, now: float) -> StepOutput[Any]:
        for outcome in self._imports.tick(now):
            assert isinstance(outcome, Imported), outcome
            self._pool.free(self._blocks.pop(outcome.key))
            self.answers.put((self._announced, time.monotonic()))
        return self.collect(now)

    def fail_all(self, error: HocketError, now: float) -> None:
        raise error

    def collect(self, now: float) -> StepOutput[Any]:
        messages = tuple(self._imports.take_messages())
        wait_s = self._imports.next_tick_s(now)
        return StepOutput((), messages, Load(), PULSE_S if wait_s is None else wait_s, False)


def describe(role: Role, address: str, block_bytes: int) -> WorkerDescription:
    name = f"{role.value}-0"
    return WorkerDescription(
        name, 1, role, address, FINGERPRINT, "none", NUM_BLOCKS, 64, block_bytes, 1, 1, 0, False
    )


def serve(server: Any, parts: tuple[Any, ...], open_streams: Any) -> WorkerServer[Any, Any]:
    """A worker's server around one of the engines here; `parts` as `WorkerParts` takes them."""

    def crash(error: Exception) -> None:
        raise error

    return WorkerServer(server, WorkerParts(*parts), open_streams, crash)


async def run_prefill(pipe: Connection, block_bytes: int, tls: str) -> None:
    """Answers the commands that come through `pipe` until None comes."""
    server, address = bind("127.0.0.1", 0)
    values = new_blocks(NUM_BLOCKS, block_bytes, seed=1)
    exporter = NixlExporter(pool_of(values), 64, NixlOptions(tls=tls))
    settings = ExportSettings("prefill-0", 1, address, FINGERPRINT, 64, 30.0, 30.0, 1.0)
    pool = BlockPool(NUM_BLOCKS)
    exports = ExportTable(pool, exporter, settings)
    engine = PrefillHalf(exports, pool)
    description = describe(Role.PREFILL, address, block_bytes)
    running = serve(server, (engine, description, {}, exporter.close), ExportStreams)
    await running.start()
    pipe.send("ready")
    while (command := await asyncio.to_thread(pipe.recv)) is not None:
        running.post(command)
        pipe.send(await asyncio.to_thread(engine.answers.get))
    await running.stop()


def prefill_process(pipe: Connection, block_bytes: int, tls: str) -> None:
    asyncio.run(run_prefill(pipe, block_bytes, tls))


class Driver:
    """Drives hand-offs from the decode side, one after the other."""

    def __init__(self, pipe: Connection, engine: DecodeHalf, post: Any) -> None:
        self._pipe = pipe
        self._engine = engine
        self._post = post
        self._count = 0

    def early(self, num_blocks: int) -> tuple[float, float]:
        """Decode's stream is open before the prompt is computed, as it should be. Seconds to the
        publication, from the announcement as decode saw it and from prefill's last byte."""
        key, handle = self._begin(num_blocks)
        self._post(BeginImport(key, handle))
        time.sleep(0.01)
        ready = self._ask(PromptComputed(key))
        announced, published = self._engine.answers.get()
        return published - announced, published - ready

    def late(self, num_blocks: int) -> float:
        """The prompt waits for decode: seconds from the start of the import to its publication,
        the opening of the stream included."""
        key, handle = self._begin(num_blocks)
        self._ask(PromptComputed(key))
        started = time.monotonic()
        self._post(BeginImport(key, handle))
        _, published = self._engine.answers.get()
        return published - started

    def _begin(self, num_blocks: int) -> tuple[RequestKey, ExportHandle]:
        self._count += 1
        key = RequestKey(f"r{self._count}")
        return key, self._ask(BeginExport(key, num_blocks))

    def _ask(self, command: BeginExport | PromptComputed) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()


def measure(driver: Driver, transport: Any, sizes: tuple[int, int], rounds: int) -> HandOff:
    """`sizes`: blocks of a prompt, bytes of a block."""
    num_blocks, block_bytes = sizes
    driver.early(num_blocks)
    driver.late(num_blocks)
    pairs = [(driver.early(num_blocks), driver.late(num_blocks)) for _ in range(rounds)]
    return HandOff(
        transport(),
        num_blocks,
        block_bytes,
        announced_s=statistics.median(early[0] for early, _ in pairs),
        computed_s=statistics.median(early[1] for early, _ in pairs),
        late_s=statistics.median(late for _, late in pairs),
    )


async def run_decode(arguments: list[str], pipe: Connection) -> list[HandOff]:
    tls, ucx_log, counts, block_bytes, rounds = arguments
    server, address = bind("127.0.0.1", 0)
    values = new_blocks(NUM_BLOCKS, int(block_bytes), seed=7)
    importer = NixlImporter(pool_of(values), NixlOptions(tls=tls, ucx_log=ucx_log))
    pool = BlockPool(NUM_BLOCKS)
    imports = ImportTable(
        pool, importer, ImportSettings("decode-0", 1, FINGERPRINT, 30.0, 30.0, 0.25)
    )
    engine = DecodeHalf(imports, pool)
    description = describe(Role.DECODE, address, int(block_bytes))
    streams = partial(ImportStreams, GroupPeers(1, asyncio.get_running_loop()))
    running = serve(server, (engine, description, {}, importer.close), streams)
    importer.notify(lambda: running.post(ReadsEnded()))
    await running.start()
    driver = Driver(pipe, engine, running.post)
    measured = [
        await asyncio.to_thread(
            measure, driver, importer.transport, (int(count), int(block_bytes)), int(rounds)
        )
        for count in counts.split(",")
    ]
    await running.stop()
    return measured


def main() -> None:
    arguments = sys.argv[1:6]
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    prefill = processes.Process(
        target=prefill_process, args=(theirs, int(arguments[3]), arguments[0]), daemon=True
    )
    prefill.start()
    theirs.close()
    assert pipe.recv() == "ready"
    measured = asyncio.run(run_decode(arguments, pipe))
    pipe.send(None)
    prefill.join(10)
    print(json.dumps([asdict(hand_off) for hand_off in measured]))


if __name__ == "__main__":
    main()
