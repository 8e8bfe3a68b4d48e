"""Batch-invariant attention: a query's result depends on its own context alone, bit for bit.

The unit of work is a pair (query, block of its context): scores of all heads against the block's
64 entries, one product of a fixed shape. Maxima, weights and weighted sums are made per pair; a
query's pairs are then added in block order. So neither the length of the chunk, nor the company,
nor the number of blocks that other queries have can change the order of a sum. All in fp32.

Queries are grouped so that block j is attended by a suffix of the group (queries sorted by
context): one sequence's long chunk shares each block among its queries, and many short ones
gather a copy of the block per query. Both make the same products.

Shape letters: T queries, H heads, W entry width, L latent width, B blocks of the pool, N tokens
of a block, P pairs (sorted by block number, then query).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.kv.paged_cache import PagedCache
from hocket.model.attention import AttentionPlan, write_rows
from hocket.model.step_inputs import StepInputs

MAX_GATHERED_QUERIES = 8
"""Sequences with more queries share their blocks instead of gathering a copy per query."""
MAX_GROUP_PAIRS = 8192
"""Bounds the memory of one group's scores."""


@dataclass(frozen=True)
class PairGroup:
    """Some queries, sorted by the number of blocks they attend, and their pairs."""

    order: torch.Tensor | slice
    """Which tokens of the flat batch, in the group's order."""
    starts: tuple[int, ...]
    """Block j is attended by the group's queries starts[j], starts[j] + 1, ..."""
    num_queries: int
    pair_queries: torch.Tensor
    """[P] query of each pair, in the group's order."""
    pair_blocks: torch.Tensor
    """[P] physical block of each pair, or [blocks] where one sequence shares them."""
    is_shared: bool
    hidden_PN: torch.Tensor
    """[P, 1, N] True where the query may not attend."""

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int
    ) -> torch.Tensor:
        """Weighted latents of this group's queries, fp32 [its queries, H, L]."""
        context = entries_BNW.index_select(0, self.pair_blocks).float()
        query_THW = query_THW[self.order]
        if self.is_shared:
            scores_PHN = torch.cat(
                [
                    torch.bmm(query_THW[start:], context[j].t().expand(self._count(j), -1, -1))
                    for j, start in enumerate(self.starts)
                ]
            )
        else:
            pairs_PHW = query_THW.index_select(0, self.pair_queries)
            scores_PHN = torch.bmm(pairs_PHW, context.transpose(1, 2))
        scores_PHN.masked_fill_(self.hidden_PN, float("-inf"))
        most_PH1 = scores_PHN.amax(-1, keepdim=True)
        weights_PHN = scores_PHN.sub_(most_PH1).exp_()
        totals_PH1 = weights_PHN.sum(-1, keepdim=True)
        values = context[..., :latent_width]
        if self.is_shared:
            pairs = weights_PHN.split([self._count(j) for j in range(len(self.starts))])
            latents_PHL = torch.cat(
                [
                    torch.bmm(pair, values[j].expand(pair.shape[0], -1, -1))
                    for j, pair in enumerate(pairs)
                ]
            )
        else:
            latents_PHL = torch.bmm(weights_PHN, values)
        return self._combine(most_PH1, totals_PH1, latents_PHL)

    def _count(self, block: int) -> int:
        return self.num_queries - self.starts[block]

    def _combine(
        self, most_PH1: torch.Tensor, totals_PH1: torch.Tensor, latents_PHL: torch.Tensor
    ) -> torch.Tensor:
        """Add a query's pairs in block order, each scaled to the query's own maximum."""
        if len(self.starts) == 1:
            return latents_PHL.div_(totals_PH1)
        counts = [self._count(j) for j in range(len(self.starts))]
        # Every query attends block 0, so its pairs are the first `num_queries` ones.
        most_TH1 = most_PH1[: self.num_queries].clone()
        for start, most in zip(self.starts[1:], most_PH1.split(counts)[1:], strict=True):
            torch.maximum(most_TH1[start:], most, out=most_TH1[start:])
        scale_PH1 = (most_PH1 - most_TH1.index_select(0, self.pair_queries)).exp_()
        totals_PH1 = totals_PH1 * scale_PH1
        latents_PHL.mul_(scale_PH1)
        sum_TH1 = totals_PH1[: self.num_queries].clone()
        sum_THL = latents_PHL[: self.num_queries].clone()
        rest = zip(self.starts, totals_PH1.split(counts), latents_PHL.split(counts), strict=True)
        for j, (start, total, latent) in enumerate(rest):
            if j:
                sum_TH1[start:].add_(total)
                sum_THL[start:].add_(latent)
        return sum_THL.div_(sum_TH1)


@dataclass(frozen=True)
class InvariantBatch:
    """All queries of a step, in groups."""

    groups: tuple[PairGroup, ...]

    def attend(
        self, query_THW: torch.Tensor, entries_BNW: torch.Tensor, latent_width: int, scale: float
    ) -> torch.Tensor:
        query_THW = query_THW * scale
        if len(self.groups) == 1 and self.groups[0].order == slice(0, query_THW.shape[0]):
            return self.groups[0].attend(query_THW, entries_BNW, latent_width)
        # Rows of no group are padding.
        out_THL = query_THW.new_zeros(*query_THW.shape[:2], latent_width)
        for group in self.groups:
            out_THL[group.order] = group.attend(query_THW, entries_BNW, latent_width)
        return out_THL


def plan_invariant_attention(
    inputs: StepInputs, cache: PagedCache, first_slot: int = 0
) -> AttentionPlan:
    """The plan of batch-invariant mode. `first_slot` as in `plan_attention`."""
    size = cache.layout.block_tokens
    groups: list[PairGroup] = []
    gathered: list[tuple[int, int, int]] = []
    row = 0
    for sequence, (first, length) in enumerate(
        zip(inputs.first_positions, inputs.query_lengths, strict=True)
    ):
        queries = [(p // size + 1, row + p - first, sequence) for p in range(first, first + length)]
        row += length
        if length > MAX_GATHERED_QUERIES:
            groups += [_group(part, inputs, size, first_slot) for part in _parts(queries)]
        else:
            gathered += queries
    groups += [_group(part, inputs, size, first_slot) for part in _parts(sorted(gathered))]
    return AttentionPlan(
        write_rows=write_rows(inputs, cache),
        latent=InvariantBatch(tuple(groups)),
        latent_rows=None,
        expanded=(),
    )


def _parts(queries: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut (blocks, row, sequence) into runs of at most `MAX_GROUP_PAIRS` pairs."""
    parts: list[list[tuple[int, int, int]]] = []
    num_pairs = 0
    for query in queries:
        if not parts or num_pairs + query[0] > MAX_GROUP_PAIRS:
            parts.append([])
            num_pairs = 0
        parts[-1].append(query)
        num_pairs += query[0]
    return parts


def _group(
    queries: list[tuple[int, int, int]], inputs: StepInputs, size: int, first_slot: int
) -> PairGroup:
    device = inputs.positions.device
    most_blocks = queries[-1][0]
    starts = tuple(
        next(i for i, query in enumerate(queries) if query[0] > j) for j in range(most_blocks)
    )
    rows = [row for _, row, _ in queries]
    is_run = rows == list(range(rows[0], rows[0] + len(rows)))
    sequences = {sequence for _, _, sequence in queries}
    is_shared = len(sequences) == 1 and len(queries) > MAX_GATHERED_QUERIES
    pairs = [(j, i) for j, start in enumerate(starts) for i in range(start, len(queries))]
    if is_shared:
        blocks = list(inputs.host_block_tables[sequences.pop()][:most_blocks])
    else:
        blocks = [inputs.host_block_tables[queries[i][2]][j] for j, i in pairs]
    pair_queries = torch.tensor([i for _, i in pairs], device=device)
    pair_starts = torch.tensor([j * size for j, _ in pairs], device=device)
    order = torch.tensor(rows, device=device)
    slots_PN = pair_starts[:, None] + torch.arange(size, device=device)
    last_P1 = inputs.positions[order][pair_queries][:, None]
    hidden_PN = (slots_PN > last_P1) | (slots_PN < first_slot)
    return PairGroup(
        order=slice(rows[0], rows[-1] + 1) if is_run else order,
        starts=starts,
        num_queries=len(queries),
        pair_queries=pair_queries,
        pair_blocks=torch.tensor(blocks, device=device),
        is_shared=is_shared,
        hidden_PN=hidden_PN[:, None],
    )
