"""A multi-token prediction module: one more decoder layer that guesses a token further ahead.

For position i module j, counted from 1, takes the hidden state h_i that module j - 1 made (the
first one: the main model's) and the token t_{i+j}, and predicts t_{i+j+1}. Its cache entry lives
in slot i+j, so that a block depends only on the tokens it covers. Drafts that go further than
there are modules re-use the last one on its own result z. See arXiv 2412.19437, section 2.2.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan
from hocket.model.decoder_layer import DecoderLayer
from hocket.model.layers import RMSNorm, Rotation
from hocket.model.numerics import Head, Numerics, Weight


@dataclass(frozen=True)
class MTPParts:
    """What `weights` reads for the module. `embedding` and `head` may be the main model's."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Weight
    layer: DecoderLayer
    output_norm: RMSNorm
    embedding: torch.Tensor
    head: Head


class MTPModule:
    """z = norm(layer(eh_proj([enorm(embedding), hnorm(hidden)])))."""

    def __init__(self, parts: MTPParts, numerics: Numerics) -> None:
        self.embedding_norm = parts.embedding_norm
        self.hidden_norm = parts.hidden_norm
        self.projection = parts.projection
        self.layer = parts.layer
        self.output_norm = parts.output_norm
        self.embedding = parts.embedding
        self.head = parts.head
        self._numerics = numerics

    def __call__(
        self,
        token_ids_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: PagedCache,
    ) -> torch.Tensor:
        """z [T, H]. `token_ids_T[j]` follows the token whose hidden state is `hidden_TH[j]`."""
        embedded = self.embedding_norm(F.embedding(token_ids_T, self.embedding))
        joined = torch.cat([embedded, self.hidden_norm(hidden_TH)], -1)
        x_TH = self._numerics.linear(joined, self.projection)
        return self.output_norm(self.layer(x_TH, rotation, plan, cache))
