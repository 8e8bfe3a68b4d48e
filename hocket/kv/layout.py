"""Where a token's cached entry lies inside a block: pure arithmetic, no memory, no torch.

The KV cache is block-major: one block holds `block_tokens` tokens of every layer, contiguous, so
that a block is one transfer descriptor. Inside a block the layers follow each other, inside a
layer the tokens. `paged_cache` owns the memory, `block_pool` decides who owns a block.
"""

from __future__ import annotations

from dataclasses import dataclass

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block: [num_layers, block_tokens, entry_width] elements of `dtype`.

    `num_layers` counts the main layers, then the MTP layers. `entry_width` is the number of
    elements that one token has in one layer; for MLA the normed latent, then the rotated key
    part. All sizes are Python integers, so no offset overflows.
    """

    block_tokens: int
    num_layers: int
    entry_width: int
    dtype: str

    def __post_init__(self) -> None:
        assert self.dtype in _DTYPE_BYTES, f"no KV layout for dtype {self.dtype!r}"
        assert min(self.block_tokens, self.num_layers, self.entry_width) > 0, self

    @property
    def entry_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.entry_width * _DTYPE_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer inside one block."""
        return self.block_tokens * self.entry_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_bytes

    def layer_offset(self, layer: int) -> int:
        """Byte offset of a layer inside its block.

        >>> KVLayout(64, 3, 160, "float32").layer_offset(2)
        81920
        """
        assert 0 <= layer < self.num_layers, f"layer {layer} of {self.num_layers}"
        return layer * self.layer_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_tokens)

    def describe(self) -> str:
        """One line that is equal exactly when two pools can exchange blocks byte for byte."""
        return (
            f"mla-latent/block-major layers={self.num_layers} block={self.block_tokens} "
            f"width={self.entry_width} dtype={self.dtype}"
        )
