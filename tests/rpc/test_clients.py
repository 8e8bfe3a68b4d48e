"""A peer that is gone without a word is noticed, whatever it was doing when it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hocket.errors import WorkerUnavailable
from hocket.rpc import clients
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient

SERVER = """
import asyncio, grpc
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

class OneToken(GenerationServicer):
    async def Generate(self, request, context):
        await context.write(generation.GenerateResponse(token_ids=[1]))
        await asyncio.sleep(60)

async def serve():
    server = grpc.aio.server()
    add_GenerationServicer_to_server(OneToken(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(60)

asyncio.run(serve())
"""


@pytest.fixture
def server() -> Iterator[tuple[int, str]]:
    """Process id and address of a gateway that says one token and then nothing."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, f"127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()


async def test_a_peer_that_stops_answering_is_unavailable_in_the_keepalive_time(
    server: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped right after its first token: gRPC's own ping, sent with that, must not cover it."""
    monkeypatch.setattr(clients, "KEEPALIVE_S", 1)
    monkeypatch.setattr(clients, "KEEPALIVE_TIMEOUT_S", 1)
    process, address = server
    client = GenerationClient(address)
    answer = client.generate(generation.GenerateRequest(text="x"), timeout_s=30)
    await anext(answer)
    os.kill(process, signal.SIGSTOP)
    stopped_at = time.monotonic()
    with pytest.raises(WorkerUnavailable):
        await anext(answer)
    assert time.monotonic() - stopped_at < 6
    await client.close()
