"""Batch-invariant attention: a query's result depends on its own context alone, bit for bit.

The unit of work is a few neighbouring queries of one sequence and the blocks of its context. All
its scores are one product; weighted entries are added in order, a fixed number of blocks at a time.
Slots behind a query's own context, of other queries of its unit or of a longer unit beside it, add
exact zeros. So neither the length of the chunk, nor the company, nor the number of blocks that
other queries have can change the order of a sum. All in fp32.

What is left is that a product's row must not depend on the number of rows beside it, nor a softmax
on the zeros behind. `least_rows` says from how many rows on that holds here; where it never does,
every query is a unit of its own, and every block a product and a sum of its own, so that all
products have one shape.

Shape letters: T queries, H heads, W entry width, L latent width, B blocks of the pool, N tokens
of a block, U units, Q queries of a unit, R = Q * H rows of a unit, M context slots of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan, within, write_rows
from hocket.model.row_products import least_that_agrees, rows_to_try
from hocket.model.step_inputs import StepInputs

MAX_SHORT_QUERIES = 8
"""A sequence with more queries is cut at the ends of its blocks, into units of their own size."""
MAX_UNIT_PAIRS = 8192
"""Of a query and a block: bounds the memory of a unit's scores."""
GROUP_BYTES = 2**23
"""Bounds a group's entries in fp32; a unit with more is a group of its own."""
HIDDEN_SCORE = -3e38
"""Gives a weight of exactly 0."""
_ROW_COUNTS = (*range(1, 18), 24, 33, 64, 100, 512, 2048)
_MAX_LEAST_ROWS = 16


@cache
def least_rows(width: int, size: int) -> int | None:
    """From how many rows on a row's products with blocks of `size` entries have bits of their own;
    None: never, or its softmax has not.

    Kernels for very few rows add in another order. Nobody promises that the others agree, so this
    tries them: one unit and several, one block and several.
    """
    if not _softmax_agrees(size):
        return None
    generator = torch.Generator().manual_seed(1)
    rows_RW = torch.randn(_ROW_COUNTS[-1], width, generator=generator)
    entries_MW = torch.randn(5 * size, width, generator=generator)
    bias_M = torch.zeros(5 * size)

    def products(rows: slice, num_units: int, num_blocks: int) -> tuple[torch.Tensor, ...]:
        num_slots = num_blocks * size
        query_URW = rows_RW[rows].repeat(num_units, 1, 1)
        context_UMW = entries_MW[:num_slots].repeat(num_units, 1, 1)
        bias_U1M = bias_M[:num_slots].expand(num_units, 1, -1)
        scores_URM = _scores(query_URW, context_UMW, bias_U1M)
        latent_URL = torch.bmm(scores_URM[..., :size], context_UMW[:, :size])
        return scores_URM[-1, :, :size], latent_URL[-1]

    def agrees(rows: slice) -> bool:
        return all(
            torch.equal(found, all_rows[rows])
            for num_units, num_blocks in ((1, 1), (1, 5), (3, 1), (3, 5))
            for found, all_rows in zip(products(rows, num_units, num_blocks), expected, strict=True)
        )

    expected = products(slice(None), 1, 1)
    least = least_that_agrees(_ROW_COUNTS, agrees)
    return least if least <= _MAX_LEAST_ROWS else None


def _softmax_agrees(size: int) -> bool:
    """Whether hidden slots behind the others change no bit."""
    scores_RM = torch.randn(16, 5 * size, generator=torch.Generator().manual_seed(4)) * 4.0
    for num_seen in (1, size - 1, size, 3 * size + 5):
        hidden_RM = scores_RM.clone()
        hidden_RM[:, num_seen:] = HIDDEN_SCORE
        slots = -(-num_seen // size) * size
        alone_1M = torch.softmax(hidden_RM[:1, :slots], -1)
        if not torch.equal(torch.softmax(hidden_RM, -1)[:1, :slots], alone_1M):
            return False
    return True


@cache
def blocks_per_sum(width: int, size: int, least: int) -> int:
    """Over how many blocks one product may add weighted entries: from `least` rows on a row's bits
    must be its own, and fewer blocks must be the same as zero weights for the others. Tried."""
    generator = torch.Generator().manual_seed(3)
    weights_RM = torch.rand(_ROW_COUNTS[-1], 4 * size, generator=generator)
    entries_MW = torch.randn(4 * size, width, generator=generator)

    def agrees(num_blocks: int, num_seen: int) -> bool:
        padded_RM = weights_RM[:, : num_blocks * size].clone()
        padded_RM[:, num_seen * size :] = 0.0
        expected_RW = torch.bmm(padded_RM[None], entries_MW[None, : num_blocks * size])[0]
        seen_MW = entries_MW[: num_seen * size]
        return all(
            torch.equal(
                torch.bmm(
                    weights_RM[rows, : num_seen * size].repeat(num_units, 1, 1),
                    seen_MW.repeat(num_units, 1, 1),
                )[-1],
                expected_RW[rows],
            )
            for num_units in (1, 3)
            for rows in rows_to_try([count for count in _ROW_COUNTS if count >= least])
        )

    for num_blocks in (4, 2):
        if all(agrees(num_blocks, num_seen) for num_seen in range(1, num_blocks + 1)):
            return num_blocks
    return 1


def _scores(
    query_URW: torch.Tensor, context_UMW: torch.Tensor, bias_URM: torch.Tensor
) -> torch.Tensor:
    return torch.baddbmm(bias_URM, query_URW, context_UMW.transpose(1, 2))


def _weights(scores_URM: torch.Tensor, size: int) -> torch.Tensor:
    """Softmax whose sums go block by block, for where PyTorch's own is not to be had; the scores
    are spent."""
    weights_URM = scores_URM.sub_(scores_URM.amax(-1, keepdim=True)).exp_()
    totals = weights_URM.unflatten(-1, (-1, size)).sum(-1).cumsum(-1)[..., -1:]
    return weights_URM.div_(totals)


def _sum_blocks(weights_URM: torch.Tensor, values_UML: torch.Tensor, step: int) -> torch.Tensor:
    """Weighted values [U, R, L], added in order, `step` slots in a product."""
    latent_URL = torch.bmm(weights_URM[..., :step], values_UML[:, :step])
    for start in range(step, weights_URM.shape[-1], step):
        end = start + step
        latent_URL.baddbmm_(weights_URM[..., start:end], values_UML[:, start:end])
    return latent_URL


@dataclass(frozen=True)
class UnitGroup:
    """Units of like size. Shorter ones repeat their last query and their first block."""

    query_rows: torch.Tensor | None
    """[U * Q] row of the flat batch of each query; None when they are its rows as they are."""
    blocks: torch.Tensor
    """[U * blocks] physical blocks."""
    bias_UQ1M: torch.Tensor
    """0 where a query may attend, `HIDDEN_SCORE` elsewhere."""
    least_rows: int | None

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int
    ) -> torch.Tensor:
        """Weighted latents of this group's queries, fp32 [U * Q, H, L]."""
        num_units, num_queries, _, num_slots = self.bias_UQ1M.shape
        if self.query_rows is not None:
            query_THW = query_THW.index_select(0, self.query_rows)
        num_heads, width = query_THW.shape[1:]
        query_URW = query_THW[: num_units * num_queries].view(num_units, -1, width)
        context_BNW = entries_BNW.index_select(0, self.blocks).float()
        context_UMW = context_BNW.view(num_units, num_slots, width)
        bias_URM = self.bias_UQ1M.flatten(1, 2)
        if num_queries > 1:
            bias_URM = bias_URM.repeat_interleave(num_heads, 1)
        num_rows, size = num_queries * num_heads, context_BNW.shape[1]
        if self.least_rows is None:
            parts = zip(context_UMW.split(size, 1), bias_URM.split(size, -1), strict=True)
            scores_URM = torch.cat([_scores(query_URW, c, bias) for c, bias in parts], -1)
            weights_URM, step = _weights(scores_URM, size), size
        else:
            missing = (0, 0, 0, max(0, self.least_rows - num_rows))
            if missing[-1]:
                query_URW = F.pad(query_URW, missing)
                bias_URM = bias_URM if num_queries == 1 else F.pad(bias_URM, missing)
            scores_URM = _scores(query_URW, context_UMW, bias_URM)
            weights_URM = torch.softmax(scores_URM, -1)
            step = size * blocks_per_sum(width, size, self.least_rows)
        latent_URL = _sum_blocks(weights_URM, context_UMW[..., :latent_width], step)
        return latent_URL[:, :num_rows].reshape(-1, num_heads, latent_width)


@dataclass(frozen=True)
class InvariantBatch:
    """All queries of a step, in groups."""

    groups: tuple[UnitGroup, ...]
    order: torch.Tensor | None
    """[T] where each query's result is among those of all groups; None: where the query is."""

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int, scale: float
    ) -> torch.Tensor:
        query_THW = query_THW * scale
        parts = [group.attend(query_THW, entries_BNW, latent_width) for group in self.groups]
        out_THL = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.order is not None:
            out_THL = out_THL.index_select(0, self.order)
        # Rows behind the last query are padding.
        missing = query_THW.shape[0] - out_THL.shape[0]
        return F.pad(out_THL, (0, 0, 0, 0, 0, missing)) if missing else out_THL


class Unit(NamedTuple):
    """Some neighbouring queries of a sequence."""

    sequence: int
    row: int
    """Of the first one in the flat batch."""
    num_queries: int
    num_blocks: int
    is_short: bool


def plan_invariant_attention(
    inputs: StepInputs, cache: PagedCache, first_slot: int = 0
) -> AttentionPlan:
    """The plan of batch-invariant mode. `first_slot` as in `plan_attention`."""
    layout = cache.layout
    size, width = layout.block_tokens, layout.entry_width
    least = least_rows(width, size) if cache.device.type == "cpu" else None
    # Without freedom in rows there are many units, and copies of their entries, for one sequence.
    max_blocks = GROUP_BYTES // (4 * size * width) * (1 if least is not None else 64)
    parts = _grouped(_units(inputs, size, least is not None), max_blocks)
    built = [_group(units, inputs, size, first_slot, least) for units in parts]
    rows = [row for _, group_rows in built for row in group_rows]
    order: torch.Tensor | None = None
    if rows != list(range(inputs.num_tokens)):
        place_of = {row: place for place, row in enumerate(rows)}
        places = [place_of[row] for row in range(inputs.num_tokens)]
        order = torch.tensor(places, device=inputs.positions.device)
    return AttentionPlan(
        write_rows=write_rows(inputs, cache),
        latent=InvariantBatch(tuple(group for group, _ in built), order),
        latent_rows=None,
        expanded=(),
    )


def _units(inputs: StepInputs, size: int, is_free: bool) -> list[Unit]:
    """In the order of the flat batch. Without freedom in rows every query is a unit."""
    units: list[Unit] = []
    row = 0
    for sequence, (first, length) in enumerate(
        zip(inputs.first_positions, inputs.query_lengths, strict=True)
    ):
        end = first + length
        is_short = length <= MAX_SHORT_QUERIES
        while first < end:
            stop = end
            if not is_free:
                stop = first + 1
            elif not is_short:
                block = first // size
                stop = min(end, (block + 1) * size, first + 1 + MAX_UNIT_PAIRS // (block + 1))
            units.append(Unit(sequence, row, stop - first, (stop - 1) // size + 1, is_short))
            row += stop - first
            first = stop
    return units


def _grouped(units: list[Unit], max_blocks: int) -> list[list[Unit]]:
    """Neighbours of like size: short units with up to twice as many blocks as others, long ones
    with as many queries and blocks."""
    counts = [unit.num_blocks for unit in units]
    if not all(unit.is_short for unit in units) or max(counts) > 2 * min(counts):
        units.sort(key=lambda unit: (unit.is_short, unit.num_blocks, unit.num_queries))
    groups: list[list[Unit]] = []
    most = 0
    for unit in units:
        last = groups[-1] if groups else []
        most = max(most, unit.num_blocks)
        if (
            last
            and (len(last) + 1) * most <= max_blocks
            and unit.is_short == last[0].is_short
            and (most <= 2 * last[0].num_blocks if unit.is_short else unit[2:] == last[0][2:])
        ):
            last.append(unit)
        else:
            groups.append([unit])
            most = unit.num_blocks
    return groups


def _group(
    units: Sequence[Unit], inputs: StepInputs, size: int, first_slot: int, least: int | None
) -> tuple[UnitGroup, list[int]]:
    """The group and the row of each of its queries; a repeated query counts once more."""
    device = inputs.positions.device
    num_queries = max(unit.num_queries for unit in units)
    num_blocks = max(unit.num_blocks for unit in units)
    rows: list[int] = []
    blocks: list[int] = []
    for unit in units:
        end = unit.row + unit.num_queries
        rows += range(unit.row, end)
        rows += [end - 1] * (num_queries - unit.num_queries)
        own = inputs.host_block_tables[unit.sequence][: unit.num_blocks]
        blocks += own
        # Not somebody else's: zero times NaN would come through the mask.
        blocks += [own[0]] * (num_blocks - len(own))
    is_whole = rows == list(range(inputs.num_tokens))
    query_rows = None if is_whole else torch.tensor(rows, device=device)
    last = inputs.positions if query_rows is None else inputs.positions[query_rows]
    slots_M = torch.arange(num_blocks * size, device=device)
    hidden_UQ1M = slots_M > last.view(len(units), num_queries, 1, 1)
    if first_slot:
        hidden_UQ1M |= slots_M < first_slot
    if (gaps_2U := inputs.gaps_of([unit.sequence for unit in units])) is not None:
        hidden_UQ1M |= within(gaps_2U, slots_M)[:, None, None]
    group = UnitGroup(
        query_rows=query_rows,
        blocks=torch.tensor(blocks, device=device),
        bias_UQ1M=hidden_UQ1M.float().mul_(HIDDEN_SCORE),
        least_rows=least,
    )
    return group, rows
