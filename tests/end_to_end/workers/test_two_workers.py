"""Two worker processes over gRPC and NIXL on loopback, driven by a small gateway of our own.

Once with TCP only and once with whatever UCX finds. The output equals the engine in one process.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hocket.request_params import SamplingParams
from hocket.rpc.clients import WorkerClient
from hocket.rpc.session_client import SessionClient
from hocket.types import (
    Begun,
    Event,
    Failed,
    Finished,
    FinishReason,
    Joined,
    Leg,
    Role,
    StartRequest,
    Tokens,
)

pytestmark = pytest.mark.e2e
MakeRequest = Callable[..., StartRequest]

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S = 60
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=11)


class Worker:
    """One worker process; `address` is what it printed."""

    def __init__(self, package: str, config: Path, log: Path, *arguments: str) -> None:
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", package, "--config", str(config), *arguments],
            cwd=ROOT,
            # A killed process cannot clean up its temporary files.
            env={**os.environ, "TMPDIR": str(log.parent)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._log_path = log

    def wait_until_serving(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        assert " serves " in line, f"{line!r}\n{self._log_path.read_text()}"
        return line.split()[-1]

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=30)
        self._log.close()
        return self.process.returncode


@dataclass(frozen=True)
class Two:
    """Both workers, running."""

    prefill: Worker
    decode: Worker
    prefill_address: str
    decode_address: str
    tls: str


def start_two(checkpoint: Path, folder: Path, tls: str) -> Two:
    config = folder / "hocket.toml"
    config.write_text(
        f"""
        [model]
        path = "{checkpoint}"
        [prefill]
        num_blocks = 64
        chunk_tokens = 64
        [decode]
        num_blocks = 64
        draft_tokens = 3
        adaptive_drafts = false
        [transfer]
        tls = "{tls}"
        """
    )
    prefill = Worker("prefill_workers", config, folder / "prefill.log")
    decode = Worker("decode_workers", config, folder / "decode.log")
    try:
        return Two(prefill, decode, prefill.wait_until_serving(), decode.wait_until_serving(), tls)
    except BaseException:
        prefill.stop(signal.SIGKILL)
        decode.stop(signal.SIGKILL)
        raise


@pytest.fixture(scope="module", params=["tcp", "auto"])
def two(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Two]:
    workers = start_two(checkpoint, tmp_path_factory.mktemp("workers"), request.param)
    yield workers
    assert (workers.prefill.stop(), workers.decode.stop()) == (0, 0)


@dataclass
class Heard:
    """What one request told; `is_over` is set when there is nothing more to come."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: int = 0
    events: list[Event] = field(default_factory=list)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def find(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return tuple(self.tokens[i] for i in range(len(self.tokens)))


class Gateway:
    """Starts prefill, then decode with the handle from Begun. Use as an async context."""

    def __init__(self, two: Two) -> None:
        self.prefill = SessionClient(two.prefill_address, "test")
        self.decode = SessionClient(two.decode_address, "test")

    async def __aenter__(self) -> Gateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prefill.close()
        await self.decode.close()

    def start(self, request: StartRequest) -> Heard:
        heard = Heard()

        def take(event: Event) -> None:
            heard.events.append(event)
            match event:
                case Begun():
                    leg = replace(request, leg=Leg.DECODE, export=event.export)
                    self.decode.start(leg, take)
                case Tokens():
                    for i, token in enumerate(event.token_ids, event.output_index):
                        assert heard.tokens.setdefault(i, token) == token
                case Finished(_, reason, _) if reason is not None:
                    heard.is_over.set()
                case Failed():
                    heard.is_over.set()

        session = self.decode if request.leg is Leg.WHOLE else self.prefill
        session.start(request, take)
        return heard

    async def generate(self, requests: Sequence[StartRequest]) -> list[Heard]:
        heard = [self.start(request) for request in requests]
        async with asyncio.timeout(60):
            await asyncio.gather(*(one.is_over.wait() for one in heard))
        return heard


async def wait_until_free(two: Two) -> None:
    """Every block of both workers comes back within seconds."""
    for address in (two.prefill_address, two.decode_address):
        client = WorkerClient(address)
        deadline = time.monotonic() + 5
        while True:
            load = (await client.describe()).load
            if load.free_blocks == load.num_blocks and not load.running_requests:
                break
            assert time.monotonic() < deadline, load
            await asyncio.sleep(0.05)
        await client.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_drafts", [0, 3])
async def test_output_over_the_wire_equals_the_engine_in_one_process(
    two: Two, make_request: MakeRequest, reference: Any, sampling: SamplingParams, num_drafts: int
) -> None:
    requests = [
        make_request(
            f"{two.tls}{num_drafts}{sampling.seed}-{i}",
            prompt_tokens,
            24,
            sampling=replace(sampling, seed=i),
            max_draft_tokens=num_drafts,
        )
        for i, prompt_tokens in enumerate((1, 63, 64, 200))
    ]
    expected = reference.run(requests, num_drafts=num_drafts)
    async with Gateway(two) as gateway:
        outcomes = await gateway.generate(requests)
    for outcome, local, request in zip(outcomes, expected, requests, strict=True):
        assert outcome.find(Failed) == []
        assert outcome.token_ids == local.token_ids
        assert outcome.find(Finished)[-1].usage == local.usage
        (joined,) = outcome.find(Joined)
        num_blocks = -(-len(request.token_ids) // 64)
        assert not joined.recomputed
        assert joined.imported_bytes == num_blocks * 64 * 24 * 4 * 3
        found = joined.transport
        assert found == "tcp" if two.tls == "tcp" else found not in ("", "unknown")
    await wait_until_free(two)


async def test_one_token_and_first_token_end_need_no_decode_step(
    two: Two, make_request: MakeRequest, reference: Any
) -> None:
    request = make_request(f"{two.tls}-one", 70, 1)
    (local,) = reference.run([request])
    stopped = make_request(f"{two.tls}-one", 70, 20, stop=local.token_ids)
    stopped = replace(stopped, key=replace(stopped.key, attempt=1))
    async with Gateway(two) as gateway:
        one, end = await gateway.generate([request, stopped])
        assert one.token_ids == end.token_ids == local.token_ids
        assert one.find(Begun) == []
        assert one.find(Finished)[0].reason is FinishReason.LENGTH
        assert end.find(Finished)[0].reason is FinishReason.STOP
        await asyncio.sleep(0.2)
        assert {f.usage.drafts.verify_steps for f in end.find(Finished)} == {0}
    await wait_until_free(two)


async def test_a_request_that_can_never_fit_is_refused_and_the_next_one_works(
    two: Two, make_request: MakeRequest, reference: Any
) -> None:
    good = make_request(f"{two.tls}-good", 40, 8)
    huge = make_request(f"{two.tls}-huge", 600, 8)
    async with Gateway(two) as gateway:
        refused, served = await gateway.generate([huge, good])
    (failed,) = refused.find(Failed)
    assert (failed.code, failed.reason) == (3, "INVALID_REQUEST")
    assert dict(failed.metadata)["field"] == "prompt_tokens"
    assert served.token_ids == reference.run([good])[0].token_ids


async def test_a_cancel_and_a_lost_gateway_free_everything(
    two: Two, make_request: MakeRequest
) -> None:
    async with Gateway(two) as gateway:
        heard = gateway.start(make_request(f"{two.tls}-gone", 200, 300))
        async with asyncio.timeout(20):
            while len(heard.tokens) < 4:
                await asyncio.sleep(0.002)
        gateway.prefill.cancel(make_request(f"{two.tls}-gone").key)
        gateway.decode.cancel(make_request(f"{two.tls}-gone").key)
        await wait_until_free(two)
        gateway.start(make_request(f"{two.tls}-lost", 200, 300))
        await asyncio.sleep(0.05)
    await wait_until_free(two)


async def test_both_describe_themselves_and_are_healthy(two: Two) -> None:
    described = []
    for address in (two.prefill_address, two.decode_address):
        client = WorkerClient(address)
        described.append(await client.describe())
        await client.close()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    prefill, decode = described
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert prefill.fingerprint.difference(decode.fingerprint) == ""
    assert prefill.epoch != decode.epoch
    assert decode.max_draft_tokens == 3


async def test_a_killed_prefill_worker_leaves_decode_serving(
    checkpoint: Path, tmp_path: Path, make_request: MakeRequest, reference: Any
) -> None:
    two = start_two(checkpoint, tmp_path, "tcp")
    try:
        async with Gateway(two) as gateway:
            heard = gateway.start(make_request("cut", 400, 60))
            async with asyncio.timeout(20):
                while not heard.find(Begun):
                    await asyncio.sleep(0.001)
            two.prefill.process.kill()
            whole = replace(make_request("whole", 70, 12), leg=Leg.WHOLE)
            (served,) = await gateway.generate([whole])
            assert served.token_ids == reference.run([whole])[0].token_ids
            async with asyncio.timeout(20):
                await heard.is_over.wait()
        client = WorkerClient(two.decode_address)
        deadline = time.monotonic() + 20
        while (load := (await client.describe()).load).free_blocks != load.num_blocks:
            assert time.monotonic() < deadline, load
            await asyncio.sleep(0.1)
        await client.close()
    finally:
        two.prefill.stop(signal.SIGKILL)
        assert two.decode.stop() == 0


def test_bad_settings_are_said_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decode_workers", "--set", f"model.path={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "model.path" in done.stderr
    assert "Traceback" not in done.stderr
