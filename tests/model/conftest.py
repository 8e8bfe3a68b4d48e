"""Tiny random checkpoints of every supported variant, and ways to run them through the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig, YarnConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer

PLAIN = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    experts_per_token=2,
    num_mtp_layers=1,
    max_position_embeddings=2048,
    dtype="float32",
)
DEEPSEEK_YARN = YarnConfig(
    factor=8.0, original_max_position_embeddings=256, mscale=1.0, mscale_all_dim=1.0
)
VARIANTS = {
    "plain": PLAIN,
    "low-rank query": replace(PLAIN, q_lora_rank=24, num_dense_layers=1),
    "groups": replace(
        PLAIN,
        num_experts=16,
        num_expert_groups=4,
        expert_groups_per_token=2,
        experts_per_token=3,
        routed_scaling_factor=2.5,
        num_shared_experts=2,
        num_dense_layers=2,
    ),
    "yarn": replace(PLAIN, q_lora_rank=24, yarn=DEEPSEEK_YARN),
    "yarn without mscale": replace(
        PLAIN, yarn=YarnConfig(factor=4.0, original_max_position_embeddings=512)
    ),
    "tied": replace(PLAIN, tie_word_embeddings=True, rope_interleaved=False, norm_topk_prob=False),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant name → folder of its fp32 checkpoint, in several shards."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[variant] = random_checkpoint(
                VARIANTS[variant], folder, 7, "float32", shard_bytes=2**18
            )
        return made[variant]

    return make


@dataclass
class Runner:
    """One sequence on one model with a cache of its own; blocks out of order on purpose."""

    model: Transformer

    def __post_init__(self) -> None:
        self.cache = PagedCache(self.model.kv_layout(), 12, self.model.device)
        self.blocks = [5, 2, 9, 0, 7, 11]
        self.num_computed = 0

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Hidden states of the next tokens, [T, H]."""
        inputs = StepInputs.build([(token_ids, self.num_computed, self.blocks)], self.cache.device)
        self.num_computed += len(token_ids)
        return self.model(inputs, self.cache)

    def mtp_step(
        self, token_ids: Sequence[int], first_slot: int, hidden: torch.Tensor, module: int = 0
    ) -> torch.Tensor:
        """z of MTP entries from `first_slot` on, [T, H]."""
        inputs = StepInputs.build([(token_ids, first_slot, self.blocks)], self.cache.device)
        return self.model.mtp_forward(inputs, hidden, self.cache, module=module)

    def in_chunks(self, token_ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """Hidden states of all tokens; `sizes` in turn, the last one repeated."""
        parts: list[torch.Tensor] = []
        done = 0
        while done < len(token_ids):
            size = sizes[min(len(parts), len(sizes) - 1)]
            parts.append(self.step(token_ids[done : done + size]))
            done += size
        return torch.cat(parts)


@pytest.fixture
def runner() -> type[Runner]:
    return Runner


@pytest.fixture(scope="session")
def token_ids() -> list[int]:
    """Five blocks and a part of one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, PLAIN.vocab_size, (333,), generator=generator).tolist()


@pytest.fixture(scope="session")
def variants() -> dict[str, ModelConfig]:
    return VARIANTS
