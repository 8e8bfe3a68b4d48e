"""One decoder layer: norm, attention, norm, MLP or MoE, each added to the residual stream.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

import torch

from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan
from hocket.model.layers import GatedMLP, RMSNorm, Rotation
from hocket.model.mla import MLA
from hocket.model.moe import MoE


class DecoderLayer:
    """A layer that knows its number, which is its place in the cache."""

    def __init__(
        self,
        layer: int,
        attention_norm: RMSNorm,
        attention: MLA,
        mlp_norm: RMSNorm,
        mlp: GatedMLP | MoE,
    ) -> None:
        self._layer = layer
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x_TH: torch.Tensor, rotation: Rotation, plan: AttentionPlan, cache: PagedCache
    ) -> torch.Tensor:
        """The residual stream after this layer, of the plan's `query_rows` where it names some;
        else `x_TH` is updated in place."""
        normed = self.attention_norm(x_TH)
        attended = self.attention(normed, rotation, plan, cache, self._layer)
        if plan.query_rows is not None:
            x_TH = x_TH[plan.query_rows]
        x_TH += attended
        normed = self.mlp_norm(x_TH)
        if isinstance(self.mlp, MoE):
            x_TH += self.mlp(normed, plan.num_tokens)
        else:
            x_TH += self.mlp(normed)
        return x_TH
