"""How long a client waits between its first token and its second: real workers, real hand-offs.

One decode worker and two prefill workers per transport, each a process of its own: one computes
prompts in chunks and lets them cross meanwhile ("streaming"), the other computes each prompt in one
chunk, so that nothing crosses before all of it is there ("whole"). They are asked in turn. What is
measured is what a gateway sees: the moments in which tokens come in on its Sessions.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from decode_workloads import REPOSITORY
from handoff_report import Wait

from hocket.model.model_config import ModelConfig
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc.session_client import SessionClient
from hocket.types import (
    Begun,
    Event,
    Failed,
    Finished,
    Joined,
    Leg,
    RequestKey,
    StartRequest,
    Tokens,
)

STREAMING, WHOLE = "streaming", "whole"
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 900.0
_OUTPUT_TOKENS = 14

# Small enough for one core, with as much KV per token and layer as DeepSeek-V3 has.
MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=256,
    num_layers=4,
    num_heads=2,
    kv_lora_rank=512,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_experts=4,
    experts_per_token=1,
    num_dense_layers=4,
    num_mtp_layers=1,
    max_position_embeddings=16_384 + 1024,
)


class WorkerProcess:
    """`python -m prefill_workers` or `decode_workers`; a context that ends with it."""

    def __init__(self, package: str, overrides: Sequence[str], folder: Path) -> None:
        command = [sys.executable, "-m", package]
        for override in overrides:
            command += ["--set", override]
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def address(self) -> str:
        """Where it serves. Raises SystemExit when it does not."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if " serves " not in line:
            raise SystemExit(f"a worker did not start: {line!r}")
        return line.split()[-1]


class Pairs:
    """A decode worker and the prefill worker of each mode."""

    def __init__(self, prefill: dict[str, SessionClient], decode: SessionClient) -> None:
        self._prefill = prefill
        self._decode = decode
        self._count = 0

    async def ask(self, mode: str, prompt_tokens: int) -> Wait:
        """One request; its prompt is new, so that no cache knows it. Raises SystemExit when it
        failed or its blocks did not cross."""
        self._count += 1
        chance = random.Random(f"{mode}{self._count}")
        request = StartRequest(
            key=RequestKey(f"{mode}-{self._count}"),
            token_ids=tuple(chance.randrange(16, MODEL.vocab_size) for _ in range(prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(_OUTPUT_TOKENS),
            leg=Leg.PREFILL,
            deadline_s=REQUEST_TIMEOUT_S,
            max_draft_tokens=0,
        )
        arrived: dict[int, float] = {}
        joined: list[Joined] = []
        is_over = asyncio.Event()

        def take(event: Event) -> None:
            now = time.perf_counter()
            match event:
                case Begun():
                    leg = replace(request, leg=Leg.DECODE, export=event.export)
                    self._decode.start(leg, take)
                case Tokens():
                    for i in range(len(event.token_ids)):
                        arrived.setdefault(event.output_index + i, now)
                case Joined():
                    joined.append(event)
                case Finished(_, reason, _) if reason is not None:
                    is_over.set()
                case Failed():
                    print(f"{event.reason}: {event.message}", file=sys.stderr)
                    is_over.set()
                case _:
                    pass

        started = time.perf_counter()
        self._prefill[mode].start(request, take)
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            await is_over.wait()
        if len(arrived) != _OUTPUT_TOKENS or not joined or joined[0].recomputed:
            raise SystemExit(f"{request.key}: the hand-off failed: {joined}")
        gaps = [arrived[i] - arrived[i - 1] for i in range(2, _OUTPUT_TOKENS)]
        return Wait(
            joined[0].transport,
            mode,
            prompt_tokens,
            prefill_s=arrived[0] - started,
            second_s=arrived[1] - arrived[0],
            step_s=statistics.median(gaps),
        )


@asynccontextmanager
async def running_pairs(
    checkpoint: Path, folder: Path, overrides: Sequence[str], chunk_tokens: int
) -> AsyncIterator[Pairs]:
    """All three workers, and Sessions to them."""
    num_blocks = -(-MODEL.max_position_embeddings // 64)
    common = (
        f"model.path={checkpoint}",
        "model.batch_invariant=false",
        f"prefill.num_blocks={num_blocks}",
        f"decode.num_blocks={num_blocks}",
        "decode.draft_tokens=0",
        "telemetry.log_level=warning",
        # A whole prompt in one step: prefill says nothing meanwhile.
        f"transfer.progress_timeout_s={REQUEST_TIMEOUT_S}",
        *overrides,
    )
    chunks = {STREAMING: chunk_tokens, WHOLE: 65_536}
    with WorkerProcess("decode_workers", common, folder) as decode:
        prefill = {
            mode: WorkerProcess(
                "prefill_workers", (*common, f"prefill.chunk_tokens={tokens}"), folder
            )
            for mode, tokens in chunks.items()
        }
        with prefill[STREAMING], prefill[WHOLE]:
            clients = {mode: SessionClient(w.address(), "bench") for mode, w in prefill.items()}
            last = SessionClient(decode.address(), "bench")
            yield Pairs(clients, last)
            for client in (*clients.values(), last):
                await client.close()


async def measure_waits(
    pairs: Pairs, prompt_tokens: Sequence[int], rounds: int
) -> AsyncIterator[Wait]:
    """Lengths in order; for each, the modes in turn, after a warm-up of each. Long prompts, whose
    time varies less, get fewer rounds, but three at least."""
    for length in prompt_tokens:
        for mode in (STREAMING, WHOLE):
            await pairs.ask(mode, min(length, 1024))
        for turn in range(max(3, min(rounds, rounds * 4096 // length))):
            for mode in (STREAMING, WHOLE) if turn % 2 == 0 else (WHOLE, STREAMING):
                yield await pairs.ask(mode, length)
