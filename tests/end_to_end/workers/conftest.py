"""A tiny random checkpoint, and both engines side by side in one thread, under a manual clock.

`Pair` is the smallest gateway there is: it starts the prefill leg, starts the decode leg with the
handle that Begun brings, carries the Export messages between the two engines, and orders the
tokens by their index. Blocks cross by the in-memory transfer, or by NIXL where a scenario says so.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_workers.engine import DecodeEngine
from decode_workers.import_stream import (
    EndStream,
    EventArrived,
    ImportMessage,
    ImportSettings,
    OpenStream,
    SendUpdate,
)
from decode_workers.import_stream import StreamGone as ImportStreamGone
from decode_workers.kv_import import ImportTable
from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.config import ModelSettings
from hocket.errors import HandOffFailed
from hocket.execution.drafting.speculation import DraftSource
from hocket.execution.engine_thread import CancelRequest, StepOutput
from hocket.execution.grammars.requests import Compiles, GrammarRequests
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.execution.model_runner import ModelRunner
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import PrefixCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import (
    Begun,
    Event,
    Failed,
    Fingerprint,
    Finished,
    Leg,
    Load,
    RequestKey,
    StartRequest,
    TokenLogprobs,
    Tokens,
)
from prefill_workers.engine import PrefillEngine
from prefill_workers.export_stream import ExportMessage, ExportSettings, SendEvent, UpdateArrived
from prefill_workers.export_stream import StreamGone as ExportStreamGone
from prefill_workers.kv_export import ExportTable
from prefill_workers.scheduler import PrefillPolicy, PrefillScheduler
from tests.scenarios.transfers import MEMORY, Transfer

torch.set_num_threads(1)

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    experts_per_token=2,
    num_dense_layers=1,
    num_mtp_layers=1,
    max_position_embeddings=512,
    dtype="float32",
)
BLOCK_TOKENS = 64


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(TINY, tmp_path_factory.mktemp("tiny"), seed=3, dtype="float32")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Transformer:
    return load_model(checkpoint, batch_invariant=True)


@pytest.fixture(scope="session")
def embedded_model() -> Transformer:
    """The model that ships with the package: its drafts are worth something."""
    return load_model(ModelSettings().checkpoint(), batch_invariant=True)


@dataclass(frozen=True)
class Reference:
    """The same model in one process, without hand-off."""

    model: Transformer

    def run(self, requests: Sequence[StartRequest], num_drafts: int = 0) -> list[LocalResult]:
        local = LocalEngine(self.model, LocalEngineLimits(num_drafts=num_drafts))
        return local.generate(
            [LocalRequest(r.token_ids, r.sampling, r.stopping, key=r.key) for r in requests]
        )


@pytest.fixture
def reference(model: Transformer) -> Reference:
    return Reference(model)


class CacheBlocks:
    """A paged cache as the in-memory transfer sees it: one row of bytes per block."""

    def __init__(self, cache: PagedCache) -> None:
        self.storage = cache.storage

    def __len__(self) -> int:
        return self.storage.shape[0]

    def __getitem__(self, block: int) -> torch.Tensor:
        return self.storage[block]

    def __setitem__(self, block: int, row: torch.Tensor) -> None:
        self.storage[block].copy_(row)


@dataclass
class Outcome:
    """Everything that was heard of one request, tokens in order and each once."""

    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        assert sorted(self.tokens) == list(range(len(self.tokens))), "a gap in the output"
        return tuple(self.tokens[i] for i in range(len(self.tokens)))

    def find(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Tokens):
            for i, token in enumerate(event.token_ids):
                index = event.output_index + i
                assert self.tokens.setdefault(index, token) == token, "index told twice, unequal"
                if event.logprobs:
                    told = event.logprobs[i]
                    assert told.token_id == token
                    assert self.logprobs.setdefault(index, told) == told

    @property
    def is_over(self) -> bool:
        """Finished for good, or failed."""
        ends = [finished for finished in self.find(Finished) if finished.reason is not None]
        return bool(ends or self.find(Failed))


@dataclass(frozen=True)
class PairOptions:
    """`draft_source` makes decode's, from its model and cache; None: no drafts. `decode_blocks` 0:
    as many as prefill has. `prefix_cache` gives both engines one. `compiler` makes the grammars of
    both."""

    num_blocks: int = 64
    decode_blocks: int = 0
    reserve_output_share: float = 1.0
    prefix_cache: bool = False
    chunk_tokens: int = 32
    max_batch: int = 8
    draft_tokens: int = 0
    draft_source: Callable[[Transformer, PagedCache], DraftSource] | None = None
    can_recompute: bool = True
    max_unread_share: float = 0.5
    decode_weights: str = "w"
    transfer: Transfer = MEMORY
    compiler: Compiles | None = None


class Pair:
    """One prefill and one decode engine; see the module."""

    def __init__(self, model: Transformer, options: PairOptions) -> None:
        self.now = 100.0
        self.fabric = options.transfer.fabric()
        # Which events get lost on their way down.
        self.loses: Callable[[worker.ExportEvent], bool] = lambda _event: False
        self.outcomes: dict[RequestKey, Outcome] = {}
        # As the last turn left them.
        self.prefill_load, self.decode_load = Load(), Load()
        self._requests: dict[RequestKey, StartRequest] = {}
        self._streams: dict[RequestKey, int] = {}
        self._num_streams = 0
        layout = model.kv_layout(BLOCK_TOKENS)
        config = model.config
        limits = RequestLimits(
            config.max_position_embeddings, config.vocab_size, options.num_blocks, BLOCK_TOKENS
        )
        decode_limits = replace(limits, num_blocks=options.decode_blocks or options.num_blocks)
        fingerprint = Fingerprint(
            "w", layout.describe(), BLOCK_TOKENS, layout.dtype, model.numerics
        )

        self.prefill_cache = PagedCache(layout, options.num_blocks, "cpu")
        self.prefill_runner = ModelRunner(model, self.prefill_cache)
        self.exporter = options.transfer.exporter(self.fabric, CacheBlocks(self.prefill_cache), 16)
        self.exports = ExportTable(
            self.prefill_cache.pool,
            self.exporter,
            ExportSettings("p", 1, "p:1", fingerprint, 16, 5.0, 5.0, options.max_unread_share),
        )
        prefill_policy = PrefillPolicy(options.chunk_tokens, options.max_batch, max_waiting=100)
        self.prefill = PrefillEngine(
            PrefillScheduler(limits, prefill_policy),
            self.prefill_runner,
            self.exports,
            synchronize=lambda: None,
            prefixes=self._prefixes(self.prefill_cache) if options.prefix_cache else None,
            grammars=GrammarRequests(options.compiler),
        )

        self.decode_cache = PagedCache(layout, decode_limits.num_blocks, "cpu")
        make_source = options.draft_source
        source = None if make_source is None else make_source(model, self.decode_cache)
        self.decode_runner = ModelRunner(model, self.decode_cache, source)
        self.importer = options.transfer.importer(self.fabric, CacheBlocks(self.decode_cache))
        self.imports = ImportTable(
            self.decode_cache.pool,
            self.importer,
            ImportSettings(
                "d", 1, replace(fingerprint, weights=options.decode_weights), 5.0, 5.0, 0.25
            ),
        )
        decode_policy = DecodePolicy(
            options.max_batch,
            100,
            options.chunk_tokens,
            options.draft_tokens,
            options.reserve_output_share,
        )
        self.decode_scheduler = DecodeScheduler(decode_limits, decode_policy)
        self.decode = DecodeEngine(
            self.decode_scheduler,
            self.decode_runner,
            self.imports,
            can_recompute=options.can_recompute,
            prefixes=self._prefixes(self.decode_cache) if options.prefix_cache else None,
            grammars=GrammarRequests(options.compiler),
        )

    @staticmethod
    def _prefixes(cache: PagedCache) -> PrefixCache:
        return PrefixCache(cache.pool, "w", BLOCK_TOKENS)

    def close(self) -> None:
        self.importer.close()
        self.exporter.close()

    # The gateway's part.

    def start(self, request: StartRequest) -> Outcome:
        self._requests[request.key] = request
        outcome = self.outcomes[request.key] = Outcome()
        engine = self.decode if request.leg is Leg.WHOLE else self.prefill
        engine.take(request, self.now)
        return outcome

    def cancel(self, key: RequestKey) -> None:
        self.prefill.take(CancelRequest(key), self.now)
        self.decode.take(CancelRequest(key), self.now)

    def generate(self, requests: Sequence[StartRequest]) -> list[Outcome]:
        """Starts all and runs both engines until all are over."""
        outcomes = [self.start(request) for request in requests]
        self.run_until(lambda: all(outcome.is_over for outcome in outcomes))
        return outcomes

    def run_until(self, is_done: Callable[[], bool], max_turns: int = 2000) -> None:
        for _ in range(max_turns):
            if is_done():
                return
            self.turn()
        raise AssertionError(f"not done after {max_turns} turns: {self.outcomes}")

    def settle(self, turns: int = 4) -> None:
        """Lets messages that are on their way arrive."""
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        """One turn of each engine; a millisecond passes."""
        self.now += 0.001
        prefill_output = self.prefill.step(self.now)
        decode_output = self.decode.step(self.now)
        self.prefill_load, self.decode_load = prefill_output.load, decode_output.load
        self._take_events(prefill_output)
        self._take_events(decode_output)
        self._carry_down(prefill_output.messages)
        self._carry_up(decode_output.messages)

    def assert_nothing_is_held(self) -> None:
        for pool in (self.prefill_cache.pool, self.decode_cache.pool):
            assert (pool.num_free, pool.num_quarantined) == (pool.num_blocks, 0)
        assert self.exports.is_idle
        assert self.imports.is_idle
        for engine in (self.prefill, self.decode):
            load = engine.collect(self.now).load
            assert (load.running_requests, load.waiting_requests) == (0, 0)
            assert load.queued_prompt_tokens == 0

    # The network's part.

    def break_a_stream(self, chance: random.Random) -> None:
        """One Export stream is gone for both sides, without a word."""
        if self._streams:
            key = chance.choice(list(self._streams))
            stream = self._streams.pop(key)
            self.decode.take(ImportStreamGone(key, HandOffFailed("it broke")), self.now)
            self.prefill.take(ExportStreamGone(stream), self.now)

    def _carry_down(self, messages: Sequence[ExportMessage]) -> None:
        keys = {stream: key for key, stream in self._streams.items()}
        for message in messages:
            key = keys.get(message.stream)
            if key is None or (isinstance(message, SendEvent) and self.loses(message.event)):
                continue
            if isinstance(message, SendEvent):
                self.decode.take(EventArrived(key, message.event), self.now)
            else:
                del self._streams[key]
                self.decode.take(ImportStreamGone(key, HandOffFailed("it ended")), self.now)

    def _carry_up(self, messages: Sequence[ImportMessage]) -> None:
        for message in messages:
            if isinstance(message, OpenStream):
                self._num_streams += 1
                self._streams[message.key] = self._num_streams
            stream = self._streams.get(message.key)
            if stream is None:
                continue
            if isinstance(message, OpenStream | SendUpdate):
                self.prefill.take(UpdateArrived(stream, message.update), self.now)
            else:
                assert isinstance(message, EndStream)
                del self._streams[message.key]
                self.prefill.take(ExportStreamGone(stream), self.now)

    def _take_events(self, output: StepOutput[Any]) -> None:
        for event in output.events:
            self.outcomes[event.key].take(event)
            if isinstance(event, Begun):
                request = self._requests[event.key]
                self.decode.take(replace(request, leg=Leg.DECODE, export=event.export), self.now)


@pytest.fixture
def make_pair(model: Transformer) -> Callable[..., Pair]:
    """Builds a pair from the fields of `PairOptions`."""
    return lambda **options: Pair(model, PairOptions(**options))


@pytest.fixture
def make_embedded_pair(embedded_model: Transformer) -> Callable[..., Pair]:
    """Builds a pair with the embedded model."""
    return lambda **options: Pair(embedded_model, PairOptions(**options))


@pytest.fixture
def embedded_reference(embedded_model: Transformer) -> Reference:
    return Reference(embedded_model)


@pytest.fixture
def make_request() -> Callable[..., StartRequest]:
    """A request for the prefill leg, with a random prompt that its name determines."""

    def make(
        name: str,
        prompt_tokens: int = 40,
        max_tokens: int = 20,
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[int] = (),
        **changes: Any,
    ) -> StartRequest:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        prompt = torch.randint(0, TINY.vocab_size, (prompt_tokens,), generator=generator)
        return StartRequest(
            key=RequestKey(name),
            token_ids=tuple(prompt.tolist()),
            sampling=sampling or SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens, frozenset(stop)),
            leg=Leg.PREFILL,
            deadline_s=60.0,
            **changes,
        )

    return make
