"""What `config.json` may say, and what it may not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import CheckpointError
from hocket.model.model_config import ModelConfig, YarnConfig


def test_a_config_survives_the_way_to_hugging_face_and_back(
    variants: dict[str, ModelConfig],
) -> None:
    for config in variants.values():
        config = replace(config, eos_token_ids=(1, 5), bos_token_id=0)
        assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2"),
        ({"context_parallel_size": 4}, "context_parallel_size = 4"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type = 'linear'"),
        ({"n_group": 3}, "n_group = 3"),
        ({"n_group": 2, "topk_group": 4}, "topk_group = 4"),
        ({"num_experts_per_tok": 99}, "num_experts_per_tok = 99"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ({"torch_dtype": "float16"}, "torch_dtype = 'float16'"),
    ],
)
def test_unsupported_values_are_refused_by_name(
    change: dict[str, Any], named: str, variants: dict[str, ModelConfig]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(variants["plain"].to_hf() | change)
    assert named in str(caught.value)
    assert caught.value.metadata["architecture"] in str(caught.value)


def test_newer_rope_parameters_are_read_too(variants: dict[str, ModelConfig]) -> None:
    raw = variants["plain"].to_hf()
    del raw["rope_theta"], raw["rope_scaling"]
    raw["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 32.0,
        "original_max_position_embeddings": 128,
    }
    config = ModelConfig.from_hf(raw)
    assert config.rope_theta == 5e4
    assert config.yarn == YarnConfig(factor=32.0, original_max_position_embeddings=128)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_checkpoint(tmp_path)
    broken = {b"{": "not valid JSON", b"\xff": "not valid JSON", b"[1]": "JSON list"}
    for content, fault in broken.items():
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=fault):
            ModelConfig.from_checkpoint(tmp_path)


def test_the_generation_config_names_the_end_tokens(
    tmp_path: Path, variants: dict[str, ModelConfig]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(variants["plain"].to_hf()))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert ModelConfig.from_checkpoint(tmp_path).eos_token_ids == (3, 4)


def test_the_layout_counts_mtp_layers_last(variants: dict[str, ModelConfig]) -> None:
    layout = variants["plain"].kv_layout()
    assert (layout.num_layers, layout.entry_width, layout.dtype) == (4, 40, "float32")
    assert replace(variants["plain"], num_mtp_layers=0).kv_layout("bfloat16").num_layers == 3


def test_the_config_is_read_without_torch() -> None:
    code = "import sys, hocket.model.model_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
