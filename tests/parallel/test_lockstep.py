"""Ranks in step: the same passes for all, sleep without work, and the end when one is gone."""

from __future__ import annotations

from itertools import product

import pytest

from hocket.errors import GroupLost
from hocket.parallel.lockstep import Lockstep, Pass, Wish, plan_passes
from hocket.parallel.rank_group import RankGroup
from tests.parallel.ranks import run_ranks

WISHES = [
    Wish(prompts, drafts if verifies else 0, verifies)
    for prompts, verifies, drafts in product((False, True), (False, True), (0, 1, 3))
]


def own_passes(wish: Wish, has_mtp: bool) -> list[Pass]:
    """What a rank with this wish computes, in order."""
    prompts = [Pass.MAIN, Pass.MTP] if has_mtp else [Pass.MAIN]
    drafts = [Pass.MTP] * wish.draft_passes if has_mtp else []
    return prompts * wish.computes_prompts + drafts + [Pass.MAIN] * wish.verifies


@pytest.mark.parametrize("has_mtp", [True, False])
def test_all_ranks_make_the_same_passes_whatever_each_wants(has_mtp: bool) -> None:
    pairs = [
        pair for pair in product(WISHES, WISHES) if has_mtp or not any(w.draft_passes for w in pair)
    ]

    def body(group: RankGroup) -> list[list[Pass]]:
        made: list[Pass] = []
        lockstep = Lockstep(group, has_mtp, made.append, lambda step: None)
        steps: list[list[Pass]] = []
        for pair in pairs:
            made.clear()
            wish = pair[group.rank]
            lockstep.wake(len(steps))
            with lockstep.step(wish) as is_step:
                assert is_step == any(pair)
                for own in own_passes(wish, has_mtp):
                    lockstep.enter(own)
                    made.append(own)
            steps.append(list(made))
        return steps

    first, second = run_ranks(2, body)
    assert first == second
    assert first == [list(plan_passes(pair, has_mtp)) for pair in pairs]


def test_a_group_without_work_makes_no_exchange_until_one_is_woken() -> None:
    def body(group: RankGroup) -> tuple[list[bool], list[int]]:
        woken: list[int] = []
        lockstep = Lockstep(group, True, lambda which: None, woken.append)
        found: list[bool] = []

        def turn(wish: Wish) -> None:
            with lockstep.step(wish) as is_step:
                found.append(is_step)
                if wish:
                    lockstep.enter(Pass.MAIN)

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
        with pytest.raises(ZeroDivisionError), lockstep.step(Wish(True, 0, True)):
            raise ZeroDivisionError
        return made

    assert run_ranks(1, body) == [[]]
