"""The front door: the public gRPC service, health and reflection, over a pool of workers.

`Gateway` is built with options and a `WorkerDirectory`, listens after `start`, and hands every
Generate to `request_flow`. It decides nothing about a request but who answers for its errors:
each becomes a gRPC status with details. Health is SERVING while a prefill and a decode worker
that can pair are reachable and proven (`control_plane.readiness`). Beside it, over the same flow,
stands the HTTP door, `control_plane.openai`.
"""

# gRPC's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from control_plane.model_limits import ModelLimits
from control_plane.openai.app import openai_app
from control_plane.openai.door import Behind, Door
from control_plane.openai.server import HttpServer
from control_plane.openai.token_texts import TokenTexts
from control_plane.readable_requests import ReadableRequests
from control_plane.readiness import CanaryTimes, Readiness
from control_plane.request_flow import RequestFlow
from control_plane.router.pool import WorkerDirectory, WorkerPool
from control_plane.router.proofs import Proofs
from control_plane.router.route import choose_pair, choose_whole
from control_plane.router.snapshot import WorkerSnapshot
from control_plane.tokenizer import ModelTokenizer
from control_plane.validation import TokenPrompt, check_model, check_prompt
from hocket.errors import ConfigError, InvalidRequest
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import PUBLIC_MESSAGE_BYTES, server_options
from hocket.rpc.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from hocket.rpc.session_client import SessionClient, SessionSettings
from hocket.rpc.status import answered
from hocket.telemetry import GatewayMetrics, RoutingMetrics
from hocket.types import Role

logger = logging.getLogger(__name__)

SERVICE = generation.DESCRIPTOR.services_by_name["Generation"].full_name
# gRPC itself refuses a message this many times over the limit, with no details, unread.
HARD_LIMIT_FACTOR = 4
_HEALTH_S = 0.2
# The package's own types leave its asyncio half out.
_HealthServicer: Any = health.aio.HealthServicer  # pyright: ignore[reportAttributeAccessIssue]
_UNKNOWN_TOKENS = 1 << 30
# A seed of ours comes back whole from any JSON reader, JavaScript's included.
_SEED_BITS = 53

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """host, port: where to listen; port 0 takes a free one. http_port: of the HTTP door, likewise;
    -1: there is none. model: the served name.
    tokenizer_folder: the checkpoint's. max_context_tokens: 0 leaves it to the workers.
    is_aggregated: decode workers do whole requests, there is no prefill pool.
    deadline_s: time for a request whose client sets no deadline, and the most one gets.
    """

    host: str
    port: int
    model: str
    tokenizer_folder: Path
    http_port: int = -1
    is_aggregated: bool = False
    max_context_tokens: int = 0
    default_max_tokens: int = 256
    max_message_bytes: int = PUBLIC_MESSAGE_BYTES
    deadline_s: float = 600.0
    session: SessionSettings = field(default_factory=SessionSettings)
    canary: CanaryTimes = field(default_factory=CanaryTimes)
    gateway_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Gateway:
    """One gateway process's server. `start`, then `stop`; both on the same event loop."""

    def __init__(
        self,
        options: GatewayOptions,
        directory: WorkerDirectory,
        *,
        registry: CollectorRegistry | None = None,
        seeds: random.Random | None = None,
    ) -> None:
        """Reads the tokenizer. `registry` takes the metrics; `seeds` the requests' default seeds.

        Raises CheckpointError when the tokenizer cannot be read.
        """
        self.options = options
        self.metrics = GatewayMetrics(registry or CollectorRegistry())
        self._directory = directory
        self._seeds = seeds or random.SystemRandom()
        self._tokenizer = ModelTokenizer(options.tokenizer_folder)
        self._health = _HealthServicer()
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self.http_port = -1

    async def start(self) -> int:
        """Listens; returns the port. `http_port` is then the HTTP door's, -1 when there is none.

        Raises ConfigError when an address cannot be bound.
        """
        options = self.options
        readiness = self._open_pool()
        flow = RequestFlow(
            self._pool, self._tokenizer, self.metrics, lambda: self._seeds.getrandbits(_SEED_BITS)
        )
        service = _GenerationService(options, self._pool, self._tokenizer, flow, self._limits)
        hard_limit = options.max_message_bytes * HARD_LIMIT_FACTOR
        self._server = grpc.aio.server(
            interceptors=[ReadableRequests()], options=server_options(hard_limit)
        )
        add_GenerationServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        try:
            port = self._bind()
            if options.http_port >= 0:
                await self._start_http(flow)
        except ConfigError:
            await self._server.stop(None)
            await self._pool.close()
            raise
        await self._tell_health()
        await self._server.start()
        self._tasks += [
            asyncio.create_task(self._watch_health()),
            asyncio.create_task(readiness.run()),
        ]
        return port

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Returns when a request would find a pair. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not self._pool.can_serve():
                await asyncio.sleep(_HEALTH_S / 10)
            await self._tell_health()

    def unready(self) -> dict[str, str]:
        """Why listed workers get no requests yet, by name; empty when all are proven."""
        listed = [s for s in self._pool.snapshots() if s.is_listed]
        return {s.name: s.kept_out for s in listed if s.kept_out}

    def snapshots(self) -> list[WorkerSnapshot]:
        """Every worker that this gateway knows, as of now."""
        return self._pool.snapshots()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuses new calls, gives running ones `grace_s` to end, then ends everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        doors = [self._server.stop(grace_s)]
        if self._http is not None:
            doors.append(self._http.stop(grace_s))
        await asyncio.gather(*doors)
        await self._pool.close()

    def _open_pool(self) -> Readiness:
        """Connects to the workers that are listed; what proves them is to be run."""
        options = self.options
        proofs = Proofs([Role.DECODE]) if options.is_aggregated else Proofs()
        choose = choose_whole if options.is_aggregated else choose_pair
        self._pool = WorkerPool(self._directory, self._connect, choose, proofs.kept_out)
        readiness = Readiness(
            self._pool,
            proofs,
            RoutingMetrics(self.metrics.registry),
            is_aggregated=options.is_aggregated,
            vocabulary_size=self._tokenizer.vocabulary_size,
            times=options.canary,
        )
        self._directory.watch(readiness.changed)
        return readiness

    def _bind(self) -> int:
        options = self.options
        try:
            return self._server.add_insecure_port(f"{options.host}:{options.port}")
        except RuntimeError as error:
            raise ConfigError(
                f"gateway.host and gateway.port: {options.host}:{options.port} cannot be bound;"
                " is another gateway running? Port 0 takes a free one."
            ) from error

    async def _start_http(self, flow: RequestFlow) -> None:
        options = self.options
        door = Door(
            Behind(
                flow=flow,
                pool=self._pool,
                limits=self._limits,
                tokenizer=self._tokenizer,
                texts=TokenTexts(self._tokenizer.backend),
                now=time.time,
                deadline_s=options.deadline_s,
                max_body_bytes=options.max_message_bytes,
            )
        )
        http = HttpServer(openai_app(door), door)
        self.http_port = await http.start(options.host, options.http_port)
        self._http = http

    def _limits(self) -> ModelLimits:
        """As the largest workers allow; the router refuses what fits none of the others."""
        workers = self._pool.workers()
        decode = [w for w in workers if w.role is Role.DECODE]
        context = [min(w.max_context_tokens, w.num_blocks * w.block_tokens) for w in decode]
        readers = Role.DECODE if self.options.is_aggregated else Role.PREFILL
        prompt = [w.max_prompt_tokens for w in workers if w.role is readers]
        most = max(context, default=_UNKNOWN_TOKENS)
        return ModelLimits(
            name=self.options.model,
            vocabulary_size=self._tokenizer.vocabulary_size,
            max_context_tokens=min(most, self.options.max_context_tokens or most),
            max_prompt_tokens=max(prompt, default=_UNKNOWN_TOKENS),
            default_max_tokens=self.options.default_max_tokens,
            has_mtp=not decode or any(w.has_mtp for w in decode),
        )

    def _connect(self, address: str) -> SessionClient:
        options = self.options
        return SessionClient(address, options.gateway_id, settings=options.session)

    async def _watch_health(self) -> None:
        while True:
            await self._tell_health()
            await asyncio.sleep(_HEALTH_S)

    async def _tell_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._pool.can_serve() else statuses.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)


class _GenerationService(GenerationServicer):
    """Translates: gRPC in, gRPC out, every HocketError into a status."""

    def __init__(
        self,
        options: GatewayOptions,
        pool: WorkerPool,
        tokenizer: ModelTokenizer,
        flow: RequestFlow,
        limits: Callable[[], ModelLimits],
    ) -> None:
        self._options = options
        self._pool = pool
        self._tokenizer = tokenizer
        self._flow = flow
        self._limits = limits

    async def Generate(  # noqa: N802
        self, request: generation.GenerateRequest, context: _Context
    ) -> None:
        # None without a deadline, whatever the types say.
        left_s = cast("float | None", context.time_remaining())
        most_s = self._options.deadline_s
        timeout_s = most_s if left_s is None else min(left_s, most_s)

        async def serve() -> None:
            self._check_size(request)
            await self._flow.serve(request, self._limits(), timeout_s, context.write)

        await answered(context, serve)

    async def Tokenize(  # noqa: N802
        self, request: generation.TokenizeRequest, context: _Context
    ) -> generation.TokenizeResponse:
        async def tokenize() -> generation.TokenizeResponse:
            self._check_size(request)
            limits = self._limits()
            check_model(request.model, limits)
            prompt = check_prompt(request, limits)
            assert not isinstance(prompt, TokenPrompt)
            return generation.TokenizeResponse(token_ids=await self._tokenizer.tokenize(prompt))

        return await answered(context, tokenize)

    async def GetModel(  # noqa: N802
        self, request: generation.GetModelRequest, context: _Context
    ) -> generation.Model:
        async def get_model() -> generation.Model:
            limits = self._limits()
            check_model(request.model, limits)
            workers = self._pool.workers()
            decode = [w for w in workers if w.role is Role.DECODE]
            return generation.Model(
                name=limits.name,
                revision=workers[0].fingerprint.weights if workers else "",
                vocabulary_size=limits.vocabulary_size,
                max_context_tokens=limits.max_context_tokens,
                has_mtp=any(w.has_mtp for w in decode),
                max_draft_tokens=max((w.max_draft_tokens for w in decode), default=0),
                default_max_tokens=limits.default_max_tokens,
            )

        return await answered(context, get_model)

    def _check_size(self, message: generation.GenerateRequest | generation.TokenizeRequest) -> None:
        size, limit = message.ByteSize(), self._options.max_message_bytes
        if size > limit:
            raise InvalidRequest("message", f"{size} bytes", f"at most {limit} bytes")
