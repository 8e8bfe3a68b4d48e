"""Two worker processes whose READs go wrong on purpose: what clients get is right all the same."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hocket.rpc.clients import WorkerClient
from hocket.types import Failed, Joined, StartRequest
from tests.end_to_end.workers.test_two_workers import (
    GREEDY,
    Gateway,
    Two,
    Worker,
    wait_until_free,
)

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def two_workers(checkpoint: Path, folder: Path, faults: str) -> AsyncIterator[Two]:
    config = folder / "hocket.toml"
    config.write_text(
        f"""
        [model]
        path = "{checkpoint}"
        [prefill]
        num_blocks = 64
        prefix_cache = false
        [decode]
        num_blocks = 64
        prefix_cache = false
        [transfer]
        tls = "tcp"
        checksum = "xxh3"
        read_timeout_s = 1.0
        [faults]
        seed = 3
        {faults}
        """
    )
    prefill = Worker("prefill_workers", config, folder / "prefill.log")
    decode = Worker("decode_workers", config, folder / "decode.log")
    try:
        addresses = prefill.wait_until_serving(), decode.wait_until_serving()
        yield Two(prefill, decode, *addresses, tls="tcp")
    finally:
        prefill.stop(signal.SIGKILL)
        decode.stop(signal.SIGKILL)


async def figures(two: Two) -> dict[str, float]:
    """Decode's metrics without labels."""
    client = WorkerClient(two.decode_address)
    address = (await client.describe()).metrics_address
    await client.close()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    words = [line.split() for line in lines if not line.startswith("#") and "{" not in line]
    return {name: float(value) for name, value in words}


@pytest.mark.parametrize(
    ("faults", "shown"),
    [
        ("corrupted = 0.5", "reads_corrupt_total"),
        ("truncated = 0.5", "reads_corrupt_total"),
        ("failed = 0.5", "reads_failed_total"),
        ("dropped = 0.3\ndelay_s = 0.2", "reads_timed_out_total"),
    ],
    ids=["corrupted", "truncated", "failed", "dropped"],
)
async def test_no_fault_reaches_the_output(
    checkpoint: Path,
    tmp_path: Path,
    make_request: Callable[..., StartRequest],
    reference: Any,
    faults: str,
    shown: str,
) -> None:
    requests = [make_request(f"{faults}-{i}", 30 + 20 * i, 12, sampling=GREEDY) for i in range(12)]
    expected = reference.run(requests)
    async with two_workers(checkpoint, tmp_path, faults) as two:
        async with Gateway(two) as gateway:
            outcomes = await gateway.generate(requests)
        for outcome, local in zip(outcomes, expected, strict=True):
            assert outcome.find(Failed) == []
            assert outcome.token_ids == local.token_ids
        seen = await figures(two)
        await wait_until_free(replace(two, decode_address=two.prefill_address))
    assert seen["hocket_transfer_faults_on"] == 1
    assert seen["hocket_transfer_faults_total"] > 0
    assert seen[f"hocket_decode_hand_off_{shown}"] > 0
    recomputed = sum(joined.recomputed for one in outcomes for joined in one.find(Joined))
    assert seen["hocket_worker_recomputed_prompts_total"] == recomputed
    assert "Faults are injected" in (tmp_path / "decode.log").read_text()
