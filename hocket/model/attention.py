"""Attention over the paged latent cache, planned on the host once per step.

`plan_attention` turns `StepInputs` into index tensors and masks; `mla` calls the plan's parts in
every layer. Fast mode has two forms: few queries per sequence attend in the latent space, all
sequences in one batch (*absorbed*); longer chunks expand keys and values, one sequence after the
other (*expanded*). Batch-invariant mode has one form for both, in `attention_invariant`.

Shape letters: T query tokens, S sequences, Q queries of a sequence, M context slots, B blocks of
the pool, N tokens of a block, W entry width, L latent width, H heads, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import StepInputs

MAX_ABSORBED_QUERIES = 16
"""Above this many queries a sequence attends expanded: each latent is expanded once, and pays."""


class LatentAttention(Protocol):
    """Attention of many queries in the latent space, keys and values being the same entries."""

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int, scale: float
    ) -> torch.Tensor:
        """Weighted latents [T, H, L] of the queries that the plan was made for."""
        ...


@dataclass(frozen=True)
class AbsorbedBatch:
    """Queries of many sequences, padded to the longest; `attend` takes them flat."""

    blocks: torch.Tensor
    """Physical blocks, [S * blocks per sequence]."""
    num_sequences: int
    slots: slice
    """Which gathered slots any query may attend."""
    mask_SQM: torch.Tensor | None
    """True where a query may attend; None when all may attend all."""
    to_padded: torch.Tensor | None
    """[S * Q] row of each padded query, None when every sequence has Q queries."""
    from_padded: torch.Tensor | None
    """[T] padded row of each query."""

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int, scale: float
    ) -> torch.Tensor:
        if self.to_padded is not None:
            query_THW = query_THW.index_select(0, self.to_padded)
        num_heads, width = query_THW.shape[1:]
        context = entries_BNW.index_select(0, self.blocks)
        context = context.view(self.num_sequences, 1, -1, width)[:, :, self.slots]
        mask = self.mask_SQM
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(num_heads, dim=1)
        out = F.scaled_dot_product_attention(
            query_THW.to(context.dtype).reshape(self.num_sequences, 1, -1, width),
            context,
            context,
            attn_mask=None if mask is None else mask[:, None],
            scale=scale,
        )
        latent_THL = out.view(-1, num_heads, width)[..., :latent_width]
        if self.from_padded is not None:
            latent_THL = latent_THL.index_select(0, self.from_padded)
        return latent_THL


@dataclass(frozen=True)
class ExpandedSequence:
    """One sequence's chunk of queries."""

    rows: slice
    """Its tokens in the flat batch."""
    blocks: torch.Tensor
    """Physical blocks of its context."""
    slots: slice
    mask_QM: torch.Tensor | None
    """None when the chunk is the whole context: plain causal."""

    def context(self, entries_BNW: torch.Tensor) -> torch.Tensor:
        """The entries it attends, [M, W]."""
        return entries_BNW.index_select(0, self.blocks).flatten(0, 1)[self.slots]

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_MHD: torch.Tensor,
        value_MHV: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention, [Q, H, V]."""
        value_size = value_MHV.shape[-1]
        # PyTorch's flash kernels want values as wide as keys.
        value_MHV = F.pad(value_MHV, (0, key_MHD.shape[-1] - value_size))
        out = F.scaled_dot_product_attention(
            query_QHD.transpose(0, 1)[None],
            key_MHD.transpose(0, 1)[None],
            value_MHV.transpose(0, 1)[None],
            attn_mask=self.mask_QM,
            is_causal=self.mask_QM is None,
            scale=scale,
        )
        return out[0].transpose(0, 1)[..., :value_size]


@dataclass(frozen=True)
class AttentionPlan:
    """Where the step's entries are written, and who attends what in which form."""

    write_rows: torch.Tensor
    """[T] row of `PagedCache.layer_rows` that each token writes."""
    latent: LatentAttention | None
    latent_rows: torch.Tensor | None
    """Tokens that attend in the latent space; None when all do."""
    expanded: tuple[ExpandedSequence, ...]
    query_rows: torch.Tensor | None = None
    """Rows that attend and go on, padded to the row tile; None when all that write do."""
    num_queries: int | None = None
    """How many of `query_rows` are no padding."""

    @property
    def num_tokens(self) -> int:
        """Tokens that attend and go on, padding not counted."""
        return self.write_rows.shape[0] if self.num_queries is None else self.num_queries


def write_rows(inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
    """Cache row that every token writes, int64 [T]; the scratch row where its slot is shared."""
    size, stride = cache.layout.block_tokens, cache.block_stride_rows
    rows: list[int] = []
    for table, first, length, num_shared in zip(
        inputs.host_block_tables,
        inputs.first_positions,
        inputs.query_lengths,
        inputs.num_shared,
        strict=True,
    ):
        assert len(table) * size >= first + length, (
            f"block table of {len(table)} blocks ends before slot {first + length - 1}"
        )
        own = range(max(first, num_shared), first + length)
        rows += [cache.scratch_row] * (length - len(own))
        rows += [table[p // size] * stride + p % size for p in own]
    return torch.tensor(rows, dtype=torch.int64, device=inputs.positions.device)


def within(gaps_2S: torch.Tensor, slots_M: torch.Tensor) -> torch.Tensor:
    """Which slots lie in each gap (`StepInputs.gaps_of`): bool [S, M]."""
    first_S1, end_S1 = gaps_2S[..., None]
    return (slots_M >= first_S1) & (slots_M < end_S1)


def plan_attention(inputs: StepInputs, cache: PagedCache, first_slot: int = 0) -> AttentionPlan:
    """The fast mode's plan. `first_slot` is the first slot that holds an entry (1 for MTP)."""
    short: list[int] = []
    long: list[int] = []
    for sequence, length in enumerate(inputs.query_lengths):
        (short if length <= MAX_ABSORBED_QUERIES else long).append(sequence)
    starts = [0]
    for length in inputs.query_lengths:
        starts.append(starts[-1] + length)
    latent_rows: torch.Tensor | None = None
    if short and long:
        rows = [row for s in short for row in range(starts[s], starts[s + 1])]
        latent_rows = torch.tensor(rows, device=inputs.positions.device)
    return AttentionPlan(
        write_rows=write_rows(inputs, cache),
        latent=_absorbed(inputs, short, cache, first_slot) if short else None,
        latent_rows=latent_rows,
        expanded=tuple(_expanded(inputs, s, starts[s], cache, first_slot) for s in long),
    )


def _absorbed(
    inputs: StepInputs, sequences: list[int], cache: PagedCache, first_slot: int
) -> AbsorbedBatch:
    device = inputs.positions.device
    lengths = [inputs.query_lengths[s] for s in sequences]
    firsts = [inputs.first_positions[s] for s in sequences]
    longest = max(lengths)
    context = max(first + length for first, length in zip(firsts, lengths, strict=True))
    num_blocks = cache.layout.blocks_for(context)
    is_whole = len(sequences) == len(inputs.query_lengths)
    tables = inputs.block_tables
    if not is_whole:
        tables = tables.index_select(0, torch.tensor(sequences, device=device))
    to_padded: torch.Tensor | None = None
    from_padded: torch.Tensor | None = None
    if any(length != longest for length in lengths):
        padded: list[int] = []
        flat: list[int] = []
        for row, length in enumerate(lengths):
            start = len(flat)
            padded += [start + min(i, length - 1) for i in range(longest)]
            flat += [row * longest + i for i in range(length)]
        to_padded = torch.tensor(padded, device=device)
        from_padded = torch.tensor(flat, device=device)
    mask: torch.Tensor | None = None
    gaps_2S = inputs.gaps_of(sequences)
    if longest > 1 or len(set(firsts)) > 1 or gaps_2S is not None:
        last = [
            [first + min(i, length - 1) for i in range(longest)]
            for first, length in zip(firsts, lengths, strict=True)
        ]
        slots = torch.arange(first_slot, context, device=device)
        mask = slots <= torch.tensor(last, device=device)[..., None]
        if gaps_2S is not None:
            mask &= ~within(gaps_2S, slots)[:, None]
    return AbsorbedBatch(
        blocks=tables[:, :num_blocks].reshape(-1),
        num_sequences=len(sequences),
        slots=slice(first_slot, context),
        mask_SQM=mask,
        to_padded=to_padded,
        from_padded=from_padded,
    )


def _expanded(
    inputs: StepInputs, sequence: int, start: int, cache: PagedCache, first_slot: int
) -> ExpandedSequence:
    first, length = inputs.first_positions[sequence], inputs.query_lengths[sequence]
    context = first + length
    mask: torch.Tensor | None = None
    gap_21 = inputs.gaps_of([sequence])
    if first > first_slot or gap_21 is not None:
        slots = torch.arange(first_slot, context, device=inputs.positions.device)
        mask = slots <= inputs.positions[start : start + length, None]
        if gap_21 is not None:
            mask &= ~within(gap_21, slots)
    return ExpandedSequence(
        rows=slice(start, start + length),
        blocks=inputs.block_tables[sequence, : cache.layout.blocks_for(context)],
        slots=slice(first_slot, context),
        mask_QM=mask,
    )
