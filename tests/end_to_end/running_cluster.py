"""The real thing for tests: Ray, store, gateway and workers, each in processes of their own.

`running` starts a `Cluster` with this process as Ray's driver; the rest asks it, waits for it and
looks for processes that it may have left behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from control_plane.cluster.cluster import Cluster, Serving
from control_plane.cluster.registry import Registry
from hocket.config import Config, load_config
from hocket.errors import HocketError
from hocket.execution.local_engine import LocalRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from hocket.types import WorkerDescription

T = TypeVar("T")

# Chunks of one block make a long prompt cross in many pieces.
OVERRIDES = (
    "gateway.port=0",
    "gateway.http_port=0",
    "gateway.admin_port=0",
    "prefill.chunk_tokens=64",
    "prefill.num_blocks=64",
    "decode.num_blocks=64",
    "redis.renew_s=0.2",
    "redis.lease_s=2.0",
    "cluster.drain_s=3.0",
    "cluster.startup_timeout_s=240",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request, in terms that both sides understand. The end token is ignored, so that every
    output has its full length."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def message(self, num_drafts: int | None = None) -> generation.GenerateRequest:
        """For the gateway."""
        request = generation.GenerateRequest(max_draft_tokens=num_drafts)
        request.token_ids.ids.extend(self.token_ids)
        request.sampling.temperature = self.temperature
        request.sampling.top_p = self.top_p
        request.sampling.seed = self.seed
        request.stopping.max_tokens = self.max_tokens
        request.stopping.ignore_eos = True
        return request

    def local(self) -> LocalRequest:
        """For the engine."""
        sampling = SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        return LocalRequest(self.token_ids, sampling, StoppingParams(self.max_tokens))


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    finish: generation.Finish


@dataclass(frozen=True, slots=True)
class Running:
    """A cluster that serves, and how to talk to it."""

    cluster: Cluster
    serving: Serving
    config: Config

    def ask(self, *requests: generation.GenerateRequest, timeout_s: float = 60) -> list[Answer]:
        """All requests at once; their answers in order. Raises HocketError."""

        async def ask_all(client: GenerationClient) -> list[Answer]:
            return await asyncio.gather(*(answer_of(client, r, timeout_s) for r in requests))

        return self.with_client(ask_all)

    def with_client(self, story: Callable[[GenerationClient], Awaitable[T]]) -> T:
        async def run() -> T:
            client = GenerationClient(self.serving.gateway_address)
            try:
                return await story(client)
            finally:
                await client.close()

        return asyncio.run(run())

    def worker(self, worker_id: str) -> WorkerDescription | None:
        """The worker as the registry has it now, with its load."""
        url = self.serving.redis_url
        registry = Registry(load_config(None, [*OVERRIDES, f"redis.url={url}"]).redis)
        try:
            return {w.worker_id: w for w in registry.workers()}.get(worker_id)
        finally:
            registry.close()


async def answer_of(
    client: GenerationClient, request: generation.GenerateRequest, timeout_s: float
) -> Answer:
    token_ids: list[int] = []
    finish = generation.Finish()
    async for response in client.generate(request, timeout_s=timeout_s):
        token_ids.extend(response.token_ids)
        finish = response.finish
    return Answer(tuple(token_ids), finish)


@contextmanager
def running(
    *overrides: str, report: Callable[[str], None] = lambda text: None
) -> Iterator[Running]:
    """A cluster on the embedded model; nothing of it is left afterwards. `report` is told what it
    waits for."""
    config = load_config(None, [*OVERRIDES, *overrides])
    cluster = Cluster(config, report)
    try:
        yield Running(cluster, cluster.start(), config)
    finally:
        started = descendants(os.getpid())
        cluster.stop()
        left = still_alive(started, timeout_s=5)
        assert not left, f"processes left behind: {left}"


def until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for something that other processes do."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def answers(running: Running, request: generation.GenerateRequest) -> bool:
    """Whether the cluster serves a request now."""
    try:
        running.ask(request, timeout_s=10)
    except HocketError:
        return False
    return True


def descendants(of: int) -> dict[int, str]:
    """Ids and names of all living processes that descend from a process."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))):
            name, state, parent = stat
            if state != "Z":
                names[int(entry.name)] = name
                children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, str] = {}
    todo = [of]
    while todo:
        for child in children.get(todo.pop(), []):
            found[child] = names[child]
            todo.append(child)
    return found


def still_alive(processes: dict[int, str], timeout_s: float) -> dict[int, str]:
    """Those of the processes that have not ended within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        # A number may be given to a later process: the name must be the same, too.
        left = {
            process: name
            for process, name in processes.items()
            if (stat := _stat(process)) and stat[0] == name and stat[1] != "Z"
        }
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _stat(process: int) -> tuple[str, str, int] | None:
    """Name, state and parent of a process; None when there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 :].rsplit(")", 1)
    state, parent = rest.split()[:2]
    return name, state, int(parent)
