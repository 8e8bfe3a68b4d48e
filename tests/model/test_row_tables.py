"""Products by tables and the packed head compute what plain products compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hocket.model.packed_head import PackedHead, can_pack_head
from hocket.model.row_tables import RowTable


@pytest.mark.parametrize("num_outputs", [16, 40, 384, 928])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_table_multiplies_like_linear(
    num_outputs: int, dtype: torch.dtype, num_rows: int
) -> None:
    weight_NK = torch.randn(num_outputs, 24).to(dtype)
    x_TK = torch.randn(num_rows, 24).to(dtype)
    found = RowTable([weight_NK], max_products=3).linear(x_TK)
    torch.testing.assert_close(found, F.linear(x_TK, weight_NK))


@pytest.mark.parametrize("num_outputs", [16, 400])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_each_matrix_meets_its_own_rows(num_outputs: int, num_rows: int) -> None:
    weights_ENK = torch.randn(3, num_outputs, 8)
    x_TEK = torch.randn(num_rows, 3, 8)
    found = RowTable(list(weights_ENK), max_products=6).each(x_TEK)
    torch.testing.assert_close(found, torch.einsum("tek,enk->ten", x_TEK, weights_ENK))


@pytest.mark.parametrize("num_outputs", [16, 400])
def test_chosen_matrices_are_summed(num_outputs: int) -> None:
    weights_ENK = torch.randn(5, num_outputs, 8)
    chosen_BC = torch.tensor([[4, 0], [2, 2], [1, 3]])
    x_BCK = torch.randn(3, 2, 8)
    found = RowTable(list(weights_ENK), max_products=6).sums(x_BCK, chosen_BC)
    expected = torch.einsum("bck,bcnk->bn", x_BCK, weights_ENK[chosen_BC])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_packed_head_loses_nothing(scale: float, num_rows: int) -> None:
    head_VH = (torch.randn(50, 64) * scale).bfloat16()
    if not can_pack_head(head_VH):
        pytest.skip("no FBGEMM here")
    hidden_NH = torch.randn(num_rows, 64).bfloat16()
    logits_NV = PackedHead(head_VH)(hidden_NH)
    exact_NV = hidden_NH.double() @ head_VH.double().t()
    assert logits_NV.dtype == torch.float32
    torch.testing.assert_close(logits_NV.double(), exact_NV, rtol=1e-5, atol=1e-5 * scale)
