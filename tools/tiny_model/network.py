"""The training form of `hocket-tiny`: DeepSeek-V3 with one MTP module, by its inference equations.

Parameters carry the names of Hugging Face DeepSeek-V3 checkpoints, except that the experts of a
layer are stacked; `export` unstacks them. Rotary dimensions are interleaved pairs, as in those
checkpoints.

Letters in names: B sequences, T query tokens, S key tokens, H hidden, D head dimension, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .corpus import BEGIN, VOCAB_SIZE
from .kernels import routed_experts


@dataclass(frozen=True)
class Shape:
    """Sizes of the network, under the names of config.json where there is one."""

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 192
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 1.5
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 48
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


# Called with q [B, heads, T, D] and this call's k and v; returns all the k and v and the additive
# mask to attend with. This is where a KV cache or a chain of MTP passes comes in.
AttendOver = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        heads = s.num_attention_heads
        self.q_a_proj = _linear(s.hidden_size, s.q_lora_rank)
        self.q_a_layernorm = RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = _linear(s.q_lora_rank, heads * s.qk_head_dim)
        self.kv_a_proj_with_mqa = _linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = _linear(s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim))
        self.o_proj = _linear(heads * s.v_head_dim, s.hidden_size)

    def forward(self, x: Tensor, rotary: Tensor, attend_over: AttendOver) -> Tensor:
        """`x` [B, T, H]; `rotary` complex [T, rope / 2] or [B, T, rope / 2]."""
        s = self.shape
        batch, length, _ = x.shape
        heads = s.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, heads, -1)
        q_nope, q_rope = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [s.kv_lora_rank, s.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1)
        k_nope, v = kv.split([s.qk_nope_head_dim, s.v_head_dim], dim=-1)
        q_rope = _rotate(q_rope, rotary.unsqueeze(-2))
        k_rope = _rotate(k_rope.unsqueeze(2), rotary.unsqueeze(-2)).expand(-1, -1, heads, -1)
        q = torch.cat([q_nope, q_rope], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, k_rope], dim=-1).transpose(1, 2)
        k, v, mask = attend_over(k, v.transpose(1, 2))
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=1 / math.sqrt(s.qk_head_dim)
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden, width)
        self.up_proj = _linear(hidden, width)
        self.down_proj = _linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores, group-limited choice by biased scores, weights from unbiased ones."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.register_buffer("load", torch.zeros(shape.n_routed_experts), persistent=False)

    def forward(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, K] and experts [N, K] of each row."""
        s = self.shape
        scores = functional.linear(x_NH, self.weight).sigmoid()
        with torch.no_grad():
            choice = (scores + self.e_score_correction_bias).view(len(x_NH), s.n_group, -1)
            group_scores = choice.topk(2, dim=-1).values.sum(-1)
            groups = group_scores.topk(s.topk_group, dim=-1).indices
            closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
            choice = choice.masked_fill(closed.unsqueeze(-1), -math.inf).flatten(1)
            experts = choice.topk(s.num_experts_per_tok, dim=-1).indices
            if self.training:
                self.load += torch.bincount(experts.flatten(), minlength=s.n_routed_experts)
        weights = scores.gather(1, experts)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * s.routed_scaling_factor
        return weights, experts

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """DeepSeek-V3's loss-free balancing: move every bias one step towards equal load."""
        self.e_score_correction_bias += step * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, hidden, width = (
            shape.n_routed_experts,
            shape.hidden_size,
            shape.moe_intermediate_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))


class MoE(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Router(shape)
        self.experts = Experts(shape)
        self.shared_experts = DenseMLP(
            shape.hidden_size, shape.moe_intermediate_size * shape.n_shared_experts
        )

    def forward(self, x: Tensor) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(x_NH)
        routed = routed_experts(
            x_NH, weights, chosen, self.experts.gate_up_proj, self.experts.down_proj
        )
        return (routed + self.shared_experts(x_NH)).view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = DenseMLP(shape.hidden_size, shape.intermediate_size) if dense else MoE(shape)

    def forward(self, x: Tensor, rotary: Tensor, attend_over: AttendOver) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend_over)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharedHead(nn.Module):
    """The norm of the MTP module; its head is the main model's and is not stored again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class MTPModule(DecoderLayer):
    """Joins the hidden state of a position with the embedding of the token after it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, dense=False)
        self.enorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = _linear(2 * shape.hidden_size, shape.hidden_size)
        self.shared_head = SharedHead(shape)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))


class Decoder(nn.Module):
    """`layers[num_hidden_layers]` is the MTP module, as in the checkpoints."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(shape, dense=index < shape.first_k_dense_replace)
                for index in range(shape.num_hidden_layers)
            ]
            + [MTPModule(shape)]
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class TinyModel(nn.Module):
    """The whole network. Token ids in; hidden states out, since losses and drafts start there."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = _linear(shape.hidden_size, shape.vocab_size)
        exponent = torch.arange(0, shape.qk_rope_head_dim, 2) / shape.qk_rope_head_dim
        self.register_buffer("frequencies", shape.rope_theta**-exponent, persistent=False)
        self._initialise()

    @property
    def mtp(self) -> MTPModule:
        return self.model.layers[self.shape.num_hidden_layers]  # type: ignore[return-value]

    def rotary(self, positions: Tensor) -> Tensor:
        """Complex unit numbers [..., rope / 2] that rotate the pairs of a position."""
        angles = positions.unsqueeze(-1) * self.frequencies
        return torch.polar(torch.ones_like(angles), angles)

    def hidden_states(self, ids_BT: Tensor, mask: Tensor) -> Tensor:
        """Post-final-norm hidden states [B, T, H]; `mask` is `document_mask(ids)`."""
        rotary = self.rotary(torch.arange(ids_BT.shape[1]))
        x = self.model.embed_tokens(ids_BT)
        for layer in self.model.layers[: self.shape.num_hidden_layers]:
            x = layer(x, rotary, lambda k, v: (k, v, mask))
        return self.model.norm(x)

    def mtp_pass(
        self, hidden: Tensor, ids_BT: Tensor, mask: Tensor, chain: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """One pass of the MTP module for *every* chain start `i` at once.

        `hidden[:, i]` is h_i in the first pass and the previous pass's result afterwards;
        `ids[:, i]` is the token that comes after it. A chain of drafts that starts at `i` sees the
        first pass's keys up to `i` and, of later passes, only its own: just what a draft loop has
        in its KV cache. `chain` holds keys and values of earlier passes and is appended to.
        Returns z (post shared_head.norm) [B, T, H].
        """
        depth, length = len(chain), ids_BT.shape[1]
        rotary = self.rotary(torch.arange(length) + depth)
        own = torch.where(torch.eye(length, dtype=torch.bool), 0.0, -math.inf)
        own = own.expand(len(ids_BT), 1, length, length)
        full_mask = torch.cat([mask] + [own] * depth, dim=-1)

        def attend_over(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            chain.append((k, v))
            keys = torch.cat([k for k, _ in chain], dim=2)
            return keys, torch.cat([v for _, v in chain], dim=2), full_mask

        joined = self.mtp.join(self.model.embed_tokens(ids_BT), hidden)
        return self.mtp.shared_head.norm(self.mtp(joined, rotary, attend_over))

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if "embed_tokens" in name:
                nn.init.normal_(parameter, std=0.1)
            elif "lm_head" in name:
                nn.init.normal_(parameter, std=0.02)
            elif parameter.ndim > 1:
                scale = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(parameter.shape[-1]))


def document_ids(ids_BT: Tensor) -> Tensor:
    """Which document of its row each token belongs to, int64 [B, T]."""
    return (ids_BT == BEGIN).cumsum(1)


def document_mask(ids_BT: Tensor) -> Tensor:
    """Additive mask [B, 1, T, T]: a token sees itself and earlier tokens of its own document.

    Rotary attention depends on distances alone, so a document in the middle of a row is computed
    as if it stood at position 0.
    """
    documents = document_ids(ids_BT)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    visible = same & torch.ones_like(same[0]).tril()
    return torch.where(visible, 0.0, -math.inf).unsqueeze(1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotary).flatten(-2)
