"""Loading checkpoints: shards, what is missing, the digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket.errors import CheckpointError
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.weights import load_model, weights_digest


@pytest.fixture
def folder(tmp_path: Path, variants: dict[str, ModelConfig]) -> Path:
    """A checkpoint in one file, ours to break."""
    return random_checkpoint(variants["low-rank query"], tmp_path / "one", 7, "float32")


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(folder: Path, runner: Any, **options: Any) -> torch.Tensor:
    model = load_model(folder, **options)
    return model.logits(runner(model).step(list(range(20))))


def test_one_file_and_many_shards_load_alike(
    folder: Path, checkpoint_of: Callable[[str], Path], runner: Any
) -> None:
    sharded = checkpoint_of("low-rank query")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(folder, runner), logits(sharded, runner))
    assert weights_digest(folder) == weights_digest(sharded)


def test_missing_tensors_are_named(folder: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        del tensors["lm_head.weight"]

    change(folder, drop)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert "model.layers.1.mlp.experts.3.up_proj.weight is missing" in str(caught.value)
    assert "lm_head.weight is missing" in str(caught.value)
    assert "DeepseekV3ForCausalLM" in str(caught.value)


def test_wrong_shapes_and_quantised_tensors_are_named(folder: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(63)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change(folder, spoil)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert "model.norm.weight has shape [63], expected [64]" in str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight is stored as F8_E4M3" in str(caught.value)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(n) for n in list(tensors)[:30]] and None)
    with pytest.raises(CheckpointError, match=r"and 22 more"):
        load_model(folder)


def test_a_missing_shard_is_named(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint_of("plain"), tmp_path / "copy")
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(copy)
    shard.write_bytes(b"12")
    with pytest.raises(CheckpointError, match=shard.name):
        load_model(copy)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(folder)


def test_a_checkpoint_without_mtp_module_says_so(
    tmp_path: Path, variants: dict[str, ModelConfig]
) -> None:
    config = replace(variants["plain"], num_mtp_layers=0)
    model = load_model(random_checkpoint(config, tmp_path, 0, "float32"))
    assert not model.has_mtp
    assert model.kv_layout().num_layers == config.num_layers


def test_own_mtp_embedding_and_head_are_used(folder: Path, runner: Any) -> None:
    def run() -> torch.Tensor:
        model = load_model(folder)
        one = runner(model)
        hidden = one.step([1, 2, 3])
        return model.mtp_logits(one.mtp_step([2, 3], 1, hidden[:2]))

    shared = run()
    prefix = "model.layers.3."
    main = load_file(folder / "model.safetensors")

    def copy_main(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{prefix}embed_tokens.weight"] = main["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = main["lm_head.weight"].clone()

    change(folder, copy_main)
    assert torch.equal(run(), shared)
    model = load_model(folder)
    assert model.mtp[0].head.data_ptr() == model.head.data_ptr()

    def own_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{prefix}shared_head.head.weight"] *= 2

    change(folder, own_head)
    torch.testing.assert_close(run(), shared * 2)


def test_dtype_is_the_checkpoints_unless_asked_for(folder: Path, runner: Any) -> None:
    assert load_model(folder).dtype == torch.float32
    half = load_model(folder, "bfloat16")
    assert half.dtype == torch.bfloat16
    assert half.kv_layout().dtype == "bfloat16"
    assert logits(folder, runner, dtype=torch.bfloat16).dtype == torch.float32
    with pytest.raises(CheckpointError, match="float16"):
        load_model(folder, torch.float16)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bfloat16_stays_close_to_float32(batch_invariant: bool, folder: Path, runner: Any) -> None:
    exact = logits(folder, runner)
    rounded = logits(folder, runner, dtype="bfloat16", batch_invariant=batch_invariant)
    error = (rounded - exact).pow(2).mean().sqrt() / exact.std()
    assert error < 0.2


def test_the_digest_names_weights_and_config(folder: Path) -> None:
    digests = {weights_digest(folder)}
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"transformers_version": "9"}))
    assert weights_digest(folder) in digests
    (folder / "config.json").write_text(json.dumps(raw | {"routed_scaling_factor": 2.0}))
    digests.add(weights_digest(folder))
    change(folder, lambda tensors: tensors["lm_head.weight"][-1, -1].add_(1) and None)
    digests.add(weights_digest(folder))
    assert len(digests) == 3


def test_random_checkpoints_repeat_under_a_seed(
    tmp_path: Path, variants: dict[str, ModelConfig]
) -> None:
    config = variants["plain"]
    one, same, other = (
        weights_digest(random_checkpoint(config, tmp_path / str(i), seed))
        for i, seed in enumerate((1, 1, 2))
    )
    assert one == same != other


def test_the_numerics_name_tells_the_modes_apart(folder: Path) -> None:
    fast, invariant = (load_model(folder, batch_invariant=mode) for mode in (False, True))
    assert fast.numerics == load_model(folder, "bfloat16").numerics != invariant.numerics
    assert torch.backends.cpu.get_cpu_capability() in invariant.numerics
    assert (fast.is_batch_invariant, invariant.is_batch_invariant) == (False, True)
