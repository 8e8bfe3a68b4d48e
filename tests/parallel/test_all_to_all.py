"""Rows sent to the ranks that own their experts give what one rank with all experts gives."""

from __future__ import annotations

import pytest
import torch

from hocket.errors import ConfigError
from hocket.parallel.expert_dispatch import AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from hocket.parallel.expert_placement import ExpertPlacement
from hocket.parallel.rank_group import RankGroup
from tests.parallel.ranks import run_ranks

NUM_EXPERTS, PER_TOKEN, HIDDEN = 6, 3, 16
WEIGHTS = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7))


def tokens_of(rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and weights of one rank's tokens."""
    generator = torch.Generator().manual_seed(100 * rank + num_tokens)
    experts = [torch.randperm(NUM_EXPERTS, generator=generator) for _ in range(num_tokens)]
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16(),
        torch.stack(experts)[:, :PER_TOKEN] if experts else torch.empty(0, PER_TOKEN).long(),
        torch.rand(num_tokens, PER_TOKEN, generator=generator),
    )


def through(dispatcher: TokenDispatcher, rank: int, num_tokens: int, tile: int) -> torch.Tensor:
    hidden_TH, experts_TK, weights_TK = tokens_of(rank, num_tokens)
    rows = dispatcher.dispatch(hidden_TH, experts_TK, tile)
    result_RH = rows.hidden_RH.clone()
    for expert, start, stop in rows.segments:
        assert (stop - start) % tile == 0
        for first in range(start, stop, tile):
            part = rows.hidden_RH[first : first + tile].float() @ WEIGHTS[expert]
            result_RH[first : first + tile] = part.to(result_RH.dtype)
    return dispatcher.combine(result_RH, rows, weights_TK)


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("tokens_by_rank", [[5, 3], [0, 4], [0, 0], [1, 0, 9, 2]])
def test_every_rank_gets_what_one_rank_alone_would(tokens_by_rank: list[int], tile: int) -> None:
    placement = ExpertPlacement(NUM_EXPERTS, len(tokens_by_rank))

    def body(group: RankGroup) -> torch.Tensor:
        dispatcher = AllToAllDispatcher(group, placement)
        return through(dispatcher, group.rank, tokens_by_rank[group.rank], tile)

    for rank, combined in enumerate(run_ranks(len(tokens_by_rank), body)):
        alone = (
            through(LocalDispatcher(), rank, tokens_by_rank[rank], tile)
            if (tokens_by_rank[rank])
            else torch.empty(0, HIDDEN)
        )
        assert torch.equal(combined, alone)


def test_experts_are_spread_in_runs_without_gap() -> None:
    for num_ranks in range(1, NUM_EXPERTS + 1):
        placement = ExpertPlacement(NUM_EXPERTS, num_ranks)
        owned = [expert for rank in range(num_ranks) for expert in placement.experts_of(rank)]
        assert owned == list(range(NUM_EXPERTS))
        assert max(placement.counts()) - min(placement.counts()) <= 1


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.group_size is 7.* 6 experts"):
        ExpertPlacement(NUM_EXPERTS, NUM_EXPERTS + 1)


@pytest.mark.gpu
def test_a_group_of_one_over_nccl_gives_what_the_local_dispatcher_gives() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")

    def body(group: RankGroup) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TH, experts_TK, weights_TK = (part.to(device) for part in tokens_of(0, 7))
        combined = []
        for dispatcher in (
            AllToAllDispatcher(group, ExpertPlacement(NUM_EXPERTS, 1)),
            LocalDispatcher(),
        ):
            rows = dispatcher.dispatch(hidden_TH, experts_TK, 8)
            combined.append(dispatcher.combine(rows.hidden_RH * 2, rows, weights_TK))
        return combined[0], combined[1]

    ((sent, kept),) = run_ranks(1, body, device=device)
    assert torch.equal(sent, kept)
