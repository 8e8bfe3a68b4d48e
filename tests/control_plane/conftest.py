"""A gateway with workers in one process: real gRPC on loopback, real sessions, scripted engines."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from control_plane.gateway import Gateway, GatewayOptions
from control_plane.router.proofs import WAITS
from control_plane.router.snapshot import Books, WorkerSnapshot
from hocket.errors import HocketError
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient, server_options
from hocket.rpc.session import SessionServer
from hocket.rpc.session_client import SessionSettings
from hocket.rpc.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from hocket.types import (
    Begun,
    Event,
    ExportHandle,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Leg,
    Load,
    PromptLogprobs,
    RequestKey,
    Role,
    StartRequest,
    TokenLogprobs,
    Tokens,
    Usage,
    VerifyStep,
    WorkerDescription,
)

FINGERPRINT = Fingerprint("w", "kv", 64, "float32", "1-invariant")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds <s> to text, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["the quick brown fox jumps over the lazy dog", "hello world, hello there"]
    tokenizer.train_from_iterator(lines * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "normalized": False},
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": 1}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))


@dataclass
class ScriptedEngine:
    """Answers every request with the same tokens, as a prefill or as a decode worker would; a
    choice that is in `scripts` with those. The logprob of a prompt's token is minus its position.

    `step_tokens`: tokens per decode step, as accepted drafts would give. `stall_at`: output index
    before which it waits for `resume` (decode at 0 has not joined yet). `fails_with`: what every
    request ends with, at once. Neither holds for canaries, which have `canary_fails_with`.
    `joins_with`: fields of what decode tells when it joins. `cached_tokens`: in its usage.
    """

    worker: WorkerDescription
    script: list[int]
    scripts: dict[int, list[int]] = field(default_factory=dict)
    step_tokens: int = 1
    stall_at: int | None = None
    fails_with: HocketError | None = None
    canary_fails_with: HocketError | None = None
    submitted: list[StartRequest] = field(default_factory=list)
    cancelled: list[RequestKey] = field(default_factory=list)
    joins_with: dict[str, Any] = field(default_factory=dict)
    cached_tokens: int = 2
    running: dict[RequestKey, asyncio.Task[None]] = field(default_factory=dict)
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    sessions: SessionServer = None  # type: ignore[assignment]
    steps: int = 0

    def submit(self, request: StartRequest) -> None:
        self.submitted.append(request)
        fault = self.canary_fails_with if is_canary(request.key) else self.fails_with
        if fault is not None:
            raise fault
        run = self.prefill if request.leg is Leg.PREFILL else self.decode
        task = asyncio.get_running_loop().create_task(run(request))
        self.running[request.key] = task
        task.add_done_callback(lambda _: self.running.pop(request.key, None))

    def cancel(self, key: RequestKey) -> None:
        self.cancelled.append(key)
        if key in self.running:
            self.running[key].cancel()

    def publish(self, *events: Event) -> None:
        self.steps += 1
        self.sessions.publish(events, Load(steps=self.steps))

    async def prefill(self, request: StartRequest) -> None:
        handle = ExportHandle(
            self.worker.worker_id, self.worker.epoch, self.worker.address, 0, 1, FINGERPRINT, 1
        )
        self.publish(Begun(request.key, handle))
        first = request.generated_tokens
        await self.stall(request, 0)
        self.publish_prompt(request)
        await asyncio.sleep(0)
        reason = self.reason(request, first)
        usage = Usage(
            prompt_tokens=len(request.token_ids) - first, cached_tokens=self.cached_tokens
        )
        self.publish(self.tokens(request, first, 1), Finished(request.key, reason, usage))

    async def decode(self, request: StartRequest) -> None:
        await self.stall(request, 0)
        joined = replace(Joined(request.key, 4096, "memory"), **self.joins_with)
        if request.leg is Leg.WHOLE or joined.recomputed:
            self.publish_prompt(request)
        first = request.generated_tokens
        self.publish(joined, self.tokens(request, first, 1))
        index, reason = first + 1, self.reason(request, first)
        while reason is None:
            await self.stall(request, index)
            await asyncio.sleep(0)
            count = 1
            while (reason := self.reason(request, index + count - 1)) is None:
                if count == self.step_tokens:
                    break
                count += 1
            step = VerifyStep(self.step_tokens - 1, count - 1)
            events: list[Event] = [replace(self.tokens(request, index, count), step=step)]
            if reason is not None:
                events.append(
                    Finished(request.key, reason, Usage(cached_tokens=self.cached_tokens))
                )
            self.publish(*events)
            index += count

    def publish_prompt(self, request: StartRequest, piece: int = 3) -> None:
        """Tells the logprobs of the prompt, if they were asked for, a few per event."""
        if request.sampling.prompt_logprobs is None:
            return
        for first in range(1, len(request.token_ids), piece):
            ids = request.token_ids[first : first + piece]
            entries = tuple(
                TokenLogprobs(t, -float(i), ((t, -float(i)),)) for i, t in enumerate(ids, first)
            )
            self.publish(PromptLogprobs(request.key, first, entries))

    def script_of(self, request: StartRequest) -> list[int]:
        return self.scripts.get(request.sampling.choice, self.script)

    async def stall(self, request: StartRequest, index: int) -> None:
        if self.stall_at is not None and index >= self.stall_at and not is_canary(request.key):
            await self.resume.wait()

    def reason(self, request: StartRequest, index: int) -> FinishReason | None:
        """Whether the output ends with this token."""
        script = self.script_of(request)
        is_held = index < request.generated_tokens + request.stopping.min_tokens
        if script[index % len(script)] in request.stopping.stop_token_ids and not is_held:
            return FinishReason.STOP
        is_last = index + 1 >= request.generated_tokens + request.stopping.max_tokens
        return FinishReason.LENGTH if is_last else None

    def tokens(self, request: StartRequest, index: int, count: int) -> Tokens:
        script = self.script_of(request)
        ids = tuple(script[i % len(script)] for i in range(index, index + count))
        logprobs = tuple(
            TokenLogprobs(t, -float(index + i), ((t, -float(index + i)),))
            for i, t in enumerate(ids)
        )
        wants = request.sampling.top_logprobs is not None
        return Tokens(request.key, index, ids, logprobs if wants else ())


class ScriptedServicer(WorkerServicer):
    def __init__(self, sessions: SessionServer) -> None:
        self.sessions = sessions

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await self.sessions.serve(request_iterator, context)


@dataclass
class ScriptedWorker:
    engine: ScriptedEngine
    server: grpc.aio.Server

    @property
    def description(self) -> WorkerDescription:
        return self.engine.worker

    async def stop(self) -> None:
        await self.server.stop(None)
        for task in list(self.engine.running.values()):
            task.cancel()


class ListedWorkers:
    """A directory in memory."""

    def __init__(self) -> None:
        self.listed: list[WorkerDescription] = []
        self.watchers: list[Callable[[], None]] = []

    def workers(self) -> list[WorkerDescription]:
        return list(self.listed)

    def watch(self, changed: Callable[[], None]) -> None:
        self.watchers.append(changed)

    def set(self, workers: list[WorkerDescription]) -> None:
        self.listed = workers
        for changed in self.watchers:
            changed()


async def start_worker(role: Role, script: list[int], **changes: Any) -> ScriptedWorker:
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    worker = WorkerDescription(
        worker_id=f"{role.value}-{port}",
        epoch=1,
        role=role,
        address=f"127.0.0.1:{port}",
        fingerprint=FINGERPRINT,
        model="fox",
        num_blocks=16,
        block_tokens=64,
        block_bytes=4096,
        max_context_tokens=256,
        max_prompt_tokens=200,
        max_draft_tokens=3,
        has_mtp=True,
    )
    engine = ScriptedEngine(replace(worker, **changes), script)
    engine.sessions = SessionServer(engine, worker.epoch)
    add_WorkerServicer_to_server(ScriptedServicer(engine.sessions), server)
    await server.start()
    return ScriptedWorker(engine, server)


def is_canary(key: RequestKey) -> bool:
    return key.request_id.startswith("canary.")


def _waits(snapshot: WorkerSnapshot) -> bool:
    return snapshot.kept_out.startswith(WAITS) and not snapshot.worker.is_draining


@dataclass
class Serving:
    gateway: Gateway
    client: GenerationClient
    address: str
    directory: ListedWorkers
    prefill: ScriptedWorker
    decode: ScriptedWorker
    added: list[ScriptedWorker] = field(default_factory=list)

    @property
    def workers(self) -> list[ScriptedWorker]:
        return [self.prefill, self.decode, *self.added]

    async def add(
        self, role: Role, engine: dict[str, Any] | None = None, **changes: Any
    ) -> ScriptedWorker:
        """One worker more, with the same script, listed and connected; its canary has ended."""
        worker = await start_worker(role, self.prefill.engine.script, **changes)
        for name, value in (engine or {}).items():
            setattr(worker.engine, name, value)
        self.added.append(worker)
        self.directory.set([w.description for w in self.workers])
        await self.settle()
        return worker

    def renew(self, *workers: ScriptedWorker, **changes: Any) -> None:
        """Lists later lives of these workers, for which nothing is proven."""
        for worker in workers:
            before = worker.engine.worker
            worker.engine.worker = replace(before, epoch=before.epoch + 1, **changes)
        self.directory.set([w.description for w in self.workers])

    async def settle(self) -> None:
        """Returns when every worker is connected and its canary has passed or failed; what
        engines had of canaries is forgotten."""
        async with asyncio.timeout(10):
            while any(not s.is_connected or _waits(s) for s in self.gateway.snapshots()):
                await asyncio.sleep(0.005)
        for worker in self.workers:
            engine = worker.engine
            engine.submitted = [r for r in engine.submitted if not is_canary(r.key)]
            engine.cancelled = [key for key in engine.cancelled if not is_canary(key)]

    async def generate(self, **fields: Any) -> Answer:
        answer = Answer()
        async for response in self.client.generate(generation.GenerateRequest(**fields)):
            answer.responses.append(response)
        return answer

    @property
    def is_idle(self) -> bool:
        """Nothing of any request is left anywhere."""
        pool = self.gateway._pool  # the one look behind the door
        books = all(s.books == Books() for s in pool.snapshots())
        sessions = all(
            w.engine.sessions.num_requests == 0 and not w.engine.running for w in self.workers
        )
        return books and sessions


@dataclass
class Answer:
    responses: list[generation.GenerateResponse] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(r.text for r in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [t for r in self.responses for t in r.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [p.logprob for r in self.responses for p in r.logprobs]

    @property
    def finish(self) -> generation.Finish:
        assert self.responses[-1].HasField("finish")
        assert not any(r.HasField("finish") for r in self.responses[:-1])
        return self.responses[-1].finish


@pytest.fixture
def serving(tokenizer_folder: Path, tokenizer: Tokenizer) -> Any:
    """`async with serving(text, ...) as s`: a gateway with one prefill and one decode worker that
    answer everything with `text` and then </s>."""

    @asynccontextmanager
    async def run(
        text: str = " the quick brown fox jumps over the lazy dog",
        *,
        script: list[int] | None = None,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[Serving]:
        tokens = script or [*tokenizer.encode(text, add_special_tokens=False).ids, 1]
        workers = [
            await start_worker(Role.PREFILL, tokens, **(prefill or {})),
            await start_worker(Role.DECODE, tokens, **(decode or {})),
        ]
        directory = ListedWorkers()
        directory.set([w.description for w in workers])
        session = SessionSettings(reconnect_s=0.4, retry_s=0.05)
        gateway = Gateway(
            GatewayOptions(
                **{"host": "127.0.0.1", "port": 0, "model": "fox", "session": session}
                | {"tokenizer_folder": tokenizer_folder}
                | options
            ),
            directory,
        )
        address = f"127.0.0.1:{await gateway.start()}"
        client = GenerationClient(address)
        running = Serving(gateway, client, address, directory, *workers)
        try:
            await running.settle()
            yield running
        finally:
            await client.close()
            await gateway.stop()
            for worker in running.workers:
                await worker.stop()

    return run


@pytest.fixture
def until() -> Any:
    async def wait(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    return wait
