"""Writes a Hugging Face checkpoint with random weights, for tests and benchmarks.

Tensors are made one by one and written shard by shard, so that checkpoints of many gigabytes
need little memory. The scales keep hidden states near unit size and let logits differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hocket.model.checkpoint_files import INDEX_FILE, SINGLE_FILE
from hocket.model.checkpoint_tensors import EMBEDDING, TensorSpec, expected_tensors
from hocket.model.model_config import ModelConfig

SHARD_BYTES = 2**30


def random_checkpoint(
    config: ModelConfig,
    path: Path | str,
    seed: int = 0,
    dtype: torch.dtype | str = "bfloat16",
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write `config.json` and weights into the folder `path` (made if need be); returns it.

    The same config, seed and dtype give the same bytes. Optional tensors (the MTP module's own
    embedding and head) are left out. Router weights and biases are fp32."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    raw = config.to_hf() | {"torch_dtype": str(torch_dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    for name, spec in expected_tensors(config).items():
        if spec.is_optional:
            continue
        shard[name] = _random_tensor(name, spec, generator, torch_dtype)
        if config.tie_word_embeddings and name == EMBEDDING:
            # The embedding is the head too: keep logits near unit size.
            shard[name] /= config.hidden_size**0.5
        if sum(tensor.nbytes for tensor in shard.values()) >= shard_bytes:
            _write_shard(folder, len(shards), shard)
            shards.append(list(shard))
            shard = {}
    if shard:
        _write_shard(folder, len(shards), shard)
        shards.append(list(shard))
    _name_shards(folder, shards)
    return folder


def _random_tensor(
    name: str, spec: TensorSpec, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor:
    values = torch.randn(spec.shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return values * 0.05
    if name.endswith("mlp.gate.weight"):
        return values / spec.shape[-1] ** 0.5
    if "norm" in name:
        return (1 + 0.1 * values).to(dtype)
    if name.endswith("embed_tokens.weight"):
        return values.to(dtype)
    return (values * (1.5 / spec.shape[-1] ** 0.5)).to(dtype)


def _write_shard(folder: Path, number: int, shard: dict[str, torch.Tensor]) -> None:
    save_file(shard, folder / f"shard-{number}.tmp", metadata={"format": "pt"})


def _name_shards(folder: Path, shards: list[list[str]]) -> None:
    """Shards get their final names once their number is known."""
    if len(shards) == 1:
        (folder / "shard-0.tmp").rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}.tmp").rename(folder / file)
        total += (folder / file).stat().st_size
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
