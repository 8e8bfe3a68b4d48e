"""How a scenario shows that a guard is needed: it fails when the guard is taken out.

A guard is a fence, a deadline, a check or a dedup. It is taken out by replacing the smallest thing
that holds it, for one test; its scenario, which passes as long as the guard is there, must fail
then. So no scenario passes for want of a danger. On both transports, because one that copies within
a call would not show a missing fence. The guards are in `test_*_guards.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.scenarios.hand_off_world import World
from tests.scenarios.transfers import Transfer

Patch = pytest.MonkeyPatch

# What a scenario fails with: its own claim, or the assertion, lookup or end of time that a worker
# without the guard runs into.
_FAILURES = (AssertionError, LookupError, TimeoutError)


@dataclass(frozen=True)
class Guard:
    """How to take it out, and the scenario that fails then."""

    remove: Callable[[Patch], None]
    scenario: Callable[..., None]


def replacing(owner: Any, name: str, stand_in: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, stand_in)


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[Patch], None]:
    """`wrapper` is called with the real method first."""
    real = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args: wrapper(real, *args))


def without_limit(settings: type, **limits: float) -> Callable[[Patch], None]:
    """The owner of a hand-off's half goes by other limits than it was told."""
    return around(settings, "limits", lambda real, self: replace(real(self), **limits))


def both(*removals: Callable[[Patch], None]) -> Callable[[Patch], None]:
    def remove(patch: Patch) -> None:
        for removal in removals:
            removal(patch)

    return remove


def run(scenario: Callable[..., None], transfer: Transfer) -> None:
    """A scenario asks for a transport, or for a world on one."""
    if "transfer" in scenario.__annotations__:
        scenario(transfer)
        return
    world = World(transfer)
    try:
        scenario(world)
    finally:
        world.close()


def assert_the_scenario_needs_it(guard: Guard, run: Callable[[], None]) -> None:
    run()
    with pytest.MonkeyPatch.context() as patch:
        guard.remove(patch)
        with pytest.raises(_FAILURES):
            run()
