"""Which tensors a checkpoint of a given `ModelConfig` holds, with their shapes. No torch.

The loader checks a checkpoint against this list before it reads anything; `random_checkpoint`
writes exactly this list. Names are Hugging Face's.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.model.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its shape, and whether a checkpoint may lack it."""

    shape: tuple[int, ...]
    is_optional: bool = False


def layer_prefix(layer: int) -> str:
    """`model.layers.<layer>.`; MTP layers follow the main ones."""
    return f"model.layers.{layer}."


def expected_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name → shape of every tensor the model is built from, in checkpoint order."""
    vocab = (config.vocab_size, config.hidden_size)
    tensors = {EMBEDDING: TensorSpec(vocab)}
    for layer in range(config.num_layers + config.num_mtp_layers):
        tensors |= _layer_tensors(config, layer)
    for layer in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        tensors |= _mtp_tensors(config, layer)
    tensors[FINAL_NORM] = TensorSpec((config.hidden_size,))
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = TensorSpec(vocab)
    return tensors


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"self_attn.{name}.weight": s for name, s in _attention_shapes(config).items()}
    if config.is_moe_layer(layer):
        shapes |= {f"mlp.{name}": s for name, s in _moe_shapes(config).items()}
    else:
        shapes |= _mlp_shapes("mlp.", hidden, config.intermediate_size)
    return {layer_prefix(layer) + name: TensorSpec(shape) for name, shape in shapes.items()}


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_heads
    q_width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    kv_width = heads * (config.qk_nope_head_dim + config.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_a_layernorm": (config.kv_lora_rank,),
        "kv_b_proj": (kv_width, config.kv_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {"q_proj": (q_width, hidden)}
    return shapes | {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_a_layernorm": (config.q_lora_rank,),
        "q_b_proj": (q_width, config.q_lora_rank),
    }


def _moe_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (config.num_experts, hidden),
        "gate.e_score_correction_bias": (config.num_experts,),
    }
    for expert in range(config.num_experts):
        shapes |= _mlp_shapes(f"experts.{expert}.", hidden, width)
    if config.num_shared_experts:
        shapes |= _mlp_shapes("shared_experts.", hidden, width * config.num_shared_experts)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


def _mtp_tensors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    hidden, prefix = config.hidden_size, layer_prefix(layer)
    vocab = TensorSpec((config.vocab_size, hidden), is_optional=True)
    return {
        f"{prefix}enorm.weight": TensorSpec((hidden,)),
        f"{prefix}hnorm.weight": TensorSpec((hidden,)),
        f"{prefix}eh_proj.weight": TensorSpec((hidden, 2 * hidden)),
        f"{prefix}shared_head.norm.weight": TensorSpec((hidden,)),
        f"{prefix}embed_tokens.weight": vocab,
        f"{prefix}shared_head.head.weight": vocab,
    }
