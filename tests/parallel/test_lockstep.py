"""Ranks in step: the same passes for all, sleep without work, and the end when one is gone."""

from __future__ import annotations

from itertools import product

import pytest

from hocket.errors import GroupLost
from hocket.parallel.lockstep import MAIN, Lockstep, Pass, Wish, plan_passes
from hocket.parallel.rank_group import RankGroup
from hocket.scheduling.depth_agreement import DepthOffer, DepthPrice, agree
from tests.parallel.ranks import run_ranks

MAX_DRAFTS = 3


def wish_of(prompts: bool, verifies: bool, drafts: int) -> Wish:
    """Drafts are worth something up to this many."""
    by_depth = tuple(DepthPrice(min(depth, drafts), 1) for depth in range(MAX_DRAFTS + 1))
    return Wish(prompts, verifies, DepthOffer(by_depth))


WISHES = [
    wish_of(prompts, verifies, drafts if verifies else 0)
    for prompts, verifies, drafts in product((False, True), (False, True), (0, 1, 3))
]


def depth_of(pair: tuple[Wish, Wish]) -> int:
    return agree([wish.offer for wish in pair]).depth


def own_passes(wish: Wish, depth: int, num_modules: int) -> list[Pass]:
    """What a rank with this wish computes, in order."""
    modules = [Pass(module) for module in range(num_modules)]
    prompts = [MAIN, *modules]
    num_drafting = max(depth, num_modules) if depth and agree([wish.offer]).depth else 0
    drafts = [modules[min(draft, num_modules - 1)] for draft in range(num_drafting)]
    return prompts * wish.computes_prompts + [*drafts, MAIN] * wish.verifies


@pytest.mark.parametrize("num_modules", [0, 1, 2])
def test_all_ranks_make_the_same_passes_whatever_each_wants(num_modules: int) -> None:
    pairs = [pair for pair in product(WISHES, WISHES) if num_modules or not depth_of(pair)]

    def body(group: RankGroup) -> list[list[Pass]]:
        made: list[Pass] = []
        lockstep = Lockstep(group, num_modules, made.append, lambda step: None)
        steps: list[list[Pass]] = []
        for pair in pairs:
            made.clear()
            wish = pair[group.rank]
            lockstep.wake(len(steps))
            with lockstep.step(wish) as agreement:
                assert (agreement is not None) == any(pair)
                for own in own_passes(wish, depth_of(pair), num_modules):
                    lockstep.enter(own)
                    made.append(own)
            steps.append(list(made))
        return steps

    first, second = run_ranks(2, body)
    assert first == second
    assert first == [list(plan_passes(pair, depth_of(pair), num_modules)) for pair in pairs]


def test_a_group_without_work_makes_no_exchange_until_one_is_woken() -> None:
    def body(group: RankGroup) -> tuple[list[bool], list[int]]:
        woken: list[int] = []
        lockstep = Lockstep(group, True, lambda which: None, woken.append)
        found: list[bool] = []

        def turn(wish: Wish) -> None:
            with lockstep.step(wish) as agreement:
                found.append(agreement is not None)
                if wish:
                    lockstep.enter(MAIN)

        if group.rank == 0:
            turn(Wish())  # asleep: returns though rank 1 does not come
            turn(Wish(verifies=True))
            turn(Wish())  # agreed with the other that nothing is left
            turn(Wish())  # asleep again
        else:
            lockstep.wake(0)
            turn(Wish())
            turn(Wish())
            lockstep.wake(1)  # late: that step is over
            turn(Wish())
        return found, woken

    (found, woken), (others, none) = run_ranks(2, body)
    assert found == [False, True, False, False]
    assert others == [True, False, False]
    assert woken == [0]
    assert none == []


def test_a_rank_that_does_not_come_ends_the_group() -> None:
    def body(group: RankGroup) -> str:
        if group.rank == 1:
            return "left"
        lockstep = Lockstep(group, True, lambda which: None, lambda step: None)
        with pytest.raises(GroupLost, match="decode-0 has lost a rank"), lockstep.step(Wish(True)):
            pass
        return "told"

    assert run_ranks(2, body, timeout_s=1.0) == ["told", "left"]


def test_after_an_error_of_its_own_a_rank_makes_no_more_passes() -> None:
    def body(group: RankGroup) -> list[Pass]:
        made: list[Pass] = []
        lockstep = Lockstep(group, True, made.append, lambda step: None)
        with pytest.raises(ZeroDivisionError), lockstep.step(Wish(True, True)):
            raise ZeroDivisionError
        return made

    assert run_ranks(1, body) == [[]]
