"""Cancels, failed reads, broken streams and late clocks at random moments: nothing is left behind.

Whatever happens, a request that finishes says exactly what the engine in one process says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hocket.execution.drafting.speculation import MTPDraftSource
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
    requests = [
        replace(
            make_request(f"s{seed}-{i}", chance.randint(1, 300), chance.randint(1, 20)),
            leg=Leg.WHOLE if chance.random() < 0.2 else Leg.PREFILL,
            deadline_s=chance.choice([0.02, 3.0, 60.0]),
        )
        for i in range(40)
    ]
    finished = serve_at_random(pair, requests, chance)
    check_outputs(pair, finished, reference)


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_on_a_decode_pool_too_small_for_prompts_that_begin_alike(
    make_pair: Callable[..., Any],
    make_request: Callable[..., StartRequest],
    reference: Any,
    seed: int,
) -> None:
    """Imports, recomputed prompts, shared blocks and requests that give way, all at once."""
    chance = random.Random(seed)
    pair = make_pair(
        num_blocks=24,
        decode_blocks=6,
        max_batch=4,
        draft_tokens=2,
        draft_source=MTPDraftSource,
        reserve_output_share=0.0,
        prefix_cache=True,
    )
    families = [make_request(name, 256).token_ids for name in ("even", "odd")]
    requests = [
        replace(
            make_request(f"s{seed}-{i}", 1, chance.randint(1, 90)),
            token_ids=(*families[i % 2][: chance.randint(0, 200)], i),
            leg=Leg.WHOLE if chance.random() < 0.2 else Leg.PREFILL,
            deadline_s=chance.choice([0.1, 3.0, 60.0]),
        )
        for i in range(40)
    ]
    finished = serve_at_random(pair, requests, chance)
    assert pair.decode_scheduler.counters.preemptions > 0
    check_outputs(pair, finished, reference)


def serve_at_random(
    pair: Any, requests: list[StartRequest], chance: random.Random
) -> list[StartRequest]:
    """Starts and disturbs them, and checks that nothing is left; those that finished."""
    pair.fabric.is_automatic = False
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

    return [
        r for r in live if pair.outcomes[r.key].is_over and not pair.outcomes[r.key].find(Failed)
    ]


def check_outputs(pair: Any, finished: list[StartRequest], reference: Any) -> None:
    assert len(finished) >= 5
    expected = reference.run(finished)
    outputs = [pair.outcomes[request.key].token_ids for request in finished]
    assert outputs == [local.token_ids for local in expected]
