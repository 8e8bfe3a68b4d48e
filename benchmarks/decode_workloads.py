"""What `decode.py` decodes: checkpoints, prompts, and SYNTHETIC (scripted) continuations."""

from __future__ import annotations

import ast
import json
import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from hocket.execution.sampling.noise import position_uniform
from hocket.execution.sampling.sampler import Sampler
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.request_params import SamplingParams

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = REPOSITORY / "hocket" / "checkpoints" / "hocket-tiny"
TRUTH_CHOICE = 1_000_003


@dataclass(frozen=True)
class Workload:
    """`config` None means the embedded checkpoint with its own drafts; else a random one. The
    former continues the beginnings in `prompts`, None: this repository's docstrings."""

    name: str
    shows: str
    config: ModelConfig | None
    prompt_tokens: int = 64
    prompts: Path | None = None

    @property
    def is_synthetic(self) -> bool:
        return self.config is not None


PEERS_CONFIG = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_experts=32,
    experts_per_token=4,
    num_dense_layers=1,
    num_mtp_layers=1,
)
LARGE_CONFIG = ModelConfig(
    vocab_size=32_768,
    hidden_size=2048,
    num_layers=8,
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=8192,
    moe_intermediate_size=3072,
    num_experts=8,
    experts_per_token=2,
    num_dense_layers=2,
    num_mtp_layers=1,
)
LARGE_DENSE_CONFIG = replace(
    LARGE_CONFIG,
    vocab_size=8192,
    intermediate_size=12_288,
    moe_intermediate_size=256,
    num_experts=2,
    experts_per_token=1,
    num_dense_layers=8,
)
"""`large` without experts: 4 tokens read what 1 token reads, as in a model whose experts all have
tokens anyway. A pass of the MTP module reads 5 % of what a main pass reads, DeepSeek-V3's 4 %."""
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", "the embedded model, its own drafts, text it was not trained on", None),
        Workload(
            "tiny-held-out",
            "the embedded model, its own drafts, text of the kind it was trained on, held out",
            None,
            prompts=REPOSITORY / "benchmarks" / "data" / "held_out_prompts.json",
        ),
        Workload("peers", "8 layers, hidden 512, 32 experts top-4, MLA 128 + 32", PEERS_CONFIG),
        Workload("large", "weights beyond the caches: 8 layers, 8 experts top-2", LARGE_CONFIG),
        Workload("large-dense", "weights beyond the caches: 8 layers, dense", LARGE_DENSE_CONFIG),
    )
}


def prepare_checkpoint(workload: Workload, folder: Path) -> Path:
    """The embedded checkpoint, or a random one written into `folder` in bf16."""
    if workload.config is None:
        return TINY
    return random_checkpoint(workload.config, folder / workload.name, seed=1, dtype="bfloat16")


def count_parameters(path: Path) -> int:
    """Parameters in a checkpoint's safetensors files, the MTP module included."""
    total = 0
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = list(tensors.keys())
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return total


def commit() -> str:
    """The commit that is measured; "-dirty" when the tree differs, "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def prompts_of(workload: Workload, count: int, vocab_size: int) -> list[list[int]]:
    """`count` prompts of equal length: for the embedded model docstrings that it was not trained
    on, of this repository (its corpus has none of them) or held out from its corpus; addressed
    random token ids for a random one."""
    length = workload.prompt_tokens
    if workload.is_synthetic:
        return [truth_tokens(1_000 + i, length, vocab_size) for i in range(count)]
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    texts = _docstrings() if workload.prompts is None else _beginnings(workload.prompts)
    prompts = [tokenizer.encode(text).ids for text in texts]
    prompts = [ids[:length] for ids in prompts if len(ids) >= length]
    assert len(prompts) >= count, f"{len(prompts)} docstrings of {length} tokens, {count} needed"
    return prompts[:count]


@cache
def docstring_tokens() -> list[int]:
    """All docstrings of this repository, longest first, as one run of the embedded model's ids;
    read once, so that an edit during a run changes no prompt."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return [token for text in _docstrings() for token in tokenizer.encode(text).ids]


def truth_tokens(seed: int, length: int, vocab_size: int) -> list[int]:
    """A fixed random sequence of token ids from 16 up."""
    uniforms = (position_uniform(seed, TRUTH_CHOICE, position) for position in range(length))
    return [16 + int(uniform * (vocab_size - 16)) for uniform in uniforms]


class ForcedSampler:
    """SYNTHETIC: samples as always, for the time it takes, then answers with the script.

    A request's seed is its place in `scripts`, so runs with any k decode the very same tokens.
    """

    def __init__(self, sampler: Sampler, scripts: Sequence[Sequence[int]]) -> None:
        self._sampler = sampler
        self._scripts = scripts

    def sample(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        sampled_N = self._sampler.sample(logits_NV, params, positions)
        scripted = [
            self._scripts[row.seed][position]
            for row, position in zip(params, positions, strict=True)
        ]
        return torch.tensor(scripted, device=sampled_N.device)


def _beginnings(path: Path) -> list[str]:
    """Of documents held out when the embedded model was trained (`Corpus.held_out` in
    tools/tiny_model/corpus.py), up to 16 of each package, lowest hash first."""
    return [document["text"] for document in json.loads(path.read_text())]


def _docstrings() -> list[str]:
    texts: list[str] = []
    for path in sorted((REPOSITORY / "hocket").rglob("*.py")):
        tree = ast.parse(path.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        texts += [text for node in nodes if (text := ast.get_docstring(node))]
    return sorted(texts, key=len, reverse=True)
