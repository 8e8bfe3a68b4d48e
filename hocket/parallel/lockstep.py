"""Keeps the ranks of an expert-parallel group in step: who computes what, and who only takes part.

Every pass through the model is a collective, so all ranks must make the same passes in the same
order. A step begins with one small exchange: each rank says what it wants to compute, and from
everyone's wishes `plan_passes` gives all of them the same list. A rank then goes through its own
work, which is some of these passes in this order; before each of its own it takes part, without
tokens, in those that come earlier, and at the end of the step in what is left.

When an exchange finds that nobody wants anything, the group falls asleep: no more exchanges until
a rank has work again. That rank wakes the others and goes ahead into the next exchange.

`Lockstep` is one rank's; `decode_workers/engine.py` uses it, or `Alone` where there is no group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from hocket.parallel.rank_group import RankGroup
from hocket.scheduling.depth_agreement import NO_DRAFTS, Agreement, DepthOffer, agree


@dataclass(frozen=True, slots=True)
class Pass:
    """What the ranks run together: an MTP module, numbered from 0, or with None the main model."""

    module: int | None = None


MAIN = Pass()


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank wants of a step: chunks of prompts, a verify pass, and `offer`, what its drafts
    would be worth by their number. A step that drafts goes through all modules in order, and then
    on through the last one."""

    computes_prompts: bool = False
    verifies: bool = False
    offer: DepthOffer = NO_DRAFTS

    def __bool__(self) -> bool:
        return self.computes_prompts or self.verifies


def plan_passes(wishes: Sequence[Wish], depth: int, num_modules: int) -> tuple[Pass, ...]:
    """The passes of a step, the same on every rank, `depth` of them for drafts.

    Prompt chunks come first and write their MTP entries; then drafts, then their verification.
    """
    passes: list[Pass] = []
    if any(wish.computes_prompts for wish in wishes):
        passes += [MAIN, *map(Pass, range(num_modules))]
    if any(wish.verifies for wish in wishes):
        num_drafting = max(depth, num_modules) if depth else 0
        passes += [Pass(min(draft, num_modules - 1)) for draft in range(num_drafting)]
        passes.append(MAIN)
    return tuple(passes)


class StepTogether(Protocol):
    """How an engine takes its steps."""

    def step(self, wish: Wish) -> AbstractContextManager[Agreement | None]:
        """Around the work that was wished for. The value says how many drafts were agreed upon;
        None: nobody computes anything in this step, and there is nothing to do inside."""
        ...

    def wake(self, step: int) -> None:
        """Another rank is about to enter this step."""
        ...


class Alone:
    """One rank that is nobody's peer."""

    @contextmanager
    def step(self, wish: Wish) -> Iterator[Agreement | None]:
        yield agree([wish.offer]) if wish else None

    def wake(self, step: int) -> None:
        raise AssertionError(f"nobody could have sent this wake-up for step {step}")


class Lockstep:
    """One rank's place in its group. Raises `GroupLost` when the group has lost a rank."""

    def __init__(
        self,
        group: RankGroup,
        num_modules: int,
        take_part: Callable[[Pass], None],
        wake_others: Callable[[int], None],
    ) -> None:
        """`num_modules`: the model's MTP modules. `take_part` runs a pass without tokens.
        `wake_others` tells the other ranks, without waiting, that this one is about to enter a
        step."""
        self._group = group
        self._num_modules = num_modules
        self._take_part = take_part
        self._wake_others = wake_others
        self._next_step = 0
        self._is_awake = False
        self._passes: list[Pass] = []

    def wake(self, step: int) -> None:
        """A wake-up for a step that this rank has already been in came late: nothing to do."""
        self._is_awake |= step >= self._next_step

    @contextmanager
    def step(self, wish: Wish) -> Iterator[Agreement | None]:
        if not (self._is_awake or wish):
            yield None
            return
        if not self._is_awake:
            self._wake_others(self._next_step)
        self._next_step += 1
        wishes = self._everyones(wish)
        agreement = agree([wish.offer for wish in wishes])
        self._passes = list(plan_passes(wishes, agreement.depth, self._num_modules))
        self._is_awake = bool(self._passes)
        yield agreement if self._is_awake else None
        # Not after an error: then this rank is out of step and must not go on.
        self._skip_to(None)

    def enter(self, own: Pass) -> None:
        """This rank is about to make a pass of its own; others make theirs of the same kind."""
        self._skip_to(own)

    def _skip_to(self, own: Pass | None) -> None:
        while self._passes:
            following = self._passes.pop(0)
            if following == own:
                return
            self._take_part(following)
        assert own is None, f"{own} was not wished for"

    def _everyones(self, wish: Wish) -> list[Wish]:
        numbers = [int(wish.computes_prompts), int(wish.verifies), *wish.offer.numbers()]
        return [
            Wish(bool(prompts), bool(verifies), DepthOffer.from_numbers(offer))
            for prompts, verifies, *offer in self._group.exchange(numbers)
        ]
