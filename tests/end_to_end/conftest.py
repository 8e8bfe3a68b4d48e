"""Requests, and what the engine in one process answers, without hand-off and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hocket.config import Config
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits
from hocket.model.model_config import ModelConfig
from hocket.model.weights import load_model
from tests.end_to_end.running_cluster import Case


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return Config().model.checkpoint()


@pytest.fixture(scope="session")
def cases(checkpoint: Path) -> list[Case]:
    """Greedy and seeded, from a prompt of one token to several blocks and chunks."""
    vocabulary_size = ModelConfig.from_checkpoint(checkpoint).vocab_size
    made: list[Case] = []
    for number, (prompt_tokens, max_tokens) in enumerate(((1, 40), (63, 30), (64, 24), (300, 40))):
        token_ids = tuple(
            3 + (number * 977 + i * 131 + i * i * 7) % (vocabulary_size - 3)
            for i in range(prompt_tokens)
        )
        made.append(Case(token_ids, max_tokens))
        made.append(Case(token_ids, max_tokens, temperature=0.9, top_p=0.95, seed=number + 11))
    return made


@pytest.fixture(scope="session")
def expected(checkpoint: Path, cases: list[Case]) -> list[tuple[int, ...]]:
    """The engine's own answers, one request at a time, without drafts."""
    torch.set_num_threads(1)
    config = ModelConfig.from_checkpoint(checkpoint)
    model = load_model(
        checkpoint,
        dtype=getattr(torch, config.dtype),
        device=torch.device("cpu"),
        batch_invariant=True,
    )
    engine = LocalEngine(model, LocalEngineLimits(num_blocks=64))
    return [engine.generate([case.local()])[0].token_ids for case in cases]
