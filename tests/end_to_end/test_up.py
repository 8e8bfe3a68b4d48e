"""The whole system as users start it, compared with the engine in one process, and broken."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from hocket.errors import (
    HocketError,
    InvalidRequest,
    ModelNotFound,
    WorkerUnavailable,
)
from hocket.execution.model_setup import AUTO_DRAFT_TOKENS
from hocket.model.model_config import BLOCK_TOKENS
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from tests.end_to_end.running_cluster import (
    Case,
    Running,
    answer_of,
    answers,
    descendants,
    running,
    still_alive,
    until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    """Default transport: whatever UCX finds between processes of one host."""
    with running() as cluster:
        yield cluster


def test_it_serves_what_it_says(up: Running) -> None:
    async def story(client: GenerationClient) -> generation.Model:
        return await client.get_model()

    model = up.with_client(story)
    assert model.name == "hocket-tiny"
    assert model.has_mtp
    assert up.config.decode.draft_tokens == -1
    assert model.max_draft_tokens == AUTO_DRAFT_TOKENS
    assert {w.worker_id for w in up.serving.workers} == {"prefill-0", "decode-0"}


def test_no_process_gives_way_to_others_of_the_machine(up: Running) -> None:
    """Ray's own default is nice 15."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for name, process in up.cluster.process_ids().items():
        assert os.getpriority(os.PRIO_PROCESS, process) == own, name


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_output_equals_the_engine_in_one_process(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]], num_drafts: int
) -> None:
    found = up.ask(*(case.message(num_drafts) for case in cases))
    assert [answer.token_ids for answer in found] == expected
    for case, answer in zip(cases, found, strict=True):
        usage, hand_off = answer.finish.usage, answer.finish.hand_off
        assert answer.finish.reason == generation.FINISH_REASON_LENGTH
        assert usage.prompt_tokens == len(case.token_ids)
        assert usage.output_tokens == case.max_tokens
        assert (usage.drafted_tokens > 0) == (num_drafts > 0)
        # Decode may have whole blocks of a prompt that it had before; a part of one is always read.
        assert hand_off.bytes > 0 or len(case.token_ids) % BLOCK_TOKENS == 0
        assert hand_off.transport not in ("", "unknown")
        assert hand_off.prefill_worker == "prefill-0"
        assert hand_off.decode_worker == "decode-0"
    _assert_no_block_is_held(up)


def test_one_token_needs_no_decode(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    request = cases[0].message()
    request.stopping.max_tokens = 1
    request.top_logprobs = 2
    (answer,) = up.ask(request)
    assert answer.token_ids == expected[0][:1]
    assert not answer.finish.HasField("hand_off")
    assert answer.finish.usage.verify_steps == 0


BAD = {
    "sampling.temperature": generation.GenerateRequest(
        text="x", sampling=generation.Sampling(temperature=-1.0)
    ),
    "sampling.top_p": generation.GenerateRequest(text="x", sampling=generation.Sampling(top_p=1.5)),
    "stopping.max_tokens": generation.GenerateRequest(
        text="x", stopping=generation.Stopping(max_tokens=10**6)
    ),
    "token_ids": generation.GenerateRequest(token_ids=generation.TokenIds(ids=[5, 4_000_000])),
    "text": generation.GenerateRequest(text=""),
    "prompt": generation.GenerateRequest(token_ids=generation.TokenIds(ids=[5] * 50_000)),
    "message": generation.GenerateRequest(text="x" * (5 << 20)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_field_and_limit_and_the_next_request_works(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]], name: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        up.ask(BAD[name])
    assert name.split(".")[-1] in caught.value.field
    assert caught.value.metadata["limit"]
    assert up.ask(cases[0].message())[0].token_ids == expected[0]


def test_a_wrong_model_name_is_not_found(up: Running) -> None:
    with pytest.raises(ModelNotFound, match="hocket-tiny"):
        up.ask(generation.GenerateRequest(model="gpt", text="x"))


def test_the_command_line_generates(up: Running) -> None:
    command = [sys.executable, "-m", "hocket.cli", "generate", "Return the", "--json"]
    options = ["--temperature", "0", "--max-tokens", "8", "--address", up.serving.gateway_address]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert len(told["token_ids"]) == told["usage"]["output_tokens"] <= 8
    assert told["hand_off"]["bytes"] > 0


def test_openai_clients_get_the_same_output(
    up: Running, checkpoint: Path, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    address = f"http://{up.serving.http_address}/v1"
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["hocket-tiny"]
        for case, token_ids in zip(cases, expected, strict=True):
            chunks = client.completions.create(
                model="hocket-tiny",
                prompt=list(case.token_ids),
                max_tokens=case.max_tokens,
                temperature=case.temperature,
                top_p=case.top_p,
                seed=case.seed,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = "".join(chunk.choices[0].text for chunk in chunks)
            assert text == tokenizer.decode(token_ids)


def test_a_killed_decode_worker_fails_its_request_soon_and_serves_again(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    _kill_while_streaming(up, "decode-0", cases[0])
    _assert_serves_again(up, "decode-0", cases[0], expected[0])


def test_a_killed_prefill_worker_fails_its_request_soon_and_serves_again(
    up: Running, cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    process = up.cluster.process_ids()["prefill-0"]
    # Stopped first, so that the request is surely in its hands when it dies.
    os.kill(process, signal.SIGSTOP)
    failed: list[HocketError] = []

    def ask() -> None:
        try:
            up.ask(cases[0].message())
        except HocketError as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    killed_at = time.monotonic()
    os.kill(process, signal.SIGKILL)
    asking.join(30)
    assert isinstance(failed[0], WorkerUnavailable), failed
    assert time.monotonic() - killed_at < 10
    _assert_serves_again(up, "prefill-0", cases[0], expected[0])


def test_a_killed_prefill_worker_does_not_disturb_a_request_that_has_joined_decode(
    up: Running, cases: list[Case]
) -> None:
    case = Case(cases[0].token_ids, max_tokens=600)

    async def story(client: GenerationClient) -> int:
        num_tokens = 0
        async for response in client.generate(case.message(0), timeout_s=120):
            if num_tokens < 10 <= num_tokens + len(response.token_ids):
                os.kill(process, signal.SIGKILL)
            num_tokens += len(response.token_ids)
        return num_tokens

    process = up.cluster.process_ids()["prefill-0"]
    assert up.with_client(story) == 600
    until(lambda: answers(up, cases[0].message()), 90, "prefill-0 serves again")


def test_a_killed_gateway_comes_back_at_its_address(up: Running, cases: list[Case]) -> None:
    os.kill(up.cluster.process_ids()["gateway"], signal.SIGKILL)
    until(lambda: not answers(up, cases[0].message()), 10, "the gateway is gone")
    until(lambda: answers(up, cases[0].message()), 60, "the gateway serves again")


def _kill_while_streaming(up: Running, worker_id: str, case: Case) -> None:
    """Kills the worker after some tokens: the request must fail as UNAVAILABLE in bounded time."""
    process = up.cluster.process_ids()[worker_id]
    long = Case(case.token_ids, max_tokens=2000)

    async def story(client: GenerationClient) -> float:
        killed_at = 0.0
        num_tokens = 0
        try:
            async for response in client.generate(long.message(0), timeout_s=120):
                num_tokens += len(response.token_ids)
                if num_tokens >= 10 and not killed_at:
                    os.kill(process, signal.SIGKILL)
                    killed_at = time.monotonic()
        except WorkerUnavailable:
            return time.monotonic() - killed_at
        raise AssertionError("the request outlived its worker")

    assert up.with_client(story) < 10


def _assert_serves_again(
    up: Running, worker_id: str, case: Case, expected: tuple[int, ...]
) -> None:
    """A new life of the worker serves, with the same output, and nobody holds blocks."""
    before = up.serving.workers
    (first,) = [w for w in before if w.worker_id == worker_id]
    until(lambda: answers(up, case.message()), 90, f"{worker_id} serves again")
    assert up.ask(case.message())[0].token_ids == expected
    now = up.worker(worker_id)
    assert now is not None
    assert now.epoch > first.epoch
    assert up.cluster.restarts(worker_id) >= 1
    _assert_no_block_is_held(up)


def _assert_no_block_is_held(up: Running) -> None:
    for worker_id in ("prefill-0", "decode-0"):
        until(lambda w=worker_id: _is_idle(up, w), 20, f"{worker_id} holds no block")


def _is_idle(up: Running, worker_id: str) -> bool:
    worker = up.worker(worker_id)
    if worker is None:
        return False
    load = worker.load
    busy = load.running_requests + load.waiting_requests + load.unread_blocks
    return busy == 0 and load.free_blocks == load.num_blocks == worker.num_blocks


def test_over_tcp_the_output_is_the_same_and_a_signal_drains_and_ends_all(
    cases: list[Case], expected: list[tuple[int, ...]]
) -> None:
    process = _up("transfer.tls=tcp", "prefill.chunk_tokens=64")
    started: dict[int, str] = {}
    try:
        address = _told_address(process)
        started = descendants(process.pid)
        found = _ask_at(address, cases)
        assert found == expected + expected
        assert _ask_while_ending(address, process, cases[0]) == 300
    finally:
        _end(process, signal.SIGTERM, started)


def test_a_signal_during_the_start_ends_all_too() -> None:
    process = _up()
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for" in line:
            break
    _end(process, signal.SIGINT, descendants(process.pid))


def _up(*overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hocket.cli", "up"]
    ports = ("gateway.port=0", "gateway.http_port=0", "gateway.admin_port=0")
    for override in (*ports, "cluster.startup_timeout_s=240", *overrides):
        command += ["--set", override]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _end(process: subprocess.Popen[str], number: signal.Signals, started: dict[int, str]) -> None:
    """The signal must end it, and everything that it started."""
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert told.endswith("Stopped.\n")
    assert len(started) >= 5, started
    assert still_alive(started, timeout_s=5) == {}


def _told_address(process: subprocess.Popen[str]) -> str:
    """The gateway's address, read off what `up` prints when it serves."""
    assert process.stderr is not None
    address = ""
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if match := re.match(r"gateway\s+(\S+)", line):
            address = match[1]
        if line.startswith("Ctrl-C"):
            return address
    raise AssertionError("it did not serve:\n" + "".join(seen))


def _ask_while_ending(address: str, process: subprocess.Popen[str], case: Case) -> int:
    """Asks for 300 tokens and signals in the middle; returns how many came."""

    async def ask() -> int:
        client = GenerationClient(address)
        num_tokens = 0
        request = Case(case.token_ids, max_tokens=300).message(0)
        async for response in client.generate(request, timeout_s=60):
            if num_tokens < 10 <= num_tokens + len(response.token_ids):
                process.send_signal(signal.SIGTERM)
            num_tokens += len(response.token_ids)
        await client.close()
        return num_tokens

    return asyncio.run(ask())


def _ask_at(address: str, cases: list[Case]) -> list[tuple[int, ...]]:
    """Answers with k = 0, then with k = 3, all at once; the transport must be TCP."""

    async def ask() -> list[tuple[int, ...]]:
        client = GenerationClient(address)
        try:
            messages = [case.message(k) for k in (0, 3) for case in cases]
            found = await asyncio.gather(*(answer_of(client, m, 120) for m in messages))
        finally:
            await client.close()
        assert {answer.finish.hand_off.transport for answer in found} == {"tcp"}
        return [answer.token_ids for answer in found]

    return asyncio.run(ask())
