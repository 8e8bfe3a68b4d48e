"""The checkpoint folder of `hocket-tiny`, as Hugging Face DeepSeek-V3 checkpoints have it.

Goes out: config.json, model.safetensors (bf16; routers' correction biases fp32), the tokenizer's
files and generation_config.json. `load_model` reads them back, so that everything that is measured
is measured on the rounded weights that ship.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import BEGIN, END, PAD, SPECIAL_TOKENS, SYSTEM
from .network import Shape, TinyModel

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is none -%}
{%- elif content is string -%}{{ content }}
{%- else -%}
{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}{{- '<|system|>Tools: ' + (tools | tojson) + eos_token -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- '<|' + role + '|>' + text(message.content) -}}
{%- if message.tool_calls -%}{{- message.tool_calls | tojson -}}{%- endif -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def save_checkpoint(model: TinyModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write every file next to its place, then rename: readers see old or new, never half."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    staging.mkdir(exist_ok=True)
    _write_json(staging / "config.json", _config(model.shape))
    _write_json(staging / "generation_config.json", _generation_config())
    _write_json(staging / "tokenizer_config.json", _tokenizer_config(model.shape))
    tokenizer.save(str(staging / "tokenizer.json"))
    save_file(dict(_tensors(model)), staging / "model.safetensors", metadata={"format": "pt"})
    for path in staging.iterdir():
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    shutil.rmtree(staging)


def load_model(folder: Path) -> TinyModel:
    """The exported weights (values as rounded, dtype fp32) in the training model."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    shape = Shape(**{f.name: config[f.name] for f in dataclasses.fields(Shape)})
    model = TinyModel(shape)
    stored = load_file(folder / "model.safetensors")
    state = {}
    for name, value in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".mlp.experts.")
        if not prefix:
            state[name] = stored[name]
        elif leaf == "down_proj":
            state[name] = torch.stack(_of_experts(stored, prefix, leaf, len(value)))
        else:
            gates = _of_experts(stored, prefix, "gate_proj", len(value))
            ups = _of_experts(stored, prefix, "up_proj", len(value))
            state[name] = torch.cat([torch.stack(gates), torch.stack(ups)], dim=1)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def round_to_bf16(model: TinyModel) -> None:
    """Round parameters in place to what the checkpoint will hold."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def _of_experts(stored: dict[str, Tensor], prefix: str, leaf: str, count: int) -> list[Tensor]:
    return [stored[f"{prefix}.mlp.experts.{e}.{leaf}.weight"] for e in range(count)]


def _tensors(model: TinyModel) -> Iterator[tuple[str, Tensor]]:
    mtp = f"model.layers.{model.shape.num_hidden_layers}"
    for name, value in model.state_dict().items():
        prefix, _, leaf = name.rpartition(".mlp.experts.")
        if name.endswith("e_score_correction_bias"):
            # Only differences matter. Some engines mask closed groups with 0 and not with minus
            # infinity, which is right for biases >= 0 alone.
            yield name, (value - value.min()).float()
        elif not prefix:
            yield name, value.bfloat16()
        else:
            for expert, matrix in enumerate(value.bfloat16()):
                expert_prefix = f"{prefix}.mlp.experts.{expert}"
                if leaf == "down_proj":
                    yield f"{expert_prefix}.down_proj.weight", matrix.clone()
                else:
                    gate, up = matrix.chunk(2)
                    yield f"{expert_prefix}.gate_proj.weight", gate.clone()
                    yield f"{expert_prefix}.up_proj.weight", up.clone()
    yield f"{mtp}.embed_tokens.weight", model.model.embed_tokens.weight.detach().bfloat16()
    yield f"{mtp}.shared_head.head.weight", model.lm_head.weight.detach().bfloat16()


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "ep_size": 1,
        "first_k_dense_replace": shape.first_k_dense_replace,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "max_position_embeddings": shape.max_position_embeddings,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "n_group": shape.n_group,
        "n_routed_experts": shape.n_routed_experts,
        "n_shared_experts": shape.n_shared_experts,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "routed_scaling_factor": shape.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": shape.topk_group,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size,
    }


def _generation_config() -> dict[str, object]:
    return {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD, "do_sample": False}


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BEGIN],
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": SPECIAL_TOKENS[SYSTEM:],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
