"""Both ownership machines under any order of events: A14 and E3 on the pure machines.

Numbers choose events (`ownership_world`). Hypothesis looks for an order that breaks a promise and
makes it short; seeded walks try many more in the same time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.ownership_world import ACTIONS, World

NUM_WALKS = 6000
STEPS = 80


def walk(choices: Iterable[int]) -> World:
    """The events of `choices`, and then rest."""
    world = World()
    for choice in choices:
        world.act(choice)
    world.come_to_rest()
    return world


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 64 * len(ACTIONS)), max_size=120))
def test_no_order_of_events_leaks_a_block_or_serves_a_wrong_byte(choices: list[int]) -> None:
    walk(choices)


def test_many_random_orders_leak_nothing_and_serve_no_wrong_byte() -> None:
    chance = random.Random(4)
    num_received = 0
    for number in range(NUM_WALKS):
        choices = [chance.randrange(64 * len(ACTIONS)) for _ in range(STEPS)]
        try:
            num_received += walk(choices).num_received
        except AssertionError as error:
            raise AssertionError(f"walk {number}: {choices}") from error
    assert num_received > NUM_WALKS / 4, "hardly any hand-off went through: the walks prove little"
