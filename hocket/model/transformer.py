"""The model: embedding, decoder layers, final norm, head, and the MTP modules where there are any.

`weights.load_model` builds it from a checkpoint; `execution.model_runner` calls it once per step
with `StepInputs` and the cache. Nothing here keeps state between steps: the cache has it all.

Shape letters: T query tokens of a step, H hidden size, N rows of hidden states, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from hocket.kv.layout import KVLayout
from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan, plan_attention, write_rows
from hocket.model.attention_invariant import plan_invariant_attention
from hocket.model.decoder_layer import DecoderLayer
from hocket.model.layers import RMSNorm, RotaryTable, Rotation, pad_rows
from hocket.model.model_config import BLOCK_TOKENS, ModelConfig
from hocket.model.moe import MoE
from hocket.model.mtp import MTPModule
from hocket.model.numerics import Head, Numerics, numerics_revision
from hocket.model.packed_head import PackedHead
from hocket.model.step_inputs import StepInputs


@dataclass(frozen=True)
class TransformerParts:
    """What `weights` reads: embedding [V, H], layers, norm, head, MTP."""

    embedding: torch.Tensor
    layers: list[DecoderLayer]
    final_norm: RMSNorm
    head: Head
    mtp: tuple[MTPModule, ...]


class Transformer(nn.Module):
    """A DeepSeek-V3 family model. All methods run without autograd.

    The parts are plain objects that hold plain tensors: at batch 1 a step's time is its number
    of calls, and the machinery of modules and buffers is a good part of that."""

    def __init__(self, config: ModelConfig, parts: TransformerParts, numerics: Numerics) -> None:
        super().__init__()
        self.config = config
        self.embedding = parts.embedding
        self.layers = parts.layers
        self.final_norm = parts.final_norm
        self.head = parts.head
        self.mtp = parts.mtp
        self.rotary = RotaryTable(config, parts.embedding.device)
        self._numerics = numerics

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint came with MTP modules."""
        return bool(self.mtp)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and cache entries."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where weights, inputs and cache live."""
        return self.embedding.device

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token's results are bit-equal whatever its company."""
        return self._numerics.is_batch_invariant

    @property
    def numerics(self) -> str:
        """The arithmetic's name, part of the fingerprint."""
        return numerics_revision(self.is_batch_invariant, self.device)

    def kv_layout(self, block_tokens: int = BLOCK_TOKENS) -> KVLayout:
        """The layout of the cache that this model writes."""
        return self.config.kv_layout(str(self.dtype).removeprefix("torch."), block_tokens)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        """Hidden states after the final norm, [T, H]. Writes the tokens' entries, main layers."""
        rotation, plan = self._plan(inputs, cache, first_slot=0)
        token_ids = pad_rows(inputs.token_ids, self._numerics.row_tile)
        x_TH = F.embedding(token_ids, self.embedding)
        for layer in self.layers:
            x_TH = layer(x_TH, rotation, plan, cache)
        return self.final_norm(x_TH)[: inputs.num_tokens]

    @torch.inference_mode()
    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Next-token logits, fp32 [N, V]."""
        return self._head(hidden_NH, self.head)

    @torch.inference_mode()
    def mtp_forward(
        self,
        inputs: StepInputs,
        hidden_TH: torch.Tensor,
        cache: PagedCache,
        last_only: bool = False,
        module: int = 0,
    ) -> torch.Tensor:
        """One pass of an MTP module, z [T, H]; with `last_only` that of each sequence's last
        token, [S, H]: the others only write their entries.

        With n = `module` + 1, `inputs.token_ids[j]` is t_{i+n} and `inputs.positions[j]` is i+n,
        its slot, where `hidden_TH[j]` is h_i of the module before (or a recycled z). Slots n..i+n
        are attended; those before hold nothing.
        """
        first_slot = module + 1
        assert min(inputs.first_positions) >= first_slot, f"entries start at slot {first_slot}"
        last_only = last_only and max(inputs.query_lengths) > 1
        rotation, plan = self._plan(inputs, cache, first_slot, last_only)
        token_ids = pad_rows(inputs.token_ids, self._numerics.row_tile)
        hidden_TH = pad_rows(hidden_TH, self._numerics.row_tile)
        z_TH = self.mtp[module](token_ids, hidden_TH, rotation, plan, cache)
        return z_TH[: plan.num_tokens]

    @torch.inference_mode()
    def take_part(self, module: int | None) -> None:
        """This rank's share of a pass of its expert-parallel group in which it has no tokens: one
        of an MTP module, or, with None, a main pass."""
        layers = self.layers if module is None else [self.mtp[module].layer]
        nothing_0H = self.embedding.new_empty(0, self.config.hidden_size)
        for layer in layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.take_part(nothing_0H)

    @torch.inference_mode()
    def mtp_logits(self, z_NH: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Draft logits from the result of `mtp_forward` with the same module, fp32 [N, V]."""
        return self._head(z_NH, self.mtp[module].head)

    def _head(self, hidden_NH: torch.Tensor, head_VH: Head) -> torch.Tensor:
        if isinstance(head_VH, PackedHead):
            return head_VH(hidden_NH)
        num_rows = hidden_NH.shape[0]
        rows = pad_rows(hidden_NH.float(), self._numerics.row_tile)
        return self._numerics.linear(rows, head_VH)[:num_rows]

    def _plan(
        self, inputs: StepInputs, cache: PagedCache, first_slot: int, last_only: bool = False
    ) -> tuple[Rotation, AttentionPlan]:
        rotation = self.rotary(pad_rows(inputs.positions, self._numerics.row_tile))
        plan = plan_invariant_attention if self.is_batch_invariant else plan_attention
        if not last_only:
            return rotation, plan(inputs, cache, first_slot)
        last_rows = inputs.last_rows()
        last = plan(inputs.last_tokens(), cache, first_slot)
        return rotation, replace(
            last,
            write_rows=write_rows(inputs, cache),
            query_rows=pad_rows(last_rows, self._numerics.row_tile),
            num_queries=last_rows.shape[0],
        )
