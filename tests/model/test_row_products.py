"""Products that share rows give every row the bits that it has alone, or say that they can't."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from hocket.model import row_products
from hocket.model.moe import ExpertTables
from hocket.model.numerics import InvariantNumerics, PackedWeight
from hocket.model.packed_head import PackedHead, as_packed
from hocket.model.row_products import (
    SharedRows,
    agreement_of,
    agreement_of_heads,
    as_multiplied,
    can_share_rows,
    multiply_each,
    share_rows,
)
from hocket.model.row_tables import RowTable

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPES = pytest.mark.parametrize(("num_outputs", "num_inputs"), [(8, 192), (512, 256), (300, 600)])


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:  # pyright: ignore[reportUnusedFunction]
    if not can_share_rows(torch.bfloat16, CPU):
        pytest.skip("no FBGEMM, oneDNN or MKL here: products run in tiles")


@pytest.fixture
def fresh_trials() -> Iterator[None]:
    """Trials of this test are its own."""
    row_products._try.cache_clear()
    yield
    row_products._try.cache_clear()


def shared(weight_NK: torch.Tensor, max_table_rows: int = 0) -> SharedRows:
    found = share_rows(weight_NK, max_table_rows)
    assert found is not None
    return found


@DTYPES
@SHAPES
@pytest.mark.parametrize("max_table_rows", [0, 4])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_number_of_rows(
    dtype: torch.dtype,
    num_outputs: int,
    num_inputs: int,
    max_table_rows: int,
    num_threads: int,
) -> None:
    weight_NK = torch.randn(num_outputs, num_inputs).to(dtype)
    x_TK = torch.randn(150, num_inputs).to(dtype)
    weight = shared(weight_NK, max_table_rows)
    expected_TN = weight.linear(x_TK)
    torch.testing.assert_close(expected_TN, F.linear(x_TK, weight_NK), rtol=0.01, atol=1e-3)
    torch.set_num_threads(num_threads)
    for num_rows in (1, 2, 4, 5, 31, 150):
        assert torch.equal(weight.linear(x_TK[-num_rows:]), expected_TN[-num_rows:]), num_rows


@DTYPES
@pytest.mark.parametrize("num_outputs", range(1, 34))
def test_a_rows_place_among_others_does_not_show(dtype: torch.dtype, num_outputs: int) -> None:
    """MKL on AMD's Zen 5 adds in another order for rows at odd places where outputs are few."""
    numerics = InvariantNumerics(dtype, CPU)
    weight = numerics.pack(torch.randn(num_outputs, 72).to(dtype))
    x_TK = torch.randn(41, 72).to(dtype)
    heads = numerics.pack_heads(torch.randn(3, num_outputs, 24))
    x_THD = torch.randn(41, 3, 24)
    expected_TN, expected_THE = numerics.linear(x_TK, weight), numerics.per_head(x_THD, heads)
    for first in (1, 2, 3, 7, 16, 39):
        assert torch.equal(numerics.linear(x_TK[first:], weight), expected_TN[first:]), first
        assert torch.equal(numerics.per_head(x_THD[first:], heads), expected_THE[first:]), first


@DTYPES
def test_runs_of_rows_meet_their_own_matrices_with_the_same_bits(dtype: torch.dtype) -> None:
    weights = [shared(torch.randn(64, 96).to(dtype), 4) for _ in range(3)]
    x_RK, sizes = torch.randn(12, 96).to(dtype), (1, 9, 2)
    alone = [w.linear(part) for w, part in zip(weights, x_RK.split(list(sizes)), strict=True)]
    assert torch.equal(multiply_each(x_RK, sizes, weights), torch.cat(alone))


def test_sums_half_way_between_two_values_are_rounded_alike() -> None:
    """Whole numbers add up without an error, and above 256 every second sum is half way or so."""
    weight_NK = torch.randint(-50, 51, (256, 64)).bfloat16()
    x_TK = torch.randint(-5, 6, (16, 64)).bfloat16()
    exact = x_TK.double() @ weight_NK.double().t()
    spacing = 2.0 ** (exact.abs().clamp(min=1).log2().floor() - 7)
    assert ((exact / spacing).frac().abs() == 0.5).any()
    table = RowTable([weight_NK], 16)
    assert torch.equal(shared(weight_NK).linear(x_TK), table.linear(x_TK))


def test_elements_that_packing_rounds_are_rounded_in_tables_too() -> None:
    weight_NK = torch.randn(64, 32).bfloat16()
    weight_NK[3] *= 2.0**-36
    assert not torch.equal(as_packed(weight_NK), weight_NK)
    packed = PackedHead(weight_NK)
    x_TK = torch.randn(16, 32).bfloat16()
    sums = RowTable([as_multiplied(weight_NK).float()], 16).linear(x_TK.float())
    assert torch.equal(packed(x_TK), sums)
    assert not torch.equal(packed(x_TK), RowTable([weight_NK.float()], 16).linear(x_TK.float()))


@pytest.mark.usefixtures("fresh_trials")
def test_a_kernel_that_treats_few_rows_otherwise_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(weight_NK: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] > 12:
            return F.linear(x_TK.double(), weight_NK.double()).float()
        return F.linear(x_TK, weight_NK)

    monkeypatch.setattr(row_products, "product_of", partial(partial, uneven))
    weight_NK = torch.randn(48, 160)
    assert not agreement_of(weight_NK).of_rows
    numerics = InvariantNumerics(torch.float32, CPU)
    weight = numerics.pack(weight_NK)
    assert weight is weight_NK, "then in tiles"
    x_TK = torch.randn(21, 160)
    expected_TN = numerics.linear(x_TK, weight)
    assert torch.equal(numerics.linear(x_TK[:1], weight), expected_TN[:1])


@pytest.mark.usefixtures("fresh_trials")
def test_a_kernel_that_treats_rows_at_odd_places_otherwise_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(weight_NK: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
        products_TNK = x_TK[:, None] * weight_NK
        found_TN = products_TNK.sum(-1)
        found_TN[1::2] = products_TNK[1::2].flip(-1).cumsum(-1)[..., -1]
        return found_TN

    monkeypatch.setattr(row_products, "product_of", partial(partial, uneven))
    assert not agreement_of(torch.randn(48, 160)).of_rows


@pytest.mark.usefixtures("fresh_trials")
def test_a_table_that_rounds_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_products.HalfProduct, "rounded", staticmethod(torch.Tensor.bfloat16))
    agreement = agreement_of(torch.randn(512, 256).bfloat16())
    assert (agreement.of_rows, agreement.of_tables) == (True, False)
    assert shared(torch.randn(512, 256).bfloat16(), 4).table is None


@pytest.mark.parametrize("shape_HDE", [(4, 32, 64), (3, 12, 20), (8, 128, 64)])
def test_heads_products_have_the_same_bits_in_any_number_of_rows(
    shape_HDE: tuple[int, int, int],
) -> None:
    num_heads, num_inputs, _ = shape_HDE
    numerics = InvariantNumerics(torch.float32, CPU)
    weight_HDE = torch.randn(shape_HDE)
    weights = numerics.pack_heads(weight_HDE.transpose(1, 2))
    assert agreement_of_heads(shape_HDE).least_rows is not None
    x_THD = torch.randn(70, num_heads, num_inputs)
    expected_THE = numerics.per_head(x_THD, weights)
    torch.testing.assert_close(expected_THE, torch.einsum("thd,hde->the", x_THD, weight_HDE))
    for num_rows in (1, 2, 3, 9, 17):
        assert torch.equal(numerics.per_head(x_THD[-num_rows:], weights), expected_THE[-num_rows:])


@DTYPES
@pytest.mark.parametrize("width", [25, 64, 192, 1024])
def test_activations_have_the_same_bits_in_any_number_of_rows(
    dtype: torch.dtype, width: int
) -> None:
    torch.set_num_threads(3)
    numerics = InvariantNumerics(dtype, CPU)
    gate_up = torch.randn(257, 2 * width).to(dtype)
    expected_TI = numerics.gated(gate_up)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(expected_TI, F.silu(gate) * up)
    for num_rows in (1, 2, 7, 100):
        assert torch.equal(numerics.gated(gate_up[-num_rows:]), expected_TI[-num_rows:]), num_rows


def test_plain_silu_fails_this_check() -> None:
    """So the check can fail: threads cut the buffer, and the ends of the parts are special."""
    torch.set_num_threads(3)
    gate = torch.randn(257, 1024)
    assert not torch.equal(F.silu(gate[-100:].clone()), F.silu(gate)[-100:])


@DTYPES
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 9])
def test_expert_tables_have_the_bits_of_the_experts(
    dtype: torch.dtype, num_shared: int, num_tokens: int
) -> None:
    numerics = InvariantNumerics(dtype, CPU)
    hidden, width, num_routed, num_chosen = 96, 64, 6, 3
    matrices = [
        (torch.randn(2 * width, hidden).to(dtype), torch.randn(hidden, width).to(dtype))
        for _ in range(num_routed + num_shared)
    ]
    tables = ExpertTables(matrices, num_shared, num_chosen, numerics)
    packed = [[numerics.pack(w, with_table=False) for w in pair] for pair in matrices]
    x_TH = torch.randn(num_tokens, hidden).to(dtype)
    weights_TK = torch.rand(num_tokens, num_chosen)
    experts_TK = torch.stack([torch.randperm(num_routed)[:num_chosen] for _ in range(num_tokens)])

    def expert(number: int, x_1H: torch.Tensor) -> torch.Tensor:
        gate_up, down = packed[number]
        return numerics.linear(numerics.gated(numerics.linear(x_1H, gate_up)), down)

    results_TKH = torch.stack(
        [
            torch.cat([expert(e, x_TH[t : t + 1]) for e in experts_TK[t].tolist()])
            for t in range(num_tokens)
        ]
    )
    expected_TH = torch.bmm(weights_TK[:, None], results_TKH.float())[:, 0]
    assert torch.equal(tables(x_TH, weights_TK, experts_TK), expected_TH)
    if num_shared and num_tokens <= tables.MAX_TOKENS_WITH_SHARED:
        shared_TH = torch.cat([expert(num_routed, x_1H) for x_1H in x_TH.split(1)])
        assert torch.equal(
            tables.with_shared(x_TH, weights_TK, experts_TK), shared_TH.add_(expected_TH)
        )


def test_a_weight_of_the_other_mode_is_refused() -> None:
    numerics = InvariantNumerics(torch.float32, CPU)
    with pytest.raises(AssertionError, match="fast mode"):
        numerics.linear(torch.zeros(1, 4), PackedWeight(torch.zeros(4, 4), None))
