"""The output head of a bf16 model on an x86 CPU: half the bytes of fp32 and the same logits.

Logits must stay fp32, and PyTorch's bf16 products round theirs to bf16. FBGEMM multiplies fp32
rows by an fp16 matrix, adds in fp32 and returns fp32. A bf16 matrix scaled by the right power of
two is exactly an fp16 one (but for elements 2^32 below the largest, whose error is as small).
Its kernels treat every row alike, whatever the number of rows: batch-invariant mode packs all
bf16 matrices so (`row_products`).

Shape letters: N rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch


def can_pack_head(head_VH: torch.Tensor) -> bool:
    """Whether FBGEMM serves here and the weights are bf16."""
    engine = torch.backends.quantized.engine
    is_served = engine in ("x86", "fbgemm") and head_VH.device.type == "cpu"
    return is_served and head_VH.dtype == torch.bfloat16


class PackedHead:
    """hidden @ head.T in fp32, from an fp16 copy of the head."""

    def __init__(self, head_VH: torch.Tensor) -> None:
        self._scale = _scale_of(head_VH)
        scaled_VH = head_VH.float().mul_(self._scale)
        self._packed = torch.ops.quantized.linear_prepack_fp16(scaled_VH, None)

    def __call__(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Logits, fp32 [N, V]."""
        hidden_NH = hidden_NH.float() * (1.0 / self._scale)
        return torch.ops.quantized.linear_dynamic_fp16(hidden_NH, self._packed)


def as_packed(weight_VH: torch.Tensor) -> torch.Tensor:
    """The bf16 matrix that `PackedHead` multiplies by: elements far below the largest rounded."""
    scale = _scale_of(weight_VH)
    return weight_VH.float().mul_(scale).half().float().mul_(1.0 / scale).to(weight_VH.dtype)


def _scale_of(weight_VH: torch.Tensor) -> float:
    """The power of two that takes the largest element to [2^14, 2^15)."""
    largest = max(float(weight_VH.abs().max()), 1e-30)
    return 2.0 ** (15 - math.frexp(largest)[1])
