"""Claims about growth and preemption: who gets a block when there is none, and what it costs.

The pool has 8 blocks of 16 tokens unless said otherwise, and nothing is reserved of an output but
the first step's room, so that requests meet at the pool's end.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from decode_workers.import_stream import StreamGone
from hocket.errors import HandOffFailed
from hocket.execution.engine_thread import BeginDrain, CancelRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import Finished, Joined, RequestKey
from tests.decode_workers.rig import BLOCK_TOKENS, Rig

NUM_BLOCKS = 8
MakeWorker = Callable[..., Any]


@pytest.fixture
def rig(make_worker: MakeWorker) -> Rig:
    return Rig(make_worker(reserve_output_share=0.0))


def undisturbed(make_worker: MakeWorker, start: Callable[[Rig], None]) -> Rig:
    """The same requests in a pool that has room for everything."""
    rig = Rig(make_worker(num_blocks=64))
    start(rig)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.num_preemptions == 0
    return rig


def test_a_running_request_grows_by_single_blocks(rig: Rig) -> None:
    rig.start("a", prompt=20, max_tokens=60)
    rig.turn()
    held = [NUM_BLOCKS - rig.free_blocks]
    while not rig.of(Finished):
        rig.turn()
        held.append(NUM_BLOCKS - rig.free_blocks)
    # 24 slots at first; at the end 79, of which the last token needs none.
    assert held[0] == 2
    assert max(held) == 5
    assert all(after - before in (0, 1) for before, after in pairwise(held[:-1]))
    assert rig.num_preemptions == 0


def test_many_that_fit_only_one_by_one_all_end_in_order_of_arrival(rig: Rig) -> None:
    """Nobody starves: the oldest is never the one to give way."""
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        rig.start(name, prompt=20, max_tokens=100)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.of(Finished) == names
    assert rig.num_preemptions > 4
    assert rig.failures() == []


def test_the_oldest_emits_in_every_step_to_its_end(rig: Rig) -> None:
    for name in ("a", "b", "c"):
        rig.start(name, prompt=20, max_tokens=100)
    rig.turn_until(lambda: bool(rig.output("a")))
    while "a" not in rig.of(Finished):
        before = len(rig.events)
        said = len(rig.output("a"))
        rig.turn()
        assert len(rig.events) == before or len(rig.output("a")) > said
    assert rig.num_preemptions > 0


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_who_gave_way_says_what_it_says_undisturbed_and_joins_once(
    make_worker: MakeWorker, temperature: float, prefix_cache: bool
) -> None:
    def start(rig: Rig) -> None:
        for i, name in enumerate(("a", "b", "c")):
            sampling = SamplingParams(temperature, seed=i, top_logprobs=0)
            rig.start(name, prompt=17 + i, max_tokens=90, sampling=sampling)

    rig = Rig(make_worker(reserve_output_share=0.0, prefix_cache=prefix_cache))
    start(rig)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.num_preemptions > 1
    assert sorted(rig.of(Joined)) == ["a", "b", "c"]
    expected = undisturbed(make_worker, start)
    for i, name in enumerate(("a", "b", "c")):
        assert rig.output(name) == expected.output(name)
        usage = rig.usage(name)
        assert (usage.prompt_tokens, usage.output_tokens) == (17 + i, 90)
        # One token by the prompt's end, and one more each time that it was computed again.
        assert usage.drafts.verify_steps > 0
        assert 90 - 1 - rig.num_preemptions <= usage.drafts.emitted_tokens <= 90 - 1


def test_its_own_blocks_are_found_again(make_worker: MakeWorker) -> None:
    """Nobody else wants blocks by then: all that is computed again is what was not complete."""
    rig = Rig(make_worker(reserve_output_share=0.0, prefix_cache=True))
    rig.start("a", prompt=60, max_tokens=30)
    rig.start("b", prompt=33, max_tokens=60, token_ids=tuple(range(16, 49)))
    rig.turn_until(lambda: rig.num_preemptions == 1)
    computed = rig.turn().load.computed_prompt_tokens
    assert computed == 60 + 33
    rig.turn_until(lambda: "a" in rig.of(Finished))
    # A finished request's blocks are the first to be used again, before those of b.
    rig.turn_until(lambda: rig.is_at_rest)
    again = rig.turn().load.computed_prompt_tokens - computed
    assert 0 < again < 2 * BLOCK_TOKENS
    assert rig.usage("b").cached_tokens == 0, "its client's prompt was computed"


def test_one_that_gives_way_in_its_prompt_joins_once_when_it_is_whole(
    make_worker: MakeWorker,
) -> None:
    rig = Rig(make_worker(reserve_output_share=0.0, num_blocks=7))
    rig.start("a", prompt=30, max_tokens=60, max_draft_tokens=0)
    rig.turn_until(lambda: len(rig.output("a")) > 15)
    rig.start("b", prompt=60, max_tokens=20)
    rig.turn_until(lambda: rig.num_preemptions == 1)
    assert rig.of(Joined) == ["a"]
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.of(Joined) == rig.of(Finished) == ["a", "b"]
    assert rig.usage("b").output_tokens == len(rig.output("b")) == 20


def test_drafts_shrink_before_anyone_gives_way(make_worker: MakeWorker) -> None:
    """Two requests whose outputs end with the pool's last slots: without drafts there is room."""
    rig = Rig(make_worker(reserve_output_share=0.0, num_blocks=4))
    for name in ("a", "b"):
        rig.start(name, prompt=BLOCK_TOKENS, max_tokens=BLOCK_TOKENS)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.num_preemptions == 0
    assert rig.usage("a").drafts.drafted_tokens > 0


def test_an_import_keeps_its_blocks_and_others_sit_out_until_it_ends(rig: Rig) -> None:
    rig.start("a", prompt=20, max_tokens=100)
    rig.turn_until(lambda: bool(rig.output("a")))
    rig.import_("b", prompt=90)
    for _ in range(200):
        rig.turn()
    assert rig.free_blocks == 0
    said = len(rig.output("a"))
    rig.turn(5)
    assert (len(rig.output("a")), rig.num_preemptions) == (said, 0)
    rig.engine.take(StreamGone(RequestKey("b"), HandOffFailed("cut")), rig.now)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.of(Finished) == ["a", "b"]


def test_nobody_is_admitted_on_a_block_that_a_running_request_waits_for(rig: Rig) -> None:
    rig.start("a", prompt=20, max_tokens=100)
    rig.turn_until(lambda: bool(rig.output("a")))
    rig.import_("b", prompt=90)
    rig.turn(100)
    assert rig.free_blocks == 0
    rig.import_("c", prompt=90)
    rig.turn()
    rig.engine.take(CancelRequest(RequestKey("b")), rig.now)
    said = len(rig.output("a"))
    rig.turn(2)
    assert len(rig.output("a")) > said, "c has taken what a needs"


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_cancel_and_deadline_reach_who_gave_way(rig: Rig, leave: str) -> None:
    rig.start("a", prompt=20, max_tokens=100)
    rig.start("b", prompt=20, max_tokens=100, deadline_s=2.0)
    rig.turn_until(lambda: rig.num_preemptions == 1)
    said = len(rig.output("b"))
    assert said > 0
    if leave == "cancel":
        rig.engine.take(CancelRequest(RequestKey("b")), rig.now)
    else:
        rig.now += 2.0
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.failures() == [("b", "CANCELLED" if leave == "cancel" else "DEADLINE_EXCEEDED")]
    assert len(rig.output("b")) == said
    assert rig.of(Finished) == ["a"]


def test_a_draining_worker_still_finishes_who_gave_way(rig: Rig) -> None:
    for name in ("a", "b"):
        rig.start(name, prompt=20, max_tokens=100)
    rig.turn_until(lambda: rig.num_preemptions == 1)
    rig.engine.take(BeginDrain(), rig.now)
    assert not rig.turn().is_drained
    rig.turn_until(lambda: rig.of(Finished) == ["a", "b"])
    assert rig.turn().is_drained


def test_a_migrated_request_that_gives_way_counts_only_its_own_output(rig: Rig) -> None:
    rig.start("a", prompt=20, max_tokens=100)
    rig.start("b", prompt=30, max_tokens=90, generated_tokens=10)
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.num_preemptions > 0
    usage = rig.usage("b")
    assert (usage.prompt_tokens, usage.output_tokens) == (20, 90)


def test_a_preemption_is_logged_with_its_request_and_without_its_tokens(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "decode_workers.engine")
    for name in ("a", "b"):
        rig.start(name, prompt=20, max_tokens=100)
    rig.turn_until(lambda: rig.num_preemptions == 1)
    (record,) = [r for r in caplog.records if r.getMessage() == "preempted"]
    fields = vars(record)
    told = {name: fields[name] for name in ("request_id", "attempt", "blocks", "in_favour_of")}
    assert told == {"request_id": "b", "attempt": 0, "blocks": 4, "in_favour_of": "a#0"}


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_arrivals_and_cancels_leave_nothing_and_starve_nobody(
    make_worker: MakeWorker, seed: int, prefix_cache: bool
) -> None:
    """Everyone who is not cancelled ends, those of one kind in order of arrival."""
    chance = random.Random(seed)
    rig = Rig(
        make_worker(
            num_blocks=chance.randint(4, 10),
            reserve_output_share=chance.choice([0.0, 0.25, 0.6]),
            prefix_cache=prefix_cache,
        )
    )
    capacity = rig.runner.cache.pool.num_blocks * BLOCK_TOKENS
    sizes: dict[str, tuple[int, int]] = {}
    for i in range(18):
        prompt = chance.randint(1, min(100, capacity - 1))
        sizes[f"r{i}"] = (prompt, chance.randint(1, min(60, capacity - prompt)))
    equals = [f"r{i}" for i in range(0, 18, 3)]
    sizes |= dict.fromkeys(equals, (20, 40))
    for name, (prompt, max_tokens) in sizes.items():
        while rig.worker.scheduler.num_waiting >= 5:
            rig.turn()
        salt, num_drafts = chance.choice([(b"", 0), (b"x", 0), (b"", 3)])
        if name in equals:
            salt, num_drafts = b"", 1
        rig.start(name, prompt, max_tokens, tenant_salt=salt, max_draft_tokens=num_drafts)
        for _ in range(chance.choice([0, 0, 1, 5, 30])):
            rig.turn()
        if chance.random() < 0.15:
            gone = chance.choice(sorted(sizes)[: len(rig.of(Joined)) + 1])
            rig.engine.take(CancelRequest(RequestKey(gone)), rig.now)
    rig.turn_until(lambda: rig.is_at_rest, most=5000)
    cancelled = {name for name, reason in rig.failures() if reason == "CANCELLED"}
    finished = rig.of(Finished)
    assert set(finished) == set(sizes) - cancelled
    for name in finished:
        assert len(rig.output(name)) == sizes[name][1]
    assert [n for n in finished if n in equals] == [n for n in equals if n in finished]


def test_all_output_reserved_means_that_nobody_gives_way(make_worker: MakeWorker) -> None:
    rig = Rig(make_worker(reserve_output_share=1.0))
    for name in ("a", "b", "c"):
        rig.start(name, prompt=20, max_tokens=60, stopping=StoppingParams(60))
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.num_preemptions == 0
    assert rig.of(Finished) == ["a", "b", "c"]
