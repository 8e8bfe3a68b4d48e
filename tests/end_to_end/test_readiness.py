"""Readiness with the real engines: a prefill worker whose KV decode cannot fetch is found before a
client's request is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from control_plane.gateway import Gateway, GatewayOptions
from control_plane.readiness import CanaryTimes
from decode_workers.server import WorkerProcess as DecodeProcess
from hocket.config import load_config, worker_settings
from hocket.errors import WorkerUnavailable
from hocket.execution.worker_process import HostedWorker
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from hocket.types import Role, WorkerDescription
from prefill_workers import server as prefill_server
from tests.control_plane.conftest import ListedWorkers
from tests.end_to_end.running_cluster import Case, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NOBODY = "127.0.0.1:1"
SETTINGS = (
    "prefill.num_blocks=16",
    "decode.num_blocks=16",
    "telemetry.metrics_port=-1",
)


@pytest.fixture(params=["recompute", "fail"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[Role], WorkerDescription]]:
    """Starts a worker in this process, under each policy for hand-offs that fail."""
    config = load_config(None, [*SETTINGS, f"transfer.policy={request.param}"])
    processes = {Role.PREFILL: prefill_server.WorkerProcess, Role.DECODE: DecodeProcess}
    hosted: list[HostedWorker] = []

    def started(role: Role) -> WorkerDescription:
        hosted.append(processes[role](worker_settings(config, role, 0, epoch=1)))
        return hosted[-1].start()

    yield started
    for worker in hosted:
        worker.stop()


def test_b5_an_export_address_that_decode_cannot_reach_keeps_the_pair_out_and_says_so(
    start: Callable[[Role], WorkerDescription], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    bind = prefill_server.bind

    def bind_elsewhere(host: str, port: int) -> tuple[object, str]:
        server, address = bind(host, port)
        bound.append(address)
        return server, NOBODY

    monkeypatch.setattr(prefill_server, "bind", bind_elsewhere)
    # The gateway, on another network, reaches it all the same.
    prefill = replace(start(Role.PREFILL), address=bound[0])
    decode = start(Role.DECODE)
    config = load_config(None, SETTINGS)

    async def story() -> None:
        directory = ListedWorkers()
        directory.set([prefill, decode])
        options = GatewayOptions(
            host="127.0.0.1",
            port=0,
            model=config.model.name,
            tokenizer_folder=config.model.checkpoint(),
            canary=CanaryTimes(timeout_s=60.0),
        )
        gateway = Gateway(options, directory)
        client = GenerationClient(f"127.0.0.1:{await gateway.start()}")
        try:
            async with asyncio.timeout(90):
                while not all("failed its canary" in why for why in unready(gateway)):
                    await asyncio.sleep(0.01)
            for why in unready(gateway):
                assert decode.worker_id in why
                assert decode.address in why
                assert NOBODY in why
            with pytest.raises(WorkerUnavailable, match=f"failed its canary: .*{NOBODY}"):
                async for _ in client.generate(generation.GenerateRequest(text="x")):
                    pass
        finally:
            await client.close()
            await gateway.stop()

    asyncio.run(story())


def unready(gateway: Gateway) -> list[str]:
    """Why either worker is kept out."""
    found = gateway.unready()
    assert set(found) == {"prefill-0", "decode-0"}
    return list(found.values())


def test_up_does_not_come_up_when_no_kv_comes_over(cases: list[Case]) -> None:
    """Decode could make good for it by computing every prompt itself: that is not serving."""

    class SeenError(Exception):
        """What `up` would say when its time was over."""

    def report(text: str) -> None:
        if "failed its canary" in text:
            raise SeenError(text)

    with pytest.raises(SeenError) as caught, running("faults.failed=1.0", report=report):
        pass
    told = str(caught.value)
    assert told.startswith("waiting for the router: ")
    assert "decode-0 failed its canary: decode-0 at" in told
    assert "its KV did not come from prefill-0 at" in told
