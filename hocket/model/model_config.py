"""What a checkpoint's `config.json` says, checked and renamed to this project's words. No torch.

The loader, the KV layout and the model are built from a `ModelConfig`; nothing else reads
`config.json`. Values that the engine cannot compute are refused here, by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hocket.errors import CheckpointError
from hocket.kv.layout import KVLayout

BLOCK_TOKENS = 64
_ARCHITECTURE = "DeepseekV3ForCausalLM"
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN stretching of the rotary frequencies (arXiv 2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def rotation_scale(self) -> float:
        """What cos and sin are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def softmax_scale(self) -> float:
        """What the attention scores are multiplied with, beside 1/sqrt(head dim)."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _mscale(self, weight: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A DeepSeek-V3 family model. Sizes in elements, counts in layers, heads or experts.

    `rope_interleaved`: the checkpoint lays rotary dimensions out as neighbouring pairs.
    `dtype` is the one the checkpoint was saved in.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    experts_per_token: int
    q_lora_rank: int | None = None
    num_shared_experts: int = 1
    num_expert_groups: int = 1
    expert_groups_per_token: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_dense_layers: int = 0
    num_mtp_layers: int = 0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleaved: bool = True
    yarn: YarnConfig | None = None
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def entry_width(self) -> int:
        """Elements cached per token and layer: the latent and the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on query-key products."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale * (self.yarn.softmax_scale if self.yarn else 1.0)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has experts; MTP layers (from `num_layers` on) always have."""
        return layer >= self.num_layers or layer >= self.num_dense_layers

    def kv_layout(self, dtype: str | None = None, block_tokens: int = BLOCK_TOKENS) -> KVLayout:
        """The cache layout of this model; MTP layers come last. `dtype` None: the checkpoint's."""
        return KVLayout(
            block_tokens=block_tokens,
            num_layers=self.num_layers + self.num_mtp_layers,
            entry_width=self.entry_width,
            dtype=dtype or self.dtype,
        )

    @staticmethod
    def from_checkpoint(path: Path | str) -> ModelConfig:
        """Read `config.json` (and the end tokens of `generation_config.json`) in a folder.

        Raises CheckpointError naming the file, or the architecture, key and value at fault."""
        folder = Path(path)
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        end_tokens = _read_json(generation).get("eos_token_id") if generation.exists() else None
        if end_tokens is not None:
            raw["eos_token_id"] = end_tokens
        return ModelConfig.from_hf(raw)

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a Hugging Face `config.json`. Raises CheckpointError."""
        return _Reader(raw).model_config()

    def to_hf(self) -> dict[str, Any]:
        """The contents of a `config.json` that `from_hf` and transformers read back."""
        rope: dict[str, Any] | None = None
        if self.yarn:
            rope = {"type": "yarn", "rope_type": "yarn"}
            for name in YarnConfig.__dataclass_fields__:
                value = getattr(self.yarn, name)
                if value is not None and not (name.startswith("mscale") and not value):
                    rope[name] = value
        raw: dict[str, Any] = {key: getattr(self, name) for key, name in _HF_NAMES.items()}
        end_tokens = list(self.eos_token_ids)
        return raw | {
            "architectures": [_ARCHITECTURE],
            "model_type": "deepseek_v3",
            "num_key_value_heads": self.num_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_scaling": rope,
            "torch_dtype": self.dtype,
            "eos_token_id": end_tokens[0] if len(end_tokens) == 1 else end_tokens or None,
        }


_HF_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "intermediate_size": "intermediate_size",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_groups",
    "topk_group": "expert_groups_per_token",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "first_k_dense_replace": "num_dense_layers",
    "num_nextn_predict_layers": "num_mtp_layers",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_interleave": "rope_interleaved",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "bos_token_id": "bos_token_id",
}


class _Reader:
    """Reads one `config.json`; every complaint names the architecture, the key and the value."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        architectures = cast("list[str]", raw.get("architectures") or [])
        self._name = architectures[0] if architectures else str(raw.get("model_type"))

    def model_config(self) -> ModelConfig:
        self._check_supported()
        rope = cast("Mapping[str, Any]", self._raw.get("rope_parameters") or {})
        scaling = cast("Mapping[str, Any]", self._raw.get("rope_scaling") or rope)
        config = ModelConfig(
            vocab_size=self._count("vocab_size"),
            hidden_size=self._count("hidden_size"),
            num_layers=self._count("num_hidden_layers"),
            num_heads=self._count("num_attention_heads"),
            kv_lora_rank=self._count("kv_lora_rank"),
            q_lora_rank=self._count("q_lora_rank") if self._raw.get("q_lora_rank") else None,
            qk_nope_head_dim=self._count("qk_nope_head_dim"),
            qk_rope_head_dim=self._count("qk_rope_head_dim"),
            v_head_dim=self._count("v_head_dim"),
            intermediate_size=self._count("intermediate_size"),
            moe_intermediate_size=self._count("moe_intermediate_size"),
            num_experts=self._count("n_routed_experts"),
            experts_per_token=self._count("num_experts_per_tok"),
            num_shared_experts=int(self._raw.get("n_shared_experts") or 0),
            num_expert_groups=int(self._raw.get("n_group") or 1),
            expert_groups_per_token=int(self._raw.get("topk_group") or 1),
            norm_topk_prob=bool(self._raw.get("norm_topk_prob", True)),
            routed_scaling_factor=float(self._raw.get("routed_scaling_factor", 1.0)),
            num_dense_layers=int(self._raw.get("first_k_dense_replace") or 0),
            num_mtp_layers=self._count("num_nextn_predict_layers", least=0),
            rms_norm_eps=float(self._raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or self._raw.get("rope_theta", 10000.0)),
            rope_interleaved=bool(self._raw.get("rope_interleave", True)),
            yarn=self._yarn(scaling),
            max_position_embeddings=int(self._raw.get("max_position_embeddings", 4096)),
            tie_word_embeddings=bool(self._raw.get("tie_word_embeddings", False)),
            dtype=self._dtype(),
            bos_token_id=self._raw.get("bos_token_id"),
            eos_token_ids=self._end_tokens(),
        )
        self._check_sizes(config)
        return config

    def _refuse(self, key: str, value: object, supported: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: config.json has {key} = {value!r}; supported: {supported}.",
            architecture=self._name,
            key=key,
            value=value,
        )

    def _count(self, key: str, least: int = 1) -> int:
        value = self._raw.get(key)
        if value is None and least == 0:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._refuse(key, value, f"a whole number, at least {least}")
        return value

    def _check_supported(self) -> None:
        if self._raw.get("model_type") != "deepseek_v3" or self._name not in (
            _ARCHITECTURE,
            "deepseek_v3",
        ):
            raise CheckpointError(
                f"Architecture {self._name!r} (model_type {self._raw.get('model_type')!r}) is not "
                f"supported; supported: {_ARCHITECTURE} (model_type 'deepseek_v3').",
                architecture=self._name,
                key="model_type",
                value=self._raw.get("model_type"),
            )
        if self._raw.get("quantization_config"):
            method = self._raw["quantization_config"].get("quant_method")
            raise self._refuse(
                "quantization_config.quant_method",
                method,
                "none; quantised checkpoints are not supported yet, convert to bfloat16",
            )
        fixed = {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
            "tensor_parallel_size": (1,),
            "context_parallel_size": (1,),
        }
        for key, values in fixed.items():
            value = self._raw.get(key)
            if value is not None and value not in values:
                raise self._refuse(key, value, " or ".join(repr(v) for v in values))
        heads = self._raw.get("num_key_value_heads")
        if heads is not None and heads != self._raw.get("num_attention_heads"):
            raise self._refuse("num_key_value_heads", heads, "equal to num_attention_heads")

    def _check_sizes(self, config: ModelConfig) -> None:
        groups, chosen = config.num_expert_groups, config.expert_groups_per_token
        if config.num_experts % groups or config.num_experts // groups < 2:
            raise self._refuse(
                "n_group",
                groups,
                f"a divisor of n_routed_experts {config.num_experts}, with at "
                "least two experts to a group",
            )
        if chosen > groups:
            raise self._refuse("topk_group", chosen, f"at most n_group = {groups}")
        candidates = config.num_experts // groups * chosen
        if config.experts_per_token > candidates:
            raise self._refuse(
                "num_experts_per_tok", config.experts_per_token, f"at most {candidates}"
            )
        if config.qk_rope_head_dim % 2:
            raise self._refuse("qk_rope_head_dim", config.qk_rope_head_dim, "an even number")

    def _yarn(self, scaling: Mapping[str, Any]) -> YarnConfig | None:
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return None
        if kind != "yarn":
            raise self._refuse("rope_scaling.type", kind, "'default' or 'yarn'")
        longest = int(self._raw.get("max_position_embeddings", 4096))
        original = int(scaling.get("original_max_position_embeddings") or longest)
        return YarnConfig(
            factor=float(scaling.get("factor") or longest / original),
            original_max_position_embeddings=original,
            beta_fast=float(scaling.get("beta_fast") or 32),
            beta_slow=float(scaling.get("beta_slow") or 1),
            mscale=float(scaling.get("mscale") or 0),
            mscale_all_dim=float(scaling.get("mscale_all_dim") or 0),
            attention_factor=scaling.get("attention_factor"),
            truncate=bool(scaling.get("truncate", True)),
        )

    def _dtype(self) -> str:
        value = self._raw.get("dtype") or self._raw.get("torch_dtype") or "bfloat16"
        if value == "float16":
            raise self._refuse("torch_dtype", value, " or ".join(_DTYPES))
        return value if value in _DTYPES else "bfloat16"

    def _end_tokens(self) -> tuple[int, ...]:
        value = self._raw.get("eos_token_id")
        if value is None:
            return ()
        return (value,) if isinstance(value, int) else tuple(cast("list[int]", value))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"No file {path}; a checkpoint needs it.", path=path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.", path=path) from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise CheckpointError(f"{path} holds a JSON {found}; it must hold an object.", path=path)
    return cast("dict[str, Any]", content)
