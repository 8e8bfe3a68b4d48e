"""A tiny random model, and a prefill engine on it with the in-memory transfer."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass

import pytest
import torch

from hocket.execution.model_runner import FirstToken, ModelRunner
from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import PrefixCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Fingerprint
from prefill_workers.engine import PrefillEngine
from prefill_workers.export_stream import ExportSettings
from prefill_workers.kv_export import ExportTable
from prefill_workers.scheduler import PrefillPolicy, PrefillScheduler

torch.set_num_threads(1)
BLOCK_TOKENS = 16
NUM_BLOCKS = 16


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
    """Raises in the next `num_broken` prefill steps."""

    num_broken = 0

    def prefill(self, chunks: object) -> list[FirstToken | None]:
        if self.num_broken:
            self.num_broken -= 1
            raise RuntimeError("a broken kernel")
        return super().prefill(chunks)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TinyWorker:
    """An engine with its parts; chunks of 40 tokens, 16 blocks of 16 tokens."""

    engine: PrefillEngine
    runner: FragileRunner
    exports: ExportTable
    fingerprint: Fingerprint


@pytest.fixture
def tiny_worker(tiny_model: Transformer) -> TinyWorker:
    return build(tiny_model, has_prefix_cache=False)


@pytest.fixture
def caching_worker(tiny_model: Transformer) -> TinyWorker:
    return build(tiny_model, has_prefix_cache=True)


def build(tiny_model: Transformer, *, has_prefix_cache: bool) -> TinyWorker:
    fingerprint = Fingerprint("w", "kv", BLOCK_TOKENS, "float32", "n")
    cache = PagedCache(tiny_model.kv_layout(BLOCK_TOKENS), NUM_BLOCKS, "cpu")
    runner = FragileRunner(tiny_model, cache)
    exporter = MemoryExporter(MemoryFabric(), [bytes(8)] * NUM_BLOCKS, num_slots=4)
    settings = ExportSettings("p", 1, "p:1", fingerprint, 4, 5.0, 5.0, max_unread_share=0.5)
    exports = ExportTable(cache.pool, exporter, settings)
    limits = RequestLimits(300, 50, NUM_BLOCKS, BLOCK_TOKENS)
    scheduler = PrefillScheduler(limits, PrefillPolicy(40, max_batch=4, max_waiting=8))
    prefixes = PrefixCache(cache.pool, "w", BLOCK_TOKENS) if has_prefix_cache else None
    engine = PrefillEngine(scheduler, runner, exports, synchronize=lambda: None, prefixes=prefixes)
    return TinyWorker(engine, runner, exports, fingerprint)
