"""The small parts of a layer: norm, rotary tables, gated MLP, and rows padded to a tile.

Built by `weights`, used by `mla`, `moe`, `mtp` and `transformer`.

Shape letters: T tokens, H hidden size, I MLP width, N heads, R rotary size, P positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hocket.model.model_config import ModelConfig, YarnConfig
from hocket.model.numerics import Numerics, Weight


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._width = weight.shape[0]
        self._twice = torch.cat([weight, weight]) if weight.device.type == "cpu" else None
        self._twice_shape = (2 * self._width,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._twice is None:
            return F.rms_norm(x, (self._width,), self.weight, self.eps)
        # PyTorch has no fused RMS norm on a CPU. But [x, -x] has mean 0 and variance mean(x^2), so
        # that its layer norm, which is fused, begins with the RMS norm of x.
        mirrored = torch.cat([x, x.neg()], -1)
        normed = torch.layer_norm(mirrored, self._twice_shape, self._twice, None, self.eps)
        return normed[..., : self._width]


class GatedMLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one matrix [2I, H]."""

    def __init__(self, gate_up: Weight, down: Weight, numerics: Numerics) -> None:
        self.gate_up = gate_up
        self.down = down
        self._numerics = numerics

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        numerics = self._numerics
        return numerics.linear(numerics.gated(numerics.linear(x_TH, self.gate_up)), self.down)


@dataclass(frozen=True)
class Rotation:
    """cos and signed sin of a step's positions, fp32 [T, 1, R] each."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x_TNR: torch.Tensor) -> torch.Tensor:
        """Rotate heads whose halves hold the pairs' first and second elements; fp32 inside."""
        turned = torch.roll(x_TNR, x_TNR.shape[-1] // 2, -1) * self.sin
        return turned.add_(x_TNR * self.cos).to(x_TNR.dtype)


class RotaryTable:
    """cos and sin for every position up to the model's limit."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies = _frequencies(config)
        scale = config.yarn.rotation_scale if config.yarn else 1.0
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles_PF = positions[:, None] * frequencies
        cos_PF, sin_PF = angles_PF.cos() * scale, angles_PF.sin() * scale
        self.cos_PR = torch.cat([cos_PF, cos_PF], -1).to(device)
        self.sin_PR = torch.cat([-sin_PF, sin_PF], -1).to(device)

    def __call__(self, positions_T: torch.Tensor) -> Rotation:
        return Rotation(
            torch.embedding(self.cos_PR, positions_T)[:, None],
            torch.embedding(self.sin_PR, positions_T)[:, None],
        )


def _frequencies(config: ModelConfig) -> torch.Tensor:
    size = config.qk_rope_head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / config.rope_theta**exponents
    return _stretch(frequencies, config.rope_theta, config.yarn) if config.yarn else frequencies


def _stretch(frequencies: torch.Tensor, theta: float, yarn: YarnConfig) -> torch.Tensor:
    """YaRN: slow rotations are interpolated, fast ones kept, with a ramp between."""
    size = 2 * len(frequencies)
    longest = yarn.original_max_position_embeddings

    def dimension_of(num_rotations: float) -> float:
        return size * math.log(longest / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def pad_rows(x: torch.Tensor, row_tile: int) -> torch.Tensor:
    """Append zero rows until the number of rows is a multiple of `row_tile`."""
    missing = -x.shape[0] % row_tile
    if not missing:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
