"""A prefill worker on one host, a decode worker on the other, and the smallest gateway there is.

The workers talk to each other over the network between the hosts only; the gateway, in this
process, reaches both whatever that network does.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from hocket.rpc.clients import WorkerClient
from hocket.rpc.session_client import SessionClient
from hocket.types import (
    Begun,
    Event,
    Failed,
    Finished,
    Joined,
    Leg,
    Load,
    StartRequest,
    Tokens,
    WorkerDescription,
)
from tests.end_to_end.two_hosts.network import ADDRESSES, Network

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 90.0
LOOK_S = 0.05


class Worker:
    """One worker process on the host of its role's name."""

    def __init__(
        self, network: Network, role: str, folder: Path, overrides: tuple[str, ...]
    ) -> None:
        self._network = network
        self._role = role
        self._log_path = folder / f"{role}.log"
        self._log = self._log_path.open("w")
        command = [sys.executable, "-m", f"{role}_workers"]
        for override in (f"cluster.host={ADDRESSES[role]}", "transfer.tls=tcp", *overrides):
            command += ["--set", override]
        # The worker finds its network device itself.
        chosen = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
        self.process = subprocess.Popen(
            network.command(role, *command),
            cwd=ROOT,
            env={**chosen, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address = ""
        self.metrics_address = ""

    def wait_until_serving(self) -> None:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        assert " serves " in line, f"{line!r}\n{self.log()}"
        self.address = self._network.reach(self._role, line.split()[-1])
        inner = asyncio.run(self.describe()).metrics_address
        self.metrics_address = self._network.reach(self._role, inner)

    async def describe(self) -> WorkerDescription:
        client = WorkerClient(self.address)
        try:
            return await client.describe()
        finally:
            await client.close()

    async def load(self) -> Load:
        return (await self.describe()).load

    def counters(self) -> dict[str, float]:
        """What its Prometheus page says of hand-offs, without the page's prefix."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5) as page:
            families = text_string_to_metric_families(page.read().decode())
        prefix = f"hocket_{self._role}_hand_off_"
        samples = (sample for family in families for sample in family.samples)
        return {s.name.removeprefix(prefix): s.value for s in samples if s.name.startswith(prefix)}

    def log(self) -> str:
        return self._log_path.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._log.close()
        return self.process.returncode


@dataclass(frozen=True)
class Pair:
    """The network and both workers, running."""

    network: Network
    prefill: Worker
    decode: Worker

    async def wait_until_free(self, timeout_s: float) -> None:
        """Every block of both workers comes back, and no READ is left."""
        for worker in (self.prefill, self.decode):

            async def is_free(worker: Worker = worker) -> bool:
                load = await worker.load()
                return load.free_blocks == load.num_blocks and not load.running_requests

            await until(is_free, timeout_s, "all blocks are free")

        async def has_no_read() -> bool:
            counters = await asyncio.to_thread(self.decode.counters)
            return counters["reads_in_flight"] == counters["blocks_in_quarantine"] == 0

        await until(has_no_read, timeout_s, "no READ is in flight and nothing in quarantine")

    def assert_alive(self) -> None:
        for worker in (self.prefill, self.decode):
            assert worker.process.poll() is None, worker.log()


async def until(is_so: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> None:
    """Waits for something that other processes do."""
    deadline = time.monotonic() + timeout_s
    while not await is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(LOOK_S)


@dataclass
class Heard:
    """What one request told; `is_over` is set when there is nothing more to come."""

    tokens: dict[int, int] = field(default_factory=dict[int, int])
    events: list[Event] = field(default_factory=list[Event])
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert sorted(self.tokens) == list(range(len(self.tokens))), "a gap in the output"
        return tuple(self.tokens[i] for i in range(len(self.tokens)))

    @property
    def failed(self) -> Failed | None:
        return next((event for event in self.events if isinstance(event, Failed)), None)

    @property
    def joined(self) -> Joined | None:
        return next((event for event in self.events if isinstance(event, Joined)), None)


class Gateway:
    """Starts prefill, then decode with the handle from Begun. Use as an async context."""

    def __init__(self, pair: Pair) -> None:
        self._prefill = SessionClient(pair.prefill.address, "test")
        self._decode = SessionClient(pair.decode.address, "test")

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._prefill.close()
        await self._decode.close()

    def start(self, request: StartRequest) -> Heard:
        heard = Heard()

        def take(event: Event) -> None:
            heard.events.append(event)
            match event:
                case Begun():
                    leg = replace(request, leg=Leg.DECODE, export=event.export)
                    self._decode.start(leg, take)
                case Tokens():
                    for i, token in enumerate(event.token_ids, event.output_index):
                        assert heard.tokens.setdefault(i, token) == token
                case Finished(_, reason, _) if reason is not None:
                    heard.is_over.set()
                case Failed():
                    heard.is_over.set()
                case _:
                    pass

        worker = self._decode if request.leg is Leg.WHOLE else self._prefill
        worker.start(request, take)
        return heard

    async def generate(self, request: StartRequest, timeout_s: float = 60.0) -> Heard:
        heard = self.start(request)
        async with asyncio.timeout(timeout_s):
            await heard.is_over.wait()
        return heard
