"""Claims about an expert-parallel group: several decode engines that step together, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from decode_workers.engine import DecodeCommand, DecodeEngine
from decode_workers.group_peers import WakeUp
from decode_workers.import_stream import ImportMessage, ImportSettings
from decode_workers.kv_import import ImportTable
from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.clock import SystemClock
from hocket.config import GroupSettings, RedisSettings
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.engine_thread import CancelRequest, EngineThread, StepOutput
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.execution.model_runner import ModelRunner
from hocket.execution.passes import GroupPasses, take_part_in
from hocket.kv.memory_transfer import MemoryFabric, MemoryImporter
from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.parallel.expert_dispatch import AllToAllDispatcher
from hocket.parallel.expert_placement import ExpertPlacement
from hocket.parallel.lockstep import Lockstep
from hocket.parallel.rank_group import RankGroup
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Event, Failed, Fingerprint, Finished, Leg, RequestKey, StartRequest, Tokens

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=6,
    experts_per_token=3,
    num_dense_layers=1,
    num_mtp_layers=1,
    dtype="bfloat16",
)
BLOCK_TOKENS, NUM_BLOCKS, CHUNK_TOKENS, TIMEOUT_S = 64, 16, 32, 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(CONFIG, tmp_path_factory.mktemp("group"), 3, "bfloat16")


@dataclass
class Rank:
    """One engine in its thread; events are kept as they come."""

    engine: DecodeEngine
    model: Transformer
    cache: PagedCache
    thread: EngineThread[Any, Any] = field(init=False)
    events: list[Event] = field(default_factory=list[Event])
    crash: Exception | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.thread = EngineThread(
            self.engine, SystemClock(), name="rank", on_output=self._keep, on_crash=self._crashed
        )

    def of(self, key: RequestKey) -> tuple[int, ...]:
        tokens = [e for e in self.events if isinstance(e, Tokens) and e.key == key]
        return tuple(token for event in tokens for token in event.token_ids)

    def ended(self) -> dict[RequestKey, Finished | Failed]:
        return {e.key: e for e in self.events if isinstance(e, Finished | Failed)}

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 20.0), self.events[-3:]

    def _keep(self, output: StepOutput[ImportMessage], seconds: float) -> None:
        with self.changed:
            self.events += output.events
            self.changed.notify_all()

    def _crashed(self, error: Exception) -> None:
        with self.changed:
            self.crash = error
            self.changed.notify_all()


class Group:
    """R ranks over a checkpoint; started by the context, stopped at its end."""

    def __init__(
        self,
        folder: Path,
        size: int,
        draft_tokens: int,
        num_blocks: int = NUM_BLOCKS,
        reserve_output_share: float = 1.0,
    ) -> None:
        self._num_blocks = num_blocks
        self._reserve_output_share = reserve_output_share
        self._store: Any = c10d.HashStore()
        self._store.set_timeout(timedelta(seconds=TIMEOUT_S))
        found: dict[int, Rank] = {}

        def build(rank: int) -> None:
            found[rank] = self._build(folder, rank, size, draft_tokens)

        builders = [threading.Thread(target=build, args=(rank,)) for rank in range(size)]
        for builder in builders:
            builder.start()
        for builder in builders:
            builder.join(20.0)
        self.ranks = [found[rank] for rank in range(size)]

    def __enter__(self) -> Group:
        for rank in self.ranks:
            rank.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self.ranks:
            rank.wait_for(lambda rank=rank: rank.crash or self._has_nothing(rank))
        for rank in self.ranks:
            assert rank.thread.stop(10.0)

    def _has_nothing(self, rank: Rank) -> bool:
        return rank.cache.pool.num_free == self._num_blocks

    def wake(self, sender: int, step: int) -> None:
        for number, rank in enumerate(self.ranks):
            if number != sender:
                rank.thread.post(WakeUp(step))

    def _build(self, folder: Path, rank: int, size: int, draft_tokens: int) -> Rank:
        settings = GroupSettings("decode-0", rank, size, RedisSettings(), TIMEOUT_S)
        group = RankGroup(self._store, settings, "127.0.0.1", torch.device("cpu"))
        dispatcher = AllToAllDispatcher(group, ExpertPlacement(CONFIG.num_experts, size))
        model = load_model(folder, batch_invariant=True, dispatcher=dispatcher)
        lockstep = Lockstep(
            group, len(model.mtp), take_part_in(model), lambda step: self.wake(rank, step)
        )
        passes = GroupPasses(model, lockstep)
        cache = PagedCache(model.kv_layout(BLOCK_TOKENS), self._num_blocks, "cpu")
        drafts = MTPDraftSource(model, cache, passes) if draft_tokens else None
        runner = ModelRunner(model, cache, drafts, passes)
        fingerprint = Fingerprint("w", "kv", BLOCK_TOKENS, "bfloat16", "n")
        importer = MemoryImporter(MemoryFabric(), [bytes(8)] * self._num_blocks)
        import_settings = ImportSettings("d", 1, fingerprint, 5.0, 5.0, 0.25)
        imports = ImportTable(cache.pool, importer, import_settings)
        limits = RequestLimits(500, CONFIG.vocab_size, self._num_blocks, BLOCK_TOKENS)
        policy = DecodePolicy(8, 8, CHUNK_TOKENS, draft_tokens, self._reserve_output_share)
        scheduler = DecodeScheduler(limits, policy)
        engine = DecodeEngine(scheduler, runner, imports, can_recompute=True, together=lockstep)
        return Rank(engine, model, cache)


def requests(count: int) -> list[LocalRequest]:
    """Prompts and outputs of different lengths, half of them sampled."""
    return [
        LocalRequest(
            token_ids=tuple((7 * i + 3 * j) % CONFIG.vocab_size for j in range(5 + 17 * i)),
            sampling=SamplingParams(temperature=float(i % 2), seed=i),
            stopping=StoppingParams(12 + 5 * i),
            key=RequestKey(f"request-{i}"),
        )
        for i in range(count)
    ]


def command(request: LocalRequest) -> DecodeCommand:
    assert request.key is not None
    return StartRequest(
        key=request.key,
        token_ids=request.token_ids,
        sampling=request.sampling,
        stopping=request.stopping,
        leg=Leg.WHOLE,
        deadline_s=30.0,
    )


def outputs(group: Group, placed: Sequence[tuple[int, LocalRequest]]) -> list[tuple[int, ...]]:
    """Every request's tokens, all sent at once to the ranks they are placed on."""
    for rank, request in placed:
        group.ranks[rank].thread.post(command(request))
    for rank, request in placed:
        at = group.ranks[rank]
        at.wait_for(lambda at=at, request=request: request.key in at.ended())
        assert isinstance(at.ended()[request.key], Finished)  # type: ignore[index]
    return [group.ranks[rank].of(r.key) for rank, r in placed]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """What one process without drafts says."""
    engine = LocalEngine(load_model(folder, batch_invariant=True), LocalEngineLimits(num_blocks=64))
    return [result.token_ids for result in engine.generate(requests(6))]


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_says_what_one_process_says(
    folder: Path, expected: list[tuple[int, ...]], size: int, draft_tokens: int
) -> None:
    with Group(folder, size, draft_tokens) as group:
        spread = [(i % size, request) for i, request in enumerate(requests(6))]
        assert outputs(group, spread) == expected


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_ranks_with_several_mtp_modules_go_through_each_together(
    tmp_path: Path, draft_tokens: int
) -> None:
    """The ranks have prompts, drafts and nothing to do at different times; what a rank without
    tokens adds shows in what is accepted. The vocabulary is so small that something is."""
    config = replace(CONFIG, vocab_size=5, num_mtp_layers=2)
    folder = random_checkpoint(config, tmp_path, 3, "bfloat16")
    limits = LocalEngineLimits(num_blocks=64, num_drafts=draft_tokens)
    made = [replace(r, token_ids=tuple(t % 5 for t in r.token_ids)) for r in requests(6)]
    expected = LocalEngine(load_model(folder, batch_invariant=True), limits).generate(made)
    assert sum(local.usage.drafts.accepted_tokens for local in expected) > 10
    with Group(folder, 3, draft_tokens) as group:
        for ranks, count in (((0, 1), 6), ((2,), 1)):
            spread = [(ranks[i % len(ranks)], request) for i, request in enumerate(made[:count])]
            assert outputs(group, spread) == [local.token_ids for local in expected[:count]]
            for (rank, request), local in zip(spread, expected, strict=False):
                assert request.key is not None
                ended = group.ranks[rank].ended()[request.key]
                assert isinstance(ended, Finished)
                assert ended.usage == local.usage


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_rank_short_of_blocks_preempts_by_itself(
    folder: Path, expected: list[tuple[int, ...]], draft_tokens: int
) -> None:
    """The last two have a block each when the longer one, which came first, needs a second."""
    with Group(folder, 2, draft_tokens, num_blocks=2, reserve_output_share=0.0) as group:
        short, other = group.ranks
        placed = [(1, requests(6)[0]), *((0, request) for request in requests(6)[:1:-1])]
        assert outputs(group, placed) == [expected[0], *expected[:1:-1]]
        preemptions = [rank.engine._scheduler.counters.preemptions for rank in (short, other)]
        assert preemptions[0] > 0
        assert preemptions[1] == 0


def test_one_rank_alone_has_work_and_the_others_take_part(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    with Group(folder, 3, 2) as group:
        assert outputs(group, [(2, request) for request in requests(6)]) == expected
        assert outputs(group, [(0, requests(6)[4])]) == [expected[4]]


def test_each_rank_reads_only_its_experts(folder: Path) -> None:
    with Group(folder, 4, 0) as group:
        layer: Any = group.ranks[1].model.layers[1]
        assert set(layer.mlp.experts._experts) == {2, 3}
        total = sum(len(rank.model.layers[1].mlp.experts._experts) for rank in group.ranks)
        assert total == CONFIG.num_experts


def test_a_group_without_work_makes_no_steps(folder: Path) -> None:
    with Group(folder, 2, 3) as group:
        outputs(group, [(0, requests(1)[0])])
        for rank in group.ranks:
            lockstep: Any = rank.engine._together
            rank.wait_for(lambda lockstep=lockstep: not lockstep._is_awake)
        steps = [rank.engine._together._next_step for rank in group.ranks]
        turns = [rank.thread.num_turns for rank in group.ranks]
        assert steps[0] == steps[1]
        for rank, before in zip(group.ranks, turns, strict=True):
            rank.wait_for(lambda rank=rank, before=before: rank.thread.num_turns >= before + 2)
        assert [rank.engine._together._next_step for rank in group.ranks] == steps


def test_a_request_that_fails_between_passes_harms_nobody_else(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    """NaN in one request's blocks is found after the pass: its rank stays in step."""
    long = requests(6)[5]
    with Group(folder, 2, 3) as group:
        bad, good = group.ranks
        good.thread.post(command(long))
        bad.thread.post(command(replace(requests(6)[3], stopping=StoppingParams(300))))
        bad.wait_for(lambda: bad.of(RequestKey("request-3")))
        bad.cache.storage.fill_(0xFF)
        bad.wait_for(lambda: RequestKey("request-3") in bad.ended())
        assert isinstance(bad.ended()[RequestKey("request-3")], Failed)
        good.wait_for(lambda: RequestKey("request-5") in good.ended())
        assert good.of(RequestKey("request-5")) == expected[5]
        bad.cache.storage.zero_()


def test_a_cancel_on_one_rank_leaves_the_others_alone(
    folder: Path, expected: list[tuple[int, ...]]
) -> None:
    with Group(folder, 2, 2) as group:
        first, second = group.ranks
        first.thread.post(command(requests(6)[5]))
        second.thread.post(command(requests(6)[4]))
        first.wait_for(lambda: first.of(RequestKey("request-5")))
        first.thread.post(CancelRequest(RequestKey("request-5")))
        second.wait_for(lambda: RequestKey("request-4") in second.ended())
        assert second.of(RequestKey("request-4")) == expected[4]


def test_a_rank_that_is_gone_ends_every_request_with_a_clear_status(folder: Path) -> None:
    with Group(folder, 2, 3) as group:
        lost, left = group.ranks
        left.thread.post(command(requests(6)[5]))
        left.wait_for(lambda: left.of(RequestKey("request-5")))
        assert lost.thread.stop(10.0)
        left.wait_for(lambda: left.crash)
        failed = left.ended()[RequestKey("request-5")]
        assert isinstance(failed, Failed)
        assert failed.reason == "GROUP_LOST"
        assert failed.is_retryable
        assert "decode-0 has lost a rank" in failed.message
