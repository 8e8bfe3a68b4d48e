"""The dispatcher of one rank: rows reach their experts and come back."""

from __future__ import annotations

import pytest
import torch

from hocket.parallel.expert_dispatch import LocalDispatcher


@pytest.mark.parametrize("row_tile", [1, 8])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_rows_come_back_weighted(num_tokens: int, row_tile: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TH = torch.randn(num_tokens, 6, generator=generator)
    experts_TK = torch.stack(
        [torch.randperm(5, generator=generator)[:3] for _ in range(num_tokens)]
    )
    weights_TK = torch.rand(num_tokens, 3, generator=generator)
    dispatcher = LocalDispatcher()
    rows = dispatcher.dispatch(hidden_TH, experts_TK, row_tile)
    result_RH = torch.empty_like(rows.hidden_RH.contiguous())
    for expert, start, stop in rows.segments:
        assert (stop - start) % row_tile == 0
        result_RH[start:stop] = rows.hidden_RH[start:stop] * (expert + 1)
    combined_TH = dispatcher.combine(result_RH, rows, weights_TK)
    factor_T1 = (weights_TK * (experts_TK + 1)).sum(-1, keepdim=True)
    torch.testing.assert_close(combined_TH, hidden_TH * factor_T1)


def test_only_chosen_experts_get_rows() -> None:
    rows = LocalDispatcher().dispatch(torch.randn(2, 4), torch.tensor([[3, 1], [1, 7]]), 1)
    assert [(expert, stop - start) for expert, start, stop in rows.segments] == [
        (1, 2),
        (3, 1),
        (7, 1),
    ]
