"""Claims about a common depth: all ranks find the same one, and it is the group's best."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.scheduling.depth_agreement import (
    Agreement,
    DepthOffer,
    DepthPrice,
    Kind,
    agree,
)
from hocket.scheduling.draft_controller import (
    DraftBatch,
    DraftController,
    DraftPolicy,
    DraftRequest,
    SpeedTarget,
)
from hocket.scheduling.step_costs import StepCosts
from hocket.types import RequestKey
from tests.scheduling.draft_world import batch_of

MAX_DRAFTS = 3

prices = st.builds(
    DepthPrice, st.integers(0, 10**9), st.integers(1, 10**9), st.sampled_from([10**6, 2**62])
)
offers = st.builds(
    DepthOffer,
    st.lists(prices, min_size=MAX_DRAFTS + 1, max_size=MAX_DRAFTS + 1).map(tuple),
    st.integers(0, MAX_DRAFTS),
    st.integers(0, MAX_DRAFTS),
    prices,
    prices,
)


@given(offers)
def test_an_offer_survives_its_exchange(offer: DepthOffer) -> None:
    numbers = offer.numbers()
    assert len(numbers) == 2 + 3 * (MAX_DRAFTS + 3)
    assert all(0 <= number < 2**63 for number in numbers)
    assert DepthOffer.from_numbers(numbers) == offer


@given(st.lists(offers, min_size=1, max_size=4))
@settings(max_examples=200)
def test_the_depth_is_the_groups_best_whatever_the_order_of_ranks(
    ranks: list[DepthOffer],
) -> None:
    agreement = agree(ranks)
    assert all(agree(order) == agreement for order in itertools.permutations(ranks))

    tokens = [sum(rank.by_depth[d].tokens_e6 for rank in ranks) for d in range(MAX_DRAFTS + 1)]
    costs = [max(rank.by_depth[d].cost_ns for rank in ranks) for d in range(MAX_DRAFTS + 1)]
    permitted = [
        min(rank.by_depth[d].permitted_ns for rank in ranks) for d in range(MAX_DRAFTS + 1)
    ]
    speeds = [Fraction(*pair) for pair in zip(tokens, costs, strict=True)]
    meeting = [d for d in range(MAX_DRAFTS + 1) if costs[d] <= permitted[d]]
    if meeting:
        best = max(speeds[d] for d in meeting)
        assert agreement.base_depth == min(d for d in meeting if speeds[d] == best)
    else:
        near = [Fraction(*pair) for pair in zip(permitted, costs, strict=True)]
        assert agreement.base_depth == near.index(max(near))


def offer(base_depth: int, more_tokens: int) -> DepthOffer:
    """Best at depth 1, with a probe one deeper that is worth so much."""
    by_depth = tuple(DepthPrice(tokens, 100) for tokens in (10, 20, 20, 20))
    return DepthOffer(by_depth, base_depth, 2, DepthPrice(more_tokens, 100))


def test_a_probe_is_made_when_the_group_has_saved_enough_for_it() -> None:
    assert agree([offer(1, 15), offer(1, 24)]) == Agreement(1, 1)
    assert agree([offer(1, 15), offer(1, 26)]) == Agreement(2, 1, Kind.MORE)


def test_ranks_that_remember_different_depths_make_no_probe() -> None:
    assert agree([offer(1, 90), offer(0, 90)]) == Agreement(1, 1)


def controller(policy: DraftPolicy, verify_s: float = 0.020) -> DraftController:
    costs = StepCosts.from_points(
        draft=[(1, 0.002), (64, 0.003)],
        verify=[(1, verify_s), (16, verify_s), (64, 3 * verify_s)],
    )
    return DraftController(policy, costs)


def requests(rank: int, number: int) -> DraftBatch:
    return batch_of([(RequestKey(f"{rank}-{i}"), DraftRequest(8)) for i in range(number)])


def test_ranks_draft_to_one_depth_and_an_idle_one_comes_along() -> None:
    policy = DraftPolicy(MAX_DRAFTS)
    ranks = [controller(policy) for _ in range(3)]
    sizes = (12, 1, 0)
    depths: set[int] = set()
    for _ in range(300):
        proposals = [
            rank.propose(requests(number, size))
            for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True))
        ]
        told = [DepthOffer.from_numbers(proposal.offer.numbers()) for proposal in proposals]
        agreement = agree(told)
        depths.add(agreement.depth)
        for number, (rank, size) in enumerate(zip(ranks, sizes, strict=True)):
            drafts = rank.allot_agreed(proposals[number], agreement)
            assert len(drafts) == size
            assert max(drafts, default=0) <= agreement.depth
            for key, num_drafts in zip(requests(number, size).keys, drafts, strict=True):
                rank.observe(key, num_drafts, 0)
    assert 0 in depths
    # Long after all drafts were refused the group still looks.
    assert all(rank.snapshot().probes > 0 for rank in ranks)


def test_with_a_fixed_number_the_deepest_rank_decides() -> None:
    ranks = [controller(DraftPolicy(MAX_DRAFTS, adaptive=False)) for _ in range(2)]
    short = batch_of([(RequestKey("a"), DraftRequest(1))])
    long = batch_of([(RequestKey("b"), DraftRequest(2)), (RequestKey("c"), DraftRequest(0))])
    proposals = [ranks[0].propose(short), ranks[1].propose(long)]
    agreement = agree([proposal.offer for proposal in proposals])
    assert agreement == Agreement(2, 2)
    assert ranks[0].allot_agreed(proposals[0], agreement) == [1]
    assert ranks[1].allot_agreed(proposals[1], agreement) == [2, 0]


def test_a_target_of_one_rank_binds_the_group() -> None:
    free = controller(DraftPolicy(MAX_DRAFTS))
    bound = controller(DraftPolicy(MAX_DRAFTS, targets=(SpeedTarget(64, 50.0),)))
    many, few = requests(0, 20), requests(1, 1)
    alone = agree([free.propose(many).offer])
    together = agree([free.propose(many).offer, bound.propose(few).offer])
    assert alone.depth == 0 < together.depth
