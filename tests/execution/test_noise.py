"""The noise function is fixed for ever: golden values, and a plain Python form of it."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.execution.sampling.noise import (
    LARGEST_NOISE,
    gumbel_noise,
    keys_tensor,
    may_reach,
    position_key,
    position_uniform,
    uniforms,
)

CPU = torch.device("cpu")
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def plain_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_uniform(seed: int, choice: int, position: int, token_id: int) -> float:
    """The function of `noise.py`'s docstring, written down once more from its text."""
    key = plain_mix((seed ^ 0x6C6F64792D6E6F74) & MASK)
    key = plain_mix((key + GOLDEN * (choice + 1)) & MASK)
    key = plain_mix((key + GOLDEN * (position + 1)) & MASK)
    bits = plain_mix((key + GOLDEN * (token_id + 1)) & MASK)
    return ((bits >> 12) + 0.5) * 2.0**-52


def noise_of(seed: int, choice: int, position: int, token_ids: list[int]) -> torch.Tensor:
    keys = keys_tensor([position_key(seed, choice, position)], CPU)
    return gumbel_noise(keys, torch.tensor([token_ids]))[0]


GOLDEN_KEYS = {
    (0, 0, 0): 0xBB68D60799EBD8F9,
    (1, 0, 0): 0x9E0E885B0265B4B0,
    (0, 1, 0): 0xCCB83423E08A0933,
    (0, 0, 1): 0xC8CD9FA6B2D820BA,
    (18446744073709551615, 3, 163839): 0xA42E8FF1A45B9FBF,
    (42, 0, 100): 0x1C323047644E7986,
}
GOLDEN_NOISE = {
    (0, 0, 0, 0): -0.8389329314231873,
    (0, 0, 0, 1): -0.1678854376077652,
    (0, 0, 0, 129279): 0.1767781525850296,
    (1, 0, 0, 0): 0.22116239368915558,
    (1, 0, 0, 1): 1.2715739011764526,
    (1, 0, 0, 129279): 0.2710234820842743,
    (0, 1, 0, 0): -0.7009933590888977,
    (0, 1, 0, 1): 0.040426719933748245,
    (0, 1, 0, 129279): -0.3880397081375122,
    (0, 0, 1, 0): 1.5656859874725342,
    (0, 0, 1, 1): 0.721050500869751,
    (0, 0, 1, 129279): 1.0209804773330688,
    (18446744073709551615, 3, 163839, 0): 0.5006580948829651,
    (18446744073709551615, 3, 163839, 1): -0.8733940720558167,
    (18446744073709551615, 3, 163839, 129279): 0.5918702483177185,
    (42, 0, 100, 0): -1.5020028352737427,
    (42, 0, 100, 1): 1.708631992340088,
    (42, 0, 100, 129279): 0.6986091136932373,
}


@pytest.mark.parametrize(("address", "key"), GOLDEN_KEYS.items())
def test_position_keys_never_change(address: tuple[int, int, int], key: int) -> None:
    assert position_key(*address) == key


@pytest.mark.parametrize(("address", "noise"), GOLDEN_NOISE.items())
def test_noise_never_changes(address: tuple[int, int, int, int], noise: float) -> None:
    seed, choice, position, token_id = address
    assert noise_of(seed, choice, position, [token_id]).item() == noise


@given(
    st.integers(0, MASK), st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 2**31 - 1)
)
def test_tensor_form_equals_the_written_formula(
    seed: int, choice: int, position: int, token_id: int
) -> None:
    keys = keys_tensor([position_key(seed, choice, position)], CPU)
    uniform = plain_uniform(seed, choice, position, token_id)
    assert uniforms(keys, torch.tensor([[token_id]])).item() == uniform
    expected = torch.tensor(-math.log(-math.log(uniform)), dtype=torch.float32).item()
    assert noise_of(seed, choice, position, [token_id]).item() == expected
    assert position_uniform(seed, choice, position) == plain_uniform(seed, choice, position, -1)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_a_tokens_noise_is_the_same_in_any_company(rows: int, columns: int, random: Random) -> None:
    addresses = [(random.getrandbits(64), random.randrange(4), i) for i in range(rows)]
    keys = keys_tensor([position_key(*address) for address in addresses], CPU)
    together = gumbel_noise(keys, torch.arange(columns)[None])
    row, column = random.randrange(rows), random.randrange(columns)
    alone = noise_of(*addresses[row], [column])
    assert together[row, column].item() == alone.item()


def test_uniforms_stay_inside_zero_and_one_at_the_extremes() -> None:
    for bits in (0, MASK >> 12):
        uniform = (bits + 0.5) * 2.0**-52
        assert 0.0 < uniform < 1.0
        assert math.isfinite(-math.log(-math.log(uniform)))
        assert -math.log(-math.log(uniform)) < LARGEST_NOISE


@settings(max_examples=50)
@given(st.integers(1, 5), st.sampled_from([1, 32, 128]), st.randoms(use_true_random=False))
def test_tokens_that_may_reach_a_bound_are_those_that_do(
    rows: int, width: int, random: Random
) -> None:
    keys = keys_tensor([random.getrandbits(64) for _ in range(rows)], CPU)
    first_ids = torch.tensor([random.randrange(1 << 20) for _ in range(rows)])
    noise = gumbel_noise(keys, first_ids[:, None] + torch.arange(width)).double()

    def reaching(bounds: torch.Tensor) -> list[list[bool]]:
        parts = may_reach(keys, first_ids, width, bounds, rows_together=2)
        return [row for _, mask in parts for row in mask.bool().tolist()]

    for bounds in (noise.amax(dim=-1), noise[:, width // 2], noise.amin(dim=-1)):
        unrounded = bounds - 1e-7 * bounds.abs()  # float32 may have rounded it up
        assert reaching(unrounded) == (noise >= bounds[:, None]).tolist()
    assert torch.tensor(reaching(torch.full((rows,), -5.0).double())).all()
    assert not torch.tensor(reaching(torch.full((rows,), LARGEST_NOISE).double())).any()


def test_noise_has_the_moments_of_a_standard_gumbel_and_no_correlation_along_any_address() -> None:
    keys = keys_tensor([position_key(7, 0, position) for position in range(256)], CPU)
    noise = gumbel_noise(keys, torch.arange(4096)[None]).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=0.006)  # about 5 deviations
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.015)
    centred = (noise - noise.mean()) / noise.std()
    assert abs((centred[:, 1:] * centred[:, :-1]).mean().item()) < 0.005
    assert abs((centred[1:] * centred[:-1]).mean().item()) < 0.005
    other_seed = gumbel_noise(
        keys_tensor([position_key(8, 0, position) for position in range(256)], CPU),
        torch.arange(4096)[None],
    ).double()
    assert abs((centred * other_seed).mean().item()) < 0.006


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_noise() -> None:
    addresses = [position_key(3, 1, position) for position in range(64)]
    ids = torch.arange(4096)[None]
    cuda = torch.device("cuda")
    on_cpu = gumbel_noise(keys_tensor(addresses, CPU), ids)
    on_cuda = gumbel_noise(keys_tensor(addresses, cuda), ids.to(cuda)).cpu()
    assert (on_cpu == on_cuda).double().mean().item() > 0.999999
