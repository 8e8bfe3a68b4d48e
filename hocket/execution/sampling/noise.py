"""Addressed noise: the randomness of a sample is computed from where it is, never drawn.

A token's Gumbel noise is a pure function of (seed, choice, position, token id). The sampler adds
it to the filtered logits and takes the largest, so a draft and its verification, two batches, two
workers, or a request and its migration all meet the same noise. The function, fixed for ever (the
golden values in `tests/execution/test_noise.py` hold it), with every operation modulo 2**64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;
             z ^= z >> 31                                            (SplitMix64's finaliser)
    key      = mix(mix(mix(seed ^ 0x6C6F64792D6E6F74) + GOLDEN * (choice + 1))
                   + GOLDEN * (position + 1))                        GOLDEN = 0x9E3779B97F4A7C15
    bits     = mix(key + GOLDEN * (token_id + 1))
    uniform  = ((bits >> 12) + 0.5) * 2**-52                         exact in float64, never 0 or 1
    noise    = float32(-log(-log(uniform)))                          logarithms in float64

Rounding to float32 hides the last bits in which devices' float64 logarithms may differ.
Shape letters: N rows, C tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_DOMAIN = 0x6C6F64792D6E6F74
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

LARGEST_NOISE = 36.8  # a bound: -log(-log(1 - 2**-53)) is 36.74


def position_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one position of one choice; `seed` counts modulo 2**64."""
    key = _mix((seed ^ _DOMAIN) & _MASK)
    key = _mix((key + _GOLDEN * (choice + 1)) & _MASK)
    return _mix((key + _GOLDEN * (position + 1)) & _MASK)


def keys_tensor(keys: Sequence[int], device: torch.device) -> Tensor:
    """Position keys as int64 [N] (two's complement of the unsigned values)."""
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def gumbel_noise(keys_N: Tensor, token_ids_NC: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [N, C].

    `keys_N` comes from `keys_tensor`; `token_ids_NC` is int64 [N, C], or [1, C] for all rows alike.
    """
    return uniforms(keys_N, token_ids_NC).log_().neg_().log_().neg_().to(torch.float32)


def uniforms(keys_N: Tensor, token_ids_NC: Tensor) -> Tensor:
    """The uniform values behind the noise, float64 [N, C], in [2**-53, 1 - 2**-53]."""
    z_NC = token_ids_NC.add(1).mul_(_signed(_GOLDEN)) + keys_N[:, None]
    scratch_NC = torch.empty_like(z_NC)
    _mix_but_last_step(z_NC, scratch_NC)
    z_NC ^= _shifted(z_NC, 31, scratch_NC)
    return _shifted(z_NC, 12, scratch_NC).to(torch.float64).add_(0.5).mul_(2.0**-52)


def may_reach(
    keys_N: Tensor, first_ids_N: Tensor, width: int, bounds_N: Tensor, rows_together: int
) -> Iterator[tuple[int, Tensor]]:
    """Which of the `width` tokens from a first id on have noise of at least `bounds_N` (float64):
    all that have, and one in 2**30 of the others.

    Comes for a few rows at a time: the number of the first row, and a mask, int8 [rows, width],
    which the next one overwrites. Noise grows with the hash, so its upper bits are compared, and no
    logarithm is taken.
    """
    offsets_C = torch.arange(width, device=keys_N.device) * _signed(_GOLDEN)
    start_N = (first_ids_N + 1) * _signed(_GOLDEN) + keys_N
    share_N = torch.expm1(-torch.exp(-bounds_N)).neg_()  # of uniform values that reach the bound
    least_N = 2.0**63 - 2.0**34 - share_N * (2.0**64 * (1 + 1e-9))
    least_N = least_N.clamp_(min=-(2.0**63)).to(torch.int64)
    shape = (rows_together, width)
    z_NC, scratch_NC = start_N.new_empty(shape), start_N.new_empty(shape)
    mask_NC = start_N.new_empty(shape, dtype=torch.int8)  # bool takes longer on a CPU
    for first in range(0, len(keys_N), rows_together):
        part = slice(first, first + rows_together)
        rows = len(keys_N[part])
        z = torch.add(start_N[part, None], offsets_C, out=z_NC[:rows])
        _mix_but_last_step(z, scratch_NC[:rows])  # the last step keeps the upper 31 bits
        z ^= -(2**63)  # now the signed order is that of the unsigned values
        yield first, torch.ge(z, least_N[part, None], out=mask_NC[:rows])


def position_uniform(seed: int, choice: int, position: int) -> float:
    """One uniform value per position, apart from every token's (its token id is -1)."""
    return ((_mix(position_key(seed, choice, position)) >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)


def _mix_but_last_step(z: Tensor, scratch: Tensor) -> None:
    """`_mix` in place up to its last xor."""
    z ^= _shifted(z, 30, scratch)
    z *= _signed(_MULTIPLIER_1)
    z ^= _shifted(z, 27, scratch)
    z *= _signed(_MULTIPLIER_2)


def _shifted(z: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical right shift: torch's `>>` on int64 copies the sign."""
    return torch.bitwise_right_shift(z, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
