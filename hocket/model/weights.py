"""From a checkpoint folder to a `Transformer`: reads, converts, fuses and lays out the weights.

Matrices that take the same input become one (query and key-value down-projections, gate and up),
experts are stacked, the latent's up-projection is split into its key and value part, and rotary
rows are sorted from neighbouring pairs into halves. `Transformer` never sees Hugging Face's
layout.

Shape letters: H heads, D no-position head size, R rotary head size, V value size, L latent width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hocket.errors import CheckpointError
from hocket.model import checkpoint_tensors as names
from hocket.model.checkpoint_files import Checkpoint
from hocket.model.decoder_layer import DecoderLayer
from hocket.model.layers import GatedMLP, RMSNorm
from hocket.model.mla import MLA, MLAWeights
from hocket.model.model_config import ModelConfig
from hocket.model.moe import Expert, Experts, ExpertTables, MoE, Router
from hocket.model.mtp import MTPModule, MTPParts
from hocket.model.numerics import Head, Numerics, Weight, numerics_for
from hocket.model.transformer import Transformer, TransformerParts
from hocket.parallel.expert_dispatch import LocalDispatcher, TokenDispatcher

_LOW_RANK_NORM_EPS = 1e-6
"""The norms inside MLA keep this whatever `rms_norm_eps` says, as the reference model does."""
_DTYPES = (torch.float32, torch.bfloat16)


def load_model(
    path: Path | str,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    batch_invariant: bool = False,
    dispatcher: TokenDispatcher | None = None,
) -> Transformer:
    """Load a checkpoint folder. `dtype` None keeps the checkpoint's own. Of the routed experts only
    those that the dispatcher has here are read; without one all are.

    Raises CheckpointError naming what is missing, unexpected or unsupported."""
    config = ModelConfig.from_checkpoint(path)
    dtype = config.dtype if dtype is None else dtype
    torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if torch_dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype} is not supported; use float32 or bfloat16.")
    checkpoint = Checkpoint(path)
    checkpoint.check(names.expected_tensors(config), "DeepseekV3ForCausalLM")
    loader = _Loader(
        config,
        checkpoint,
        torch_dtype,
        torch.device(device),
        numerics_for(batch_invariant, torch_dtype, torch.device(device)),
        dispatcher or LocalDispatcher(),
    )
    with torch.inference_mode():
        return loader.transformer()


def weights_digest(path: Path | str) -> str:
    """A stable name of a checkpoint's config and weights; see `Checkpoint.digest`."""
    ModelConfig.from_checkpoint(path)
    config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    return Checkpoint(path).digest(config)


@dataclass(frozen=True)
class _Loader:
    config: ModelConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    numerics: Numerics
    dispatcher: TokenDispatcher

    def transformer(self) -> Transformer:
        config = self.config
        embedding = self.read(names.EMBEDDING)
        head = embedding if config.tie_word_embeddings else self.read(names.LM_HEAD)
        packed_head = self.numerics.pack_head(head)
        parts = TransformerParts(
            embedding=embedding,
            layers=[self.decoder_layer(layer) for layer in range(config.num_layers)],
            final_norm=self.norm(names.FINAL_NORM),
            head=packed_head,
            mtp=tuple(
                self.mtp(config.num_layers + module, embedding, head, packed_head)
                for module in range(config.num_mtp_layers)
            ),
        )
        return Transformer(config, parts, self.numerics)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.checkpoint.read(name)
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def norm(self, name: str, eps: float | None = None) -> RMSNorm:
        return RMSNorm(self.read(name), self.config.rms_norm_eps if eps is None else eps)

    def decoder_layer(self, layer: int) -> DecoderLayer:
        prefix = names.layer_prefix(layer)
        is_moe = self.config.is_moe_layer(layer)
        return DecoderLayer(
            layer,
            attention_norm=self.norm(f"{prefix}input_layernorm.weight"),
            attention=self.mla(f"{prefix}self_attn."),
            mlp_norm=self.norm(f"{prefix}post_attention_layernorm.weight"),
            mlp=self.moe(f"{prefix}mlp.") if is_moe else self.mlp(f"{prefix}mlp."),
        )

    def mlp(self, prefix: str) -> GatedMLP:
        gate_up, down = self.gated_pair(prefix)
        return GatedMLP(self.pack(gate_up), self.pack(down), self.numerics)

    def gated_pair(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up as one matrix, and down."""
        gate = self.read(f"{prefix}gate_proj.weight")
        up = self.read(f"{prefix}up_proj.weight")
        return torch.cat([gate, up]), self.read(f"{prefix}down_proj.weight")

    def pack(self, weight: torch.Tensor) -> Weight:
        return self.numerics.pack(weight)

    def moe(self, prefix: str) -> MoE:
        config = self.config
        here = self.dispatcher.experts_here(config.num_experts)
        matrices = [self.gated_pair(f"{prefix}experts.{expert}.") for expert in here]
        pack = partial(self.numerics.pack, with_table=False)
        experts = [Expert(pack(gate_up), pack(down)) for gate_up, down in matrices]
        router = Router(
            config,
            self.pack(self.read(f"{prefix}gate.weight", torch.float32)),
            self.read(f"{prefix}gate.e_score_correction_bias", torch.float32),
            self.numerics,
        )
        shared = self.mlp(f"{prefix}shared_experts.") if config.num_shared_experts else None
        tables = self.expert_tables(matrices, prefix) if self.wants_tables(*matrices[0]) else None
        experts = Experts(dict(zip(here, experts, strict=True)), self.numerics)
        return MoE(router, experts, shared, self.dispatcher, self.numerics, tables)

    def wants_tables(self, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
        is_here = isinstance(self.dispatcher, LocalDispatcher)
        return is_here and self.numerics.can_tabulate(gate_up) and self.numerics.can_tabulate(down)

    def expert_tables(
        self, experts: list[tuple[torch.Tensor, torch.Tensor]], prefix: str
    ) -> ExpertTables:
        """The routed experts' matrices and those of the shared ones, cut to the same width."""
        config = self.config
        if config.num_shared_experts:
            gate_up, down = self.gated_pair(f"{prefix}shared_experts.")
            gates, ups = (half.chunk(config.num_shared_experts) for half in gate_up.chunk(2))
            downs = down.chunk(config.num_shared_experts, dim=1)
            pairs = zip(gates, ups, downs, strict=True)
            experts = experts + [(torch.cat([gate, up]), down) for gate, up, down in pairs]
        return ExpertTables(
            experts, config.num_shared_experts, config.experts_per_token, self.numerics
        )

    def mla(self, prefix: str) -> MLA:
        config = self.config
        heads, nope, rope = config.num_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        kv_down = self.read(f"{prefix}kv_a_proj_with_mqa.weight")
        latent_rows, key_rope_rows = kv_down.split([config.kv_lora_rank, rope])
        key_rope_rows = self.halves(key_rope_rows[None])[0]
        query_name = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        query = self.read(f"{prefix}{query_name}.weight").unflatten(0, (heads, nope + rope))
        query_nope, query_rope = query.split([nope, rope], dim=1)
        query = torch.cat([query_nope.flatten(0, 1), self.halves(query_rope).flatten(0, 1)])
        query_norm = None
        first = query
        if config.q_lora_rank is not None:
            first = self.read(f"{prefix}q_a_proj.weight")
            query_norm = self.norm(f"{prefix}q_a_layernorm.weight", _LOW_RANK_NORM_EPS)
        kv_up = self.read(f"{prefix}kv_b_proj.weight").unflatten(0, (heads, -1))
        key_up_HDL, value_up_HVL = kv_up.split([nope, config.v_head_dim], dim=1)
        key_up_HLD = key_up_HDL.transpose(1, 2)
        weights = MLAWeights(
            down=self.pack(torch.cat([first, key_rope_rows, latent_rows])),
            latent_norm=self.norm(f"{prefix}kv_a_layernorm.weight", _LOW_RANK_NORM_EPS),
            key_up=self.numerics.pack_heads(key_up_HLD),
            value_up=self.numerics.pack_heads(value_up_HVL),
            output=self.pack(self.read(f"{prefix}o_proj.weight")),
            query_norm=query_norm,
            query_up=None if query_norm is None else self.pack(query),
        )
        return MLA(config, weights, self.numerics)

    def halves(self, rows_HRX: torch.Tensor) -> torch.Tensor:
        """Rotary rows with each pair's first elements before the second ones."""
        if not self.config.rope_interleaved:
            return rows_HRX
        return torch.cat([rows_HRX[:, 0::2], rows_HRX[:, 1::2]], dim=1)

    def mtp(
        self,
        layer: int,
        embedding: torch.Tensor,
        head: torch.Tensor,
        packed_head: Head,
    ) -> MTPModule:
        """`packed_head` is the main model's, to be shared unless the module's own differs."""
        prefix = names.layer_prefix(layer)
        own_head = self.own_or_shared(f"{prefix}shared_head.head.weight", head)
        parts = MTPParts(
            embedding_norm=self.norm(f"{prefix}enorm.weight"),
            hidden_norm=self.norm(f"{prefix}hnorm.weight"),
            projection=self.pack(self.read(f"{prefix}eh_proj.weight")),
            layer=self.decoder_layer(layer),
            output_norm=self.norm(f"{prefix}shared_head.norm.weight"),
            embedding=self.own_or_shared(f"{prefix}embed_tokens.weight", embedding),
            head=packed_head if own_head is head else self.numerics.pack_head(own_head),
        )
        return MTPModule(parts, self.numerics)

    def own_or_shared(self, name: str, shared: torch.Tensor) -> torch.Tensor:
        """The module's own matrix, or the main model's where it is absent or equal."""
        if name not in self.checkpoint:
            return shared
        own = self.read(name)
        return shared if torch.equal(own, shared) else own
