"""Cancels, failed reads, broken streams and late clocks at random moments: nothing is left behind.

Whatever happens, a request that finishes says exactly what the engine in one process says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hocket.types import Failed, Leg, StartRequest


def disturb(pair: Any, chance: random.Random, live: list[StartRequest]) -> None:
    """At most one thing that goes wrong, and some reads that go right."""
    fabric = pair.fabric
    for read in list(fabric.reads):
        fate = chance.random()
        if fate < 0.4:
            fabric.deliver(read)
        elif fate < 0.44:
            fabric.fail(read)
    event = chance.random()
    if live and event < 0.02:
        gone = live.pop(chance.randrange(len(live)))
        pair.cancel(gone.key)
    elif event < 0.03:
        pair.break_a_stream(chance)
    elif event < 0.033:
        pair.now += chance.uniform(0.5, 6.0)


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leak_nothing_and_never_change_an_output(
    make_pair: Callable[..., Any],
    make_request: Callable[..., StartRequest],
    reference: Any,
    seed: int,
) -> None:
    chance = random.Random(seed)
    pair = make_pair(num_blocks=24, max_batch=4)
    pair.fabric.is_automatic = False
    requests = [
        replace(
            make_request(f"s{seed}-{i}", chance.randint(1, 300), chance.randint(1, 20)),
            leg=Leg.WHOLE if chance.random() < 0.2 else Leg.PREFILL,
            deadline_s=chance.choice([0.02, 3.0, 60.0]),
        )
        for i in range(40)
    ]
    waiting, live = list(requests), []
    for _ in range(600):
        if waiting and chance.random() < 0.3:
            live.append(waiting.pop())
            pair.start(live[-1])
        disturb(pair, chance, live)
        pair.turn()
    pair.fabric.is_automatic = True
    for request in live:
        if not pair.outcomes[request.key].is_over:
            pair.run_until(lambda key=request.key: pair.outcomes[key].is_over)
    pair.now += 6.0  # Exports whose decode leg failed are given up by their own deadline.
    pair.settle()
    pair.assert_nothing_is_held()

    finished = [
        r for r in live if pair.outcomes[r.key].is_over and not pair.outcomes[r.key].find(Failed)
    ]
    assert len(finished) >= 5
    expected = reference.run(finished)
    outputs = [pair.outcomes[request.key].token_ids for request in finished]
    assert outputs == [local.token_ids for local in expected]
