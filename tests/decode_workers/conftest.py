"""A tiny random model, and a decode engine on it with the in-memory transfer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from decode_workers.engine import DecodeEngine
from decode_workers.import_stream import ImportSettings
from decode_workers.kv_import import ImportTable
from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.model_runner import DecodeOutput, ModelRunner
from hocket.kv.memory_transfer import MemoryFabric, MemoryImporter
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import PrefixCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Fingerprint

torch.set_num_threads(1)
BLOCK_TOKENS = 16
NUM_BLOCKS = 8


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    config = ModelConfig(
        vocab_size=50,
        hidden_size=16,
        num_layers=1,
        num_heads=1,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_experts=2,
        experts_per_token=1,
        num_dense_layers=1,
        num_mtp_layers=1,
        dtype="float32",
    )
    folder = random_checkpoint(config, tmp_path_factory.mktemp("model"), dtype="float32")
    return load_model(folder, batch_invariant=True)


class FragileRunner(ModelRunner):
    """Raises in the next `num_broken` decode steps."""

    num_broken = 0

    def decode(self, sequences: object, num_drafts: object) -> list[DecodeOutput]:
        if self.num_broken:
            self.num_broken -= 1
            raise RuntimeError("a broken kernel")
        return super().decode(sequences, num_drafts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TinyWorker:
    """An engine with its parts; chunks of 16 tokens, blocks of 16 tokens, up to 3 drafts."""

    engine: DecodeEngine
    scheduler: DecodeScheduler
    runner: FragileRunner
    imports: ImportTable
    fabric: MemoryFabric
    fingerprint: Fingerprint


@pytest.fixture
def make_worker(tiny_model: Transformer) -> Callable[..., TinyWorker]:
    def make(
        *,
        can_recompute: bool = True,
        num_blocks: int = NUM_BLOCKS,
        reserve_output_share: float = 1.0,
        prefix_cache: bool = False,
    ) -> TinyWorker:
        fingerprint = Fingerprint("w", "kv", BLOCK_TOKENS, "float32", "n")
        cache = PagedCache(tiny_model.kv_layout(BLOCK_TOKENS), num_blocks, "cpu")
        runner = FragileRunner(tiny_model, cache, MTPDraftSource(tiny_model, cache))
        fabric = MemoryFabric()
        importer = MemoryImporter(fabric, [bytes(8)] * num_blocks)
        settings = ImportSettings("d", 1, fingerprint, 5.0, 5.0, 0.25)
        imports = ImportTable(cache.pool, importer, settings)
        limits = RequestLimits(200, 50, num_blocks, BLOCK_TOKENS)
        policy = DecodePolicy(4, 6, 16, 3, reserve_output_share)
        scheduler = DecodeScheduler(limits, policy)
        prefixes = PrefixCache(cache.pool, "w", BLOCK_TOKENS) if prefix_cache else None
        engine = DecodeEngine(
            scheduler, runner, imports, can_recompute=can_recompute, prefixes=prefixes
        )
        return TinyWorker(engine, scheduler, runner, imports, fabric, fingerprint)

    return make
