"""Tiny random checkpoints with and without an MTP module, in batch-invariant mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model

torch.set_num_threads(1)

TINY = ModelConfig(
    vocab_size=120,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    experts_per_token=2,
    num_dense_layers=1,
    num_mtp_layers=1,
)


@pytest.fixture(scope="session")
def load_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Transformer]:
    """`load_tiny(dtype="float32", mtp=True, batch_invariant=True)`; each loaded once."""
    loaded: dict[tuple[str, bool, bool], Transformer] = {}
    paths: dict[bool, Path] = {}

    def load(dtype: str = "float32", mtp: bool = True, batch_invariant: bool = True) -> Transformer:
        if mtp not in paths:
            folder = tmp_path_factory.mktemp("tiny")
            config = replace(TINY, num_mtp_layers=int(mtp))
            paths[mtp] = random_checkpoint(config, folder, seed=5, dtype="float32")
        key = (dtype, mtp, batch_invariant)
        if key not in loaded:
            loaded[key] = load_model(paths[mtp], dtype, "cpu", batch_invariant)
        return loaded[key]

    return load


@pytest.fixture(scope="session")
def model(load_tiny: Callable[..., Transformer]) -> Transformer:
    """fp32, with an MTP module, batch-invariant."""
    return load_tiny()
