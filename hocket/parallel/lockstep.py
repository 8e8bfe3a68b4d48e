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
from enum import Enum
from typing import Protocol

from hocket.parallel.rank_group import RankGroup


class Pass(Enum):
    """What the ranks run together: the main model, or its MTP module."""

    MAIN = "main"
    MTP = "mtp"


@dataclass(frozen=True, slots=True)
class Wish:
    """What one rank wants of a step: chunks of prompts, drafts (this many MTP passes at most), a
    verify pass."""

    computes_prompts: bool = False
    draft_passes: int = 0
    verifies: bool = False

    def __bool__(self) -> bool:
        return self.computes_prompts or self.verifies


def plan_passes(wishes: Sequence[Wish], has_mtp: bool) -> tuple[Pass, ...]:
    """The passes of a step, the same on every rank; as many drafts as anyone wants.

    Prompt chunks come first and write their MTP entries; then drafts, then their verification.
    """
    passes: list[Pass] = []
    if any(wish.computes_prompts for wish in wishes):
        passes += [Pass.MAIN, Pass.MTP] if has_mtp else [Pass.MAIN]
    if any(wish.verifies for wish in wishes):
        passes += [Pass.MTP] * max(wish.draft_passes for wish in wishes)
        passes.append(Pass.MAIN)
    return tuple(passes)


class StepTogether(Protocol):
    """How an engine takes its steps."""

    def step(self, wish: Wish) -> AbstractContextManager[bool]:
        """Around the work that was wished for. The value tells whether anyone computes anything
        in this step; without work of one's own there is then nothing to do inside."""
        ...

    def wake(self, step: int) -> None:
        """Another rank is about to enter this step."""
        ...


class Alone:
    """One rank that is nobody's peer."""

    @contextmanager
    def step(self, wish: Wish) -> Iterator[bool]:
        yield bool(wish)

    def wake(self, step: int) -> None:
        raise AssertionError(f"nobody could have sent this wake-up for step {step}")


class Lockstep:
    """One rank's place in its group. Raises `GroupLost` when the group has lost a rank."""

    def __init__(
        self,
        group: RankGroup,
        has_mtp: bool,
        take_part: Callable[[Pass], None],
        wake_others: Callable[[int], None],
    ) -> None:
        """`take_part` runs a pass without tokens. `wake_others` tells the other ranks, without
        waiting, that this one is about to enter a step."""
        self._group = group
        self._has_mtp = has_mtp
        self._take_part = take_part
        self._wake_others = wake_others
        self._next_step = 0
        self._is_awake = False
        self._passes: list[Pass] = []

    def wake(self, step: int) -> None:
        """A wake-up for a step that this rank has already been in came late: nothing to do."""
        self._is_awake |= step >= self._next_step

    @contextmanager
    def step(self, wish: Wish) -> Iterator[bool]:
        if not (self._is_awake or wish):
            yield False
            return
        if not self._is_awake:
            self._wake_others(self._next_step)
        self._next_step += 1
        self._passes = list(plan_passes(self._everyones(wish), self._has_mtp))
        self._is_awake = bool(self._passes)
        yield self._is_awake
        # Not after an error: then this rank is out of step and must not go on.
        self._skip_to(None)

    def enter(self, own: Pass) -> None:
        """This rank is about to make a pass of its own; others make theirs of the same kind."""
        self._skip_to(own)

    def _skip_to(self, own: Pass | None) -> None:
        while self._passes:
            following = self._passes.pop(0)
            if following is own:
                return
            self._take_part(following)
        assert own is None, f"{own} was not wished for"

    def _everyones(self, wish: Wish) -> list[Wish]:
        numbers = [int(wish.computes_prompts), wish.draft_passes, int(wish.verifies)]
        return [
            Wish(bool(prompts), drafts, bool(verifies))
            for prompts, drafts, verifies in self._group.exchange(numbers)
        ]
