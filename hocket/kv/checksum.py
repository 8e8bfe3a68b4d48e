"""Checksums of blocks: the last word on whether what arrived is what was sent.

XXH3 finds any wrong byte on the way, in a network, a copy or a wrong address; it is no protection
against somebody who forges blocks. The exporter computes them over its pool when blocks are
finished, the importer over its own when they have landed; the Export stream carries them between
(`hocket/kv/transfer.py`). It reads each byte once on both sides: about as fast as a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from hocket.kv.transfer import BlockBytes


def checksums_of(blocks: BlockBytes, indices: Sequence[int]) -> list[int]:
    """The uint64 XXH3 of each of these blocks."""
    # Lets go of the GIL meanwhile, so the engine computes on beside an importer that verifies.
    return [xxhash.xxh3_64_intdigest(blocks.read(block).data) for block in indices]


def find_damage(blocks: BlockBytes, indices: Sequence[int], announced: Sequence[int]) -> str:
    """What is wrong with these blocks of our pool: names them; "" when every one has the checksum
    that was announced for it, or when none were announced."""
    if not announced:
        return ""
    if len(announced) != len(indices):
        return f"{len(announced)} checksums were announced for {len(indices)} blocks"
    found = checksums_of(blocks, indices)
    wrong = [b for b, ours, theirs in zip(indices, found, announced, strict=True) if ours != theirs]
    if not wrong:
        return ""
    named = ", ".join(str(block) for block in wrong[:8]) + ("" if len(wrong) <= 8 else ", ...")
    return (
        f"{len(wrong)} of {len(indices)} blocks did not arrive as they were sent (the checksum "
        f"differs): here they are blocks {named}"
    )
