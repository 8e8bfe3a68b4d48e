"""What a step does when it computed NaN: its weights, or bytes that were handed over, are damaged.

Called by `model_runner` behind each main pass and by `speculation` behind each MTP pass.
Shape letters: T rows of hidden states, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from hocket.execution.sequence import Sequence
from hocket.execution.step_failures import Damaged
from hocket.kv.paged_cache import PagedCache
from hocket.types import RequestKey


def refuse_nan(
    hidden_TH: Tensor, row_counts: Seq[int], sequences: Seq[Sequence], cache: PagedCache
) -> None:
    """Raises Damaged on NaN; sequence i has `row_counts[i]` of the rows.

    First the blocks of the sequences at fault are condemned: the prefix index forgets them, and
    they are zeroed once nobody holds them, because blocks are used again as they are, and zero
    times NaN would reach their next owner through the mask. Not before: another sequence that
    shares one must meet the NaN too, it would go on with zeros in silence.
    """
    if not bool(hidden_TH.amax().isnan()):
        return
    damaged: set[RequestKey] = set()
    for rows, sequence in zip(hidden_TH.split(list(row_counts)), sequences, strict=True):
        if bool(rows.isnan().any()):
            cache.pool.condemn(sequence.block_table, cache.clear_block)
            damaged.add(sequence.key)
    raise Damaged(frozenset(damaged))
