"""Prompts go where their beginning is cached, unless that would crowd one worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from control_plane.degradation import WARN_EVERY_S, Degradation
from control_plane.router.pool import WorkerPool
from control_plane.router.prefixes import KnownPrefixes, PromptPrefix
from control_plane.router.route import choose_pair, choose_whole
from control_plane.router.scorers import cache_credit
from control_plane.router.snapshot import Books, Need, Placement, WorkerSnapshot
from hocket.telemetry import GatewayMetrics
from hocket.types import Load, Role, WorkerDescription
from tests.control_plane.test_router import Directory, IdleSession, decode, prefill, worker

BLOCK = 64


def prefix(*blocks: int, salt: bytes = b"") -> PromptPrefix:
    """Of a prompt whose blocks are these numbers, and a rest of a few tokens."""
    return PromptPrefix([b for b in blocks for _ in range(BLOCK)] + [9, 9, 9], salt)


def test_blocks_are_known_by_all_that_comes_before_them() -> None:
    known = KnownPrefixes(100)
    known.add(prefix(1, 2, 3).hashes(BLOCK))
    assert known.count(prefix(1, 2, 3).hashes(BLOCK)) == 3
    assert known.count(prefix(1, 2, 4, 3).hashes(BLOCK)) == 2
    assert known.count(prefix(2, 3).hashes(BLOCK)) == 0
    assert known.count(PromptPrefix([1] * (BLOCK - 1)).hashes(BLOCK)) == 0


def test_c13_tenants_of_another_salt_have_nothing_in_common() -> None:
    known = KnownPrefixes(100)
    known.add(prefix(1, 2, salt=b"a").hashes(BLOCK))
    assert known.count(prefix(1, 2, salt=b"b").hashes(BLOCK)) == 0
    assert known.count(prefix(1, 2).hashes(BLOCK)) == 0
    assert known.count(prefix(1, 2, salt=b"a").hashes(BLOCK)) == 2


def test_what_is_remembered_is_no_more_than_the_worker_has_room_for() -> None:
    """Of a prompt the end goes first, and what was used again stays."""
    known = KnownPrefixes(4)
    known.add(prefix(1, 2, 3).hashes(BLOCK))
    known.add(prefix(4, 5).hashes(BLOCK))
    assert known.count(prefix(1, 2, 3).hashes(BLOCK)) == 2
    known.add(prefix(1, 2).hashes(BLOCK))
    known.add(prefix(6, 7).hashes(BLOCK))
    assert known.count(prefix(1, 2).hashes(BLOCK)) == 2
    assert known.count(prefix(4, 5).hashes(BLOCK)) == 0


def test_a_prompt_goes_where_its_beginning_is() -> None:
    warm = replace(prefill("warm"), cached_tokens=64)
    workers = [prefill("cold"), warm, decode("d")]
    for rotation in range(4):
        placement = choose_pair(workers, Need(100, 10), rotation)
        assert placement.prefill.worker_id == "warm"
        assert placement.promised_tokens == 64
    whole = [decode("cold"), replace(decode("warm"), cached_tokens=64)]
    placement = choose_whole(whole, Need(100, 10))
    assert (placement.decode.worker_id, placement.promised_tokens) == ("warm", 64)
    assert placement.is_whole


def test_a_queue_that_is_longer_than_what_it_saves_is_not_worth_it() -> None:
    warm = replace(prefill("warm", queued=65), cached_tokens=64)
    assert choose_pair([prefill("cold"), warm, decode("d")], Need(100, 10)).promised_tokens == 0


def test_credit_for_the_cache_shrinks_with_every_prompt_ahead() -> None:
    idle = replace(prefill("p"), cached_tokens=120)
    credits = [cache_credit(replace(idle, books=Books(prompts=n))) for n in range(4)]
    assert credits == [120, 60, 40, 30]
    waiting = replace(idle, load=Load(waiting_requests=3))
    assert cache_credit(waiting) == 30


@dataclass
class Reader:
    """A prefill worker that reads prompts one after the other, and caches what it has read. Of each
    prompt in its queue: when it is read, and how many tokens of it are computed."""

    has_beginning: bool
    queue: list[tuple[float, int]] = field(default_factory=list)
    served: int = 0
    computed: int = 0
    most_wait_s: float = 0.0

    def snapshot(self, name: str, now: float, shared: int) -> WorkerSnapshot:
        while self.queue and self.queue[0][0] <= now:
            self.queue.pop(0)
            self.has_beginning = True
        number = len(self.queue)
        books = Books(number, number, sum(tokens for _, tokens in self.queue))
        cached_tokens = shared if self.has_beginning else 0
        worker = prefill(name, max_prompt_tokens=10**6, num_blocks=10**6)
        return replace(worker, books=books, cached_tokens=cached_tokens)

    def take(self, now: float, tokens: int, speed: float) -> None:
        begins_s = max(now, self.queue[-1][0]) if self.queue else now
        self.queue.append((begins_s + tokens / speed, tokens))
        self.served += 1
        self.computed += tokens
        self.most_wait_s = max(self.most_wait_s, begins_s - now)


def crowd(*, shared: int, own: int, every_s: float, requests: int = 100) -> list[Reader]:
    """So many requests share `shared` tokens and have `own` tokens of theirs, one comes every
    `every_s`. Of four workers, which read 40,000 tokens a second, one has read the beginning."""
    readers = [Reader(has_beginning=i == 0) for i in range(4)]
    decoder = decode("d", num_blocks=10**6, max_context_tokens=10**6)
    for number in range(requests):
        now = number * every_s
        workers = [r.snapshot(f"p{i}", now, shared) for i, r in enumerate(readers)]
        placement = choose_pair([*workers, decoder], Need(shared + own, 10), number)
        reader = readers[int(placement.prefill.worker_id[1:])]
        reader.take(now, shared + own - placement.promised_tokens, 40_000)
    return readers


def share(numbers: list[int]) -> float:
    """The largest over the mean."""
    return max(numbers) * len(numbers) / sum(numbers)


@pytest.mark.parametrize(("shared", "own"), [(4000, 400), (8000, 100), (1000, 1000)])
def test_c9_requests_that_come_at_once_crowd_nobody(shared: int, own: int) -> None:
    """Who has the beginning gets more of them, as many as it can read while others read it."""
    readers = crowd(shared=shared, own=own, every_s=0.0)
    assert share([r.computed for r in readers]) < 1.2
    assert sum(r.computed for r in readers) <= 0.8 * 100 * (shared + own)


def test_c9_a_beginning_in_demand_spreads_before_a_queue_is_long() -> None:
    """Its first owner alone could not keep up: it reads 400 of 500 a second. Without the credit's
    decay it gets 2.5 times its share, and requests wait for 0.24 s."""
    readers = crowd(shared=8000, own=100, every_s=0.002, requests=1000)
    assert share([r.served for r in readers]) < 2
    assert max(r.most_wait_s for r in readers) < 0.1
    assert sum(r.computed for r in readers) < 0.03 * 1000 * 8100


def test_c9_without_load_all_go_where_the_beginning_is() -> None:
    readers = crowd(shared=4000, own=400, every_s=1.0)
    assert [r.served for r in readers] == [100, 0, 0, 0]


def described(name: str, role: Role, **changes: Any) -> WorkerDescription:
    return worker(name, role, has_prefix_cache=True, num_blocks=50, **changes)


async def test_the_pool_promises_what_a_life_of_a_worker_has_computed() -> None:
    directory = Directory(described("p", Role.PREFILL), described("d", Role.DECODE))
    pool = WorkerPool(directory, IdleSession)
    need = Need(200, 10, prefix=prefix(1, 2))
    first = pool.place(need)
    assert first.promised_tokens == 0
    pool.note_computed(first.prefill, need.prefix)
    assert pool.place(need).promised_tokens == 2 * BLOCK
    assert pool.place(Need(200, 10, prefix=prefix(1, 3))).promised_tokens == BLOCK
    assert pool.place(Need(200, 10)).promised_tokens == 0

    directory.listed = [described("p", Role.PREFILL, epoch=2), described("d", Role.DECODE)]
    directory.changed()
    assert pool.place(need).promised_tokens == 0, "a new life has an empty cache"
    pool.note_computed(first.prefill, need.prefix)
    assert pool.place(need).promised_tokens == 0, "late word on the earlier life"
    await pool.close()


async def test_nothing_is_promised_of_a_worker_without_a_cache() -> None:
    plain = replace(described("p", Role.PREFILL), has_prefix_cache=False)
    pool = WorkerPool(Directory(plain, described("d", Role.DECODE)), IdleSession)
    need = Need(200, 10, prefix=prefix(1, 2))
    pool.note_computed(plain, need.prefix)
    assert pool.place(need).promised_tokens == 0
    await pool.close()


LONG = {"token_ids": {"ids": [5] * 150}}


@pytest.mark.parametrize("is_aggregated", [False, True])
async def test_a_second_request_with_the_same_beginning_goes_to_the_same_worker(
    serving: Any, until: Any, is_aggregated: bool
) -> None:
    cache = {"has_prefix_cache": True}
    async with serving(prefill=cache, decode=cache, is_aggregated=is_aggregated) as s:
        role = Role.DECODE if is_aggregated else Role.PREFILL
        others = [await s.add(role, **cache) for _ in range(2)]
        readers = [s.decode if is_aggregated else s.prefill, *others]
        for reader in readers:
            reader.engine.joins_with = {"cached_tokens": 127}
            reader.engine.cached_tokens = 127
        for _ in range(6):
            await s.generate(**LONG)
            await until(lambda: s.is_idle)
        assert sorted(len(r.engine.submitted) for r in readers) == [0, 0, 6]
        await s.generate(token_ids={"ids": [6] * 150})
        figures = s.gateway.metrics.registry.get_sample_value
        assert figures("hocket_prefix_promises_broken_total") == 0


@pytest.mark.parametrize("is_aggregated", [False, True])
async def test_a_promise_that_a_worker_does_not_keep_is_counted_and_warned_of_once(
    serving: Any, until: Any, is_aggregated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cache = {"has_prefix_cache": True}
    async with serving(prefill=cache, decode=cache, is_aggregated=is_aggregated) as s:
        s.prefill.engine.cached_tokens = 0
        for _ in range(4):
            await s.generate(**LONG)
            await until(lambda: s.is_idle)
        figures = s.gateway.metrics.registry.get_sample_value
        assert figures("hocket_prefix_promises_broken_total") == 3
        name = (s.decode if is_aggregated else s.prefill).description.worker_id
        warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert warned == [f"{name} should have had 128 tokens of a prompt cached and had none"]


def test_a_warning_comes_again_after_a_minute_and_for_each_pair(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    metrics = GatewayMetrics(CollectorRegistry())
    degradation = Degradation(metrics, lambda: now[0])

    def placed(p: str, d: str) -> Placement:
        return Placement(worker(p, Role.PREFILL), worker(d, Role.DECODE))

    for _ in range(3):
        degradation.recomputed(placed("p0", "d0"), "the READ failed")
    degradation.recomputed(placed("p0", "d1"), "")
    now[0] = WARN_EVERY_S - 1
    degradation.recomputed(placed("p0", "d0"), "cut")
    now[0] = WARN_EVERY_S
    degradation.recomputed(placed("p0", "d0"), "cut again")
    assert metrics.figures().recomputed_requests == 6
    assert [r.getMessage() for r in caplog.records] == [
        "d0 computes prompts again, because their KV does not come over from p0: the READ failed",
        "d1 computes prompts again, because their KV does not come over from p0: "
        "it does not say why",
        "d0 computes prompts again, because their KV does not come over from p0: cut again",
    ]
