"""Routing: filter, score, pick, on values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.router.pool import WorkerPool
from control_plane.router.route import can_serve, choose_pair, choose_whole
from control_plane.router.snapshot import Books, Need, WorkerSnapshot
from hocket.errors import InvalidRequest, WorkerUnavailable
from hocket.rpc.session_client import EventSink
from hocket.types import (
    PROTOCOL_VERSION,
    Fingerprint,
    Load,
    RequestKey,
    Role,
    StartRequest,
    WorkerDescription,
)

A = Fingerprint("a", "kv", 64, "bfloat16", "1")
B = replace(A, weights="b")
NEED = Need(prompt_tokens=100, max_tokens=50)


def worker(name: str, role: Role, **changes: Any) -> WorkerDescription:
    description = WorkerDescription(
        worker_id=name,
        epoch=1,
        role=role,
        address=f"host:{name}",
        fingerprint=A,
        model="m",
        num_blocks=100,
        block_tokens=64,
        block_bytes=1,
        max_context_tokens=4096,
        max_prompt_tokens=2048,
        max_draft_tokens=3,
        has_mtp=True,
    )
    return replace(description, **changes)


def prefill(name: str, *, queued: int = 0, unread: int = 0, **changes: Any) -> WorkerSnapshot:
    load = Load(queued_prompt_tokens=queued, unread_blocks=unread)
    return WorkerSnapshot(worker(name, Role.PREFILL, **changes), load, is_connected=True)


def decode(name: str, *, free: int = 100, running: int = 0, **changes: Any) -> WorkerSnapshot:
    load = Load(free_blocks=free, num_blocks=100, running_requests=running)
    return WorkerSnapshot(worker(name, Role.DECODE, **changes), load, is_connected=True)


def names(workers: list[WorkerSnapshot], need: Need = NEED, rotation: int = 0) -> tuple[str, str]:
    placement = choose_pair(workers, need, rotation)
    assert placement.prefill.fingerprint == placement.decode.fingerprint
    return placement.prefill.worker_id, placement.decode.worker_id


def test_the_least_loaded_of_each_role_are_chosen() -> None:
    workers = [prefill("p0", queued=500), prefill("p1", queued=10)]
    workers += [decode("d0", free=20), decode("d1", free=90), decode("d2", free=50)]
    assert names(workers) == ("p1", "d1")


def test_the_gateways_own_books_count_before_a_load_is_reported() -> None:
    busy_prefill = replace(prefill("p0"), books=Books(requests=3, prompt_tokens=300))
    busy_decode = replace(decode("d0"), books=Books(requests=3, blocks=9))
    workers = [busy_prefill, prefill("p1", queued=200), busy_decode, decode("d1", free=95)]
    assert names(workers) == ("p1", "d1")


def test_finished_prompts_that_nobody_reads_make_a_prefill_worker_less_wanted() -> None:
    assert names([prefill("p0", unread=40), prefill("p1", queued=100), decode("d")])[0] == "p1"


def test_waiting_requests_weigh_more_than_blocks() -> None:
    waiting = replace(decode("d0"), load=Load(free_blocks=90, num_blocks=100, waiting_requests=1))
    assert names([prefill("p"), waiting, decode("d1", free=50)])[1] == "d1"


def test_ties_are_spread_evenly_and_in_a_fixed_order() -> None:
    workers = [*(prefill(f"p{i}") for i in range(3)), *(decode(f"d{i}") for i in range(2))]
    chosen = [names(workers, rotation=r) for r in range(12)]
    assert set(Counter(p for p, _ in chosen).values()) == {4}
    assert set(Counter(d for _, d in chosen).values()) == {6}
    assert chosen == [names(list(reversed(workers)), rotation=r) for r in range(12)]


def test_ranks_of_a_group_are_candidates_like_any_other_worker_and_fill_evenly() -> None:
    ranks = [
        decode(f"decode-{group}.{rank}", group=f"decode-{group}", rank=rank, group_size=2)
        for group in range(2)
        for rank in range(2)
    ]
    held = {rank.name: Books() for rank in ranks}
    for rotation in range(16):
        workers = [replace(rank, books=held[rank.name]) for rank in ranks]
        _, chosen = names([prefill("p"), *workers], rotation=rotation)
        held[chosen] = held[chosen].plus(Books(requests=1, blocks=3))
    assert {books.requests for books in held.values()} == {4}


def test_one_draining_rank_takes_no_request_from_the_others() -> None:
    ranks = [decode(f"d.{rank}", group="d", rank=rank, group_size=2) for rank in range(2)]
    draining = replace(ranks[0], worker=replace(ranks[0].worker, is_draining=True))
    chosen = {names([prefill("p"), draining, ranks[1]], rotation=r)[1] for r in range(4)}
    assert chosen == {"d.1"}


def test_a_pair_of_which_one_side_drains_is_not_chosen_for_the_other_side() -> None:
    """The emptier prefill worker is no use: all decode workers of its fingerprint drain."""
    workers = [
        prefill("pa"),
        decode("da", is_draining=True),
        prefill("pb", fingerprint=B, queued=900),
        decode("db", fingerprint=B, free=10),
    ]
    assert names(workers) == ("pb", "db")


def test_who_has_failed_a_request_does_not_get_it_again() -> None:
    ranks = [decode(f"d.{rank}", group="d", rank=rank, group_size=2) for rank in range(2)]
    workers = [prefill("p"), *ranks, decode("other", free=0)]
    assert names(workers, replace(NEED, avoid=frozenset({"d.0"})))[1] == "d.1"
    assert names(workers, replace(NEED, avoid=frozenset({"d"})))[1] == "other"
    with pytest.raises(WorkerUnavailable, match="p has failed this request already"):
        choose_pair(workers, replace(NEED, avoid=frozenset({"p"})))


def test_only_equal_fingerprints_pair() -> None:
    workers = [prefill("pa"), prefill("pb", fingerprint=B, queued=900), decode("db", fingerprint=B)]
    assert names(workers) == ("pb", "db")
    workers += [decode("da", free=0)]
    assert names(workers) == ("pa", "da")


@pytest.mark.parametrize(
    ("field", "other"),
    [("kv_layout", "28 layers"), ("block_tokens", 32), ("dtype", "float32")],
)
def test_b8_workers_of_different_kv_layouts_never_pair(field: str, other: Any) -> None:
    assert_never_paired({"fingerprint": replace(A, **{field: other})}, field)


def test_b9_workers_of_different_mtp_layers_never_pair_but_draft_lengths_are_free() -> None:
    """The layout names the MTP layers; how many drafts a step makes is each worker's own matter."""
    without = replace(A, kv_layout="kv, no MTP layer")
    assert_never_paired({"fingerprint": without, "has_mtp": False}, "kv_layout")
    workers = [prefill("p", max_draft_tokens=0), decode("d", max_draft_tokens=7)]
    assert names(workers) == ("p", "d")


@pytest.mark.parametrize("field", ["weights", "numerics"])
def test_b10_workers_of_different_revisions_never_pair(field: str) -> None:
    assert_never_paired({"fingerprint": replace(A, **{field: "older"})}, field)


def test_b10_neighbouring_protocol_versions_pair_and_others_never() -> None:
    """The gateway speaks N: it may use N-1 and N+1, but these two do not understand each other."""
    before, after = PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1
    older, newer = {"protocol_version": before}, {"protocol_version": after}
    assert names([prefill("p", **older), decode("d")]) == ("p", "d")
    assert names([prefill("p"), decode("d", **newer)]) == ("p", "d")
    with pytest.raises(WorkerUnavailable, match=f"protocol_version: {before} != {after}"):
        choose_pair([prefill("p", **older), decode("d", **newer)], NEED)
    workers = [prefill("p", **older), decode("new", **newer), decode("same", free=0)]
    assert names(workers) == ("p", "same"), "a full worker is better than one of N+1"
    for distance in (-2, 2):
        far = PROTOCOL_VERSION + distance
        with pytest.raises(WorkerUnavailable, match=f"d speaks protocol {far}, the gateway"):
            choose_pair([prefill("p"), decode("d", protocol_version=far)], NEED)


def assert_never_paired(changes: dict[str, Any], named: str) -> None:
    """However idle they are: not alone, where the error names it, and not beside others."""
    with pytest.raises(WorkerUnavailable, match=f"p and d differ in {named}: ") as caught:
        choose_pair([prefill("p"), decode("d", **changes)], NEED)
    assert caught.value.is_retryable
    workers = [prefill("p", queued=900), decode("d", **changes), decode("busy", free=0)]
    assert {names(workers, rotation=r) for r in range(4)} == {("p", "busy")}
    assert not can_serve([prefill("p"), decode("d", **changes)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: replace(s, kept_out="failed its canary: cut"), "failed its canary: cut"),
        (lambda s: replace(s, is_connected=False), "is not reachable at host:p"),
        (lambda s: replace(s, is_listed=False), "is no longer registered"),
        (lambda s: replace(s, worker=replace(s.worker, is_draining=True)), "is draining"),
        (lambda s: replace(s, worker=replace(s.worker, protocol_version=9)), "speaks protocol 9"),
    ],
)
def test_a_worker_that_may_not_serve_is_named_with_its_reason(
    change: Callable[[WorkerSnapshot], WorkerSnapshot], reason: str
) -> None:
    workers = [change(prefill("p")), decode("d")]
    with pytest.raises(WorkerUnavailable, match=f"no prefill worker .*: p {reason}"):
        choose_pair(workers, NEED)
    assert not can_serve(workers)
    assert names([*workers, prefill("other")]) == ("other", "d")


def test_an_empty_pool_says_which() -> None:
    with pytest.raises(WorkerUnavailable, match="no prefill worker is registered"):
        choose_pair([decode("d")], NEED)
    with pytest.raises(WorkerUnavailable, match="no decode worker is registered"):
        choose_pair([prefill("p")], NEED)
    assert can_serve([prefill("p"), decode("d")])


@pytest.mark.parametrize(
    ("workers", "need", "limit"),
    [
        ([prefill("p", max_prompt_tokens=99), decode("d")], NEED, "at most 99 tokens"),
        ([prefill("p", num_blocks=1), decode("d")], NEED, "at most 64 tokens"),
        ([prefill("p"), decode("d", num_blocks=2)], NEED, "at most 128 tokens"),
        ([prefill("p"), decode("d", max_context_tokens=149)], NEED, "at most 149 tokens"),
    ],
)
def test_what_can_never_fit_is_the_clients_error(
    workers: list[WorkerSnapshot], need: Need, limit: str
) -> None:
    with pytest.raises(InvalidRequest, match=limit):
        choose_pair(workers, need)


def test_what_would_fit_into_a_worker_that_is_away_may_be_tried_again() -> None:
    away = replace(prefill("big"), is_connected=False)
    with pytest.raises(WorkerUnavailable, match=r"big is not reachable.*small takes prompts"):
        choose_pair([away, prefill("small", max_prompt_tokens=10), decode("d")], NEED)


class IdleSession:
    """A Session in memory on which nothing ever happens."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_connected = True
        self.load = Load()
        self.num_requests = 0
        self.is_closed = False

    def start(self, request: StartRequest, sink: EventSink) -> None:
        self.num_requests += 1

    def cancel(self, key: RequestKey) -> None:
        self.num_requests -= 1

    def doubt(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


class Directory:
    def __init__(self, *workers: WorkerDescription) -> None:
        self.listed = list(workers)
        self.changed: Callable[[], None] = lambda: None

    def workers(self) -> list[WorkerDescription]:
        return self.listed

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed


async def test_the_pool_follows_the_directory_and_keeps_sessions_in_use() -> None:
    opened: list[IdleSession] = []

    def connect(address: str) -> IdleSession:
        opened.append(IdleSession(address))
        return opened[-1]

    directory = Directory(worker("p", Role.PREFILL), worker("d", Role.DECODE))
    pool = WorkerPool(directory, connect)
    assert [s.address for s in opened] == ["host:p", "host:d"]
    placement = pool.place(NEED)
    entry = pool.book(placement.decode.worker_id, Books(blocks=3))
    opened[1].num_requests = 1

    directory.listed = [worker("p", Role.PREFILL, epoch=2)]
    directory.changed()
    assert len(opened) == 2, "a restart at the same address keeps the Session"
    assert [w.epoch for w in pool.workers()] == [2]
    with pytest.raises(WorkerUnavailable, match="d is no longer registered"):
        pool.place(NEED)
    opened[1].num_requests = 0
    pool.release(entry)
    assert [s.name for s in pool.snapshots()] == ["p"]

    directory.listed = [worker("p", Role.PREFILL, address="elsewhere")]
    directory.changed()
    assert opened[2].address == "elsewhere"
    await pool.close()
    assert all(session.is_closed for session in opened)


async def test_books_are_never_negative_and_end_at_zero() -> None:
    directory = Directory(worker("p", Role.PREFILL), worker("d", Role.DECODE))
    pool = WorkerPool(directory, IdleSession)
    entries = [pool.book("d", Books(1, blocks=i)) for i in range(5)]
    assert pool.snapshots()[1].books == Books(requests=5, blocks=10)
    for entry in entries:
        pool.release(entry)
    assert pool.snapshots()[1].books == Books()
    with pytest.raises(AssertionError):
        pool.release(entries[0])
    await pool.close()


def test_what_has_begun_goes_on_with_the_same_fingerprint() -> None:
    fingerprint = prefill("p").worker.fingerprint
    newer = replace(fingerprint, weights="newer")
    workers = [prefill("p", fingerprint=newer), decode("d", fingerprint=newer)]
    assert choose_pair(workers, Need(10, 10)).decode.worker_id == "d"
    with pytest.raises(WorkerUnavailable, match="differs in weights"):
        choose_pair(workers, Need(10, 10, fingerprint=fingerprint))


def test_in_aggregated_serving_one_decode_worker_takes_all_of_it() -> None:
    workers = [decode("d0", running=3), decode("d1"), prefill("p")]
    placement = choose_whole(workers, Need(10, 10))
    assert placement.is_whole
    assert placement.decode.worker_id == "d1"
    assert can_serve(workers[:2], choose_whole)
    assert not can_serve(workers[:2])
