"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent a token.

Expanded, the latent is multiplied up to keys and values of every head. Absorbed, the up-projection
of keys moves to the query and that of values to the result, so that all heads attend the latent
itself. Both compute the same; `attention` says which form a token takes in a step.

Shape letters: T tokens, C hidden size, H heads, D no-position head size, R rotary head size,
V value head size, L latent width, W = L + R entry width, M context slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan, ExpandedSequence
from hocket.model.layers import RMSNorm, Rotation
from hocket.model.model_config import ModelConfig
from hocket.model.numerics import HeadWeights, Numerics, Weight


@dataclass(frozen=True)
class MLAWeights:
    """Projections of one layer, laid out by `weights.read_mla`.

    `down` is one matrix for everything made from the hidden state: the query (or its latent,
    where `query_up` is set), the rotary key, the latent. Query rows are all heads' no-position
    parts, then all heads' rotary parts; rotary rows are halves, not neighbouring pairs.
    """

    down: Weight
    latent_norm: RMSNorm
    key_up: HeadWeights
    """Per head [D, L]: moves a query into the latent space."""
    value_up: HeadWeights
    """Per head [L, V]: moves weighted latents out of it."""
    output: Weight
    query_norm: RMSNorm | None = None
    query_up: Weight | None = None


class MLA:
    """One attention layer over the paged cache."""

    def __init__(self, config: ModelConfig, weights: MLAWeights, numerics: Numerics) -> None:
        self._config = config
        self._numerics = numerics
        self.down = weights.down
        self.latent_norm = weights.latent_norm
        self.query_norm = weights.query_norm
        self.query_up = weights.query_up
        self.key_up = weights.key_up
        self.value_up = weights.value_up
        self.output = weights.output
        heads = config.num_heads
        self._nope_width = heads * config.qk_nope_head_dim
        self._rope_width = heads * config.qk_rope_head_dim
        self._scale = config.softmax_scale

    def __call__(
        self,
        x_TC: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: PagedCache,
        layer: int,
    ) -> torch.Tensor:
        """Write the tokens' entries, attend, project back to [T, C].

        Rows beyond the plan's tokens are padding: they write and attend nothing. Where the plan
        names `query_rows`, only these attend and come back."""
        query_THD, query_THR, entries_TW = self._project(x_TC, rotation)
        num_written = plan.write_rows.shape[0]
        cache.layer_rows(layer).index_copy_(0, plan.write_rows, entries_TW[:num_written])
        if plan.query_rows is not None:
            query_THD, query_THR = query_THD[plan.query_rows], query_THR[plan.query_rows]
        entries_BNW = cache.layer_view(layer)
        if not plan.expanded:
            result_THV = self._attend_latent(query_THD, query_THR, plan, entries_BNW)
        else:
            num_rows, config = query_THD.shape[0], self._config
            result_THV = x_TC.new_empty(num_rows, config.num_heads, config.v_head_dim)
            if plan.latent_rows is not None:
                rows = plan.latent_rows
                result_THV[rows] = self._attend_latent(
                    query_THD[rows], query_THR[rows], plan, entries_BNW
                )
            for part in plan.expanded:
                query = torch.cat([query_THD[part.rows], query_THR[part.rows]], -1)
                result_THV[part.rows] = self._attend_expanded(query, part, entries_BNW)
        return self._numerics.linear(result_THV.flatten(1), self.output)

    def _project(
        self, x_TC: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query without position, rotated query, cache entries."""
        config, heads = self._config, self._config.num_heads
        rope, latent_width = config.qk_rope_head_dim, config.kv_lora_rank
        down = self._numerics.linear(x_TC, self.down)
        if self.query_up is None or self.query_norm is None:
            query, turning, latent = down.split_with_sizes(
                [self._nope_width, self._rope_width + rope, latent_width], -1
            )
        else:
            query_latent, key_rope, latent = down.split_with_sizes(
                [down.shape[-1] - rope - latent_width, rope, latent_width], -1
            )
            query = self._numerics.linear(self.query_norm(query_latent), self.query_up)
            query, query_rope = query.split_with_sizes([self._nope_width, self._rope_width], -1)
            turning = torch.cat([query_rope, key_rope], -1)
        num_rows = x_TC.shape[0]
        turned = rotation.apply(turning.view(num_rows, heads + 1, rope))
        entries_TW = torch.cat([self.latent_norm(latent), turned[:, heads]], -1)
        return query.view(num_rows, heads, -1), turned[:, :heads], entries_TW

    def _attend_latent(
        self,
        query_THD: torch.Tensor,
        query_THR: torch.Tensor,
        plan: AttentionPlan,
        entries_BNW: torch.Tensor,
    ) -> torch.Tensor:
        assert plan.latent is not None
        absorbed = self._numerics.per_head(query_THD, self.key_up)
        query_THW = torch.cat([absorbed, query_THR.to(absorbed.dtype)], -1)
        width = self._config.kv_lora_rank
        latent_THL = plan.latent.attend(query_THW, entries_BNW, width, self._scale)
        return self._numerics.per_head(latent_THL, self.value_up).to(query_THD.dtype)

    def _attend_expanded(
        self, query_QHE: torch.Tensor, part: ExpandedSequence, entries_BNW: torch.Tensor
    ) -> torch.Tensor:
        """`query_QHE`: no-position and rotary part side by side, E = D + R."""
        config = self._config
        context_MW = part.context(entries_BNW)
        latent_ML = context_MW[:, : config.kv_lora_rank]
        key_rope = context_MW[:, None, config.kv_lora_rank :].expand(-1, config.num_heads, -1)
        dtype = latent_ML.dtype
        key_up_HDL, value_up_HLV = self.key_up.weight_HDE, self.value_up.weight_HDE
        keys = self._numerics.linear(latent_ML, key_up_HDL.flatten(0, 1).to(dtype))
        value_up_HVL = value_up_HLV.transpose(1, 2)
        values = self._numerics.linear(latent_ML, value_up_HVL.flatten(0, 1).to(dtype))
        key_MHD = keys.unflatten(-1, (config.num_heads, -1))
        value_MHV = values.unflatten(-1, (config.num_heads, -1))
        key_MHE = torch.cat([key_MHD, key_rope], -1)
        return part.attend(query_QHE, key_MHE, value_MHV, self._scale)
