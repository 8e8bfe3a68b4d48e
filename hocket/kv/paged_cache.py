"""The memory behind the KV cache: one contiguous tensor of blocks, and views of it per layer.

`KVLayout` says where things lie, `BlockPool` who owns which block; the model writes and reads
through `layer_rows` and `layer_view`, a transfer reads and writes raw bytes at `base_address`.
The tensor is allocated once and lives as long as the cache: peers may hold its address.

Behind the last block lies the scratch block. It is not part of the pool, nothing reads it, and
transfers don't know it: entries that must be computed but not kept are written there.

Shape letters: B blocks of the pool, N tokens of a block, W entry width.
"""

from __future__ import annotations

import torch

from hocket.kv.block_pool import BlockPool
from hocket.kv.layout import KVLayout

_ALIGNMENT_BYTES = 4096


class PagedCache:
    """A pool of KV blocks on one device, zero-filled at the start.

    `storage` is uint8 [num_blocks, block_bytes], page-aligned on the host.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.pool = BlockPool(num_blocks)
        num_bytes = (num_blocks + 1) * layout.block_bytes
        raw = torch.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=self.device)
        start = -raw.data_ptr() % _ALIGNMENT_BYTES
        with_scratch = raw[start : start + num_bytes].view(num_blocks + 1, layout.block_bytes)
        self.storage = with_scratch[:num_blocks]
        entries = with_scratch.view(self.dtype).view(
            num_blocks + 1, layout.num_layers, layout.block_tokens, layout.entry_width
        )
        self._views_BNW = [entries[:num_blocks, layer] for layer in range(layout.num_layers)]
        self._rows_W = [self._rows(entries, layer) for layer in range(layout.num_layers)]

    @property
    def base_address(self) -> int:
        """Address of block 0; block b lies at `base_address + b * layout.block_bytes`."""
        return self.storage.data_ptr()

    @property
    def block_stride_rows(self) -> int:
        """Rows of `layer_rows` from one block to the next."""
        return self.layout.num_layers * self.layout.block_tokens

    @property
    def scratch_row(self) -> int:
        """The row of `layer_rows`, the same in every layer, for entries that nobody reads."""
        return self.num_blocks * self.block_stride_rows

    def layer_view(self, layer: int) -> torch.Tensor:
        """Entries of one layer, [B, N, W]; a view whose block stride is a whole block."""
        return self._views_BNW[layer]

    def layer_rows(self, layer: int) -> torch.Tensor:
        """Entries of one layer as rows [*, W]: token o of block b is row
        `b * block_stride_rows + o`. A view; rows between belong to other layers."""
        return self._rows_W[layer]

    def clear_block(self, block: int) -> None:
        """Zero a block: bytes that are no numbers would reach its next owner through the mask."""
        self.storage[block] = 0

    def _rows(self, entries: torch.Tensor, layer: int) -> torch.Tensor:
        layout = self.layout
        num_rows = self.num_blocks * self.block_stride_rows + layout.block_tokens
        width = layout.entry_width
        offset = entries.storage_offset() + layer * layout.block_tokens * width
        return entries.as_strided((num_rows, width), (width, 1), offset)
