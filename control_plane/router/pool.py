"""The workers that this gateway knows, each with its Session and this gateway's books.

The directory (the registry in Redis, or a list in tests) says who is there; the pool opens one
Session to each, makes the snapshots that `route` decides on, and keeps count of what it placed
where. `request_flow` asks for a placement and talks to the Sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from control_plane.router.prefixes import NO_PREFIX, KnownPrefixes, PromptPrefix
from control_plane.router.route import Choose, can_serve, choose_pair
from control_plane.router.snapshot import Books, Need, Placement, WorkerSnapshot
from hocket.rpc.session_client import EventSink
from hocket.types import Load, RequestKey, StartRequest, WorkerDescription


class WorkerDirectory(Protocol):
    """Who is registered."""

    def workers(self) -> list[WorkerDescription]:
        """All workers believed to serve; never blocks."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Has `changed` called on the event loop whenever `workers()` has altered."""
        ...


class WorkerSession(Protocol):
    """What the pool needs of a `SessionClient`."""

    @property
    def is_connected(self) -> bool: ...
    @property
    def load(self) -> Load: ...
    @property
    def num_requests(self) -> int: ...
    def start(self, request: StartRequest, sink: EventSink) -> None: ...
    def cancel(self, key: RequestKey) -> None: ...
    def doubt(self) -> None: ...
    async def close(self) -> None: ...


@dataclass(slots=True)
class _Member:
    worker: WorkerDescription
    session: WorkerSession
    books: Books
    prefixes: KnownPrefixes
    is_listed: bool = True

    def renew(self, worker: WorkerDescription) -> None:
        """The directory's latest word on it. A new life has an empty cache."""
        if worker.epoch != self.worker.epoch:
            self.prefixes = _empty_prefixes(worker)
            self.session.doubt()
        self.worker, self.is_listed = worker, True


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry in the books of a worker; give it back once, with `WorkerPool.release`."""

    member: _Member
    books: Books


def _empty_prefixes(worker: WorkerDescription) -> KnownPrefixes:
    return KnownPrefixes(worker.num_blocks)


def _cached_tokens(member: _Member, prefix: PromptPrefix) -> int:
    """Of a prompt, the tokens that a worker should have cached."""
    if prefix is NO_PREFIX or not member.worker.has_prefix_cache:
        return 0
    block_tokens = member.worker.block_tokens
    return member.prefixes.count(prefix.hashes(block_tokens)) * block_tokens


def trusted(worker: WorkerDescription) -> str:
    """Every worker may serve as soon as it is there."""
    return ""


class WorkerPool:
    """All known workers. Lives on one event loop."""

    def __init__(
        self,
        directory: WorkerDirectory,
        connect: Callable[[str], WorkerSession],
        choose: Choose = choose_pair,
        kept_out: Callable[[WorkerDescription], str] = trusted,
    ) -> None:
        """`connect` opens the Session with the worker at an address. `kept_out`: why a worker must
        not get requests yet, "" when it may."""
        self._directory = directory
        self._connect = connect
        self._choose = choose
        self._kept_out = kept_out
        self._members: dict[str, _Member] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._rotation = 0
        directory.watch(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        """Follows the directory. A worker that is no longer listed gets no new requests; its
        Session stays until the ones it has are over."""
        listed = {worker.worker_id: worker for worker in self._directory.workers()}
        for worker_id, worker in listed.items():
            member = self._members.get(worker_id)
            if member is not None and member.worker.address == worker.address:
                member.renew(worker)
                continue
            if member is not None:
                self._close(member)
            session = self._connect(worker.address)
            self._members[worker_id] = _Member(worker, session, Books(), _empty_prefixes(worker))
        for member in list(self._members.values()):
            if member.is_listed and member.worker.worker_id not in listed:
                member.is_listed = False
                member.session.doubt()
            self._drop_if_gone(member)

    def snapshots(self, prefix: PromptPrefix = NO_PREFIX) -> list[WorkerSnapshot]:
        """Every known worker as of now, and what it should have cached of a prompt."""
        return [
            WorkerSnapshot(
                worker=member.worker,
                load=member.session.load if member.session.is_connected else member.worker.load,
                is_connected=member.session.is_connected,
                is_listed=member.is_listed,
                kept_out=self._kept_out(member.worker),
                cached_tokens=_cached_tokens(member, prefix),
                books=member.books,
            )
            for member in self._members.values()
        ]

    def workers(self) -> list[WorkerDescription]:
        """The workers that the directory lists."""
        return [member.worker for member in self._members.values() if member.is_listed]

    def place(self, need: Need) -> Placement:
        """The workers for a request. Raises WorkerUnavailable or InvalidRequest; see `route`."""
        self._rotation += 1
        return self._choose(self.snapshots(need.prefix), need, self._rotation)

    def can_serve(self) -> bool:
        """Whether requests can be served at all."""
        return can_serve(self.snapshots(), self._choose)

    def session(self, worker_id: str) -> WorkerSession:
        """The Session with a known worker."""
        return self._members[worker_id].session

    def book(self, worker_id: str, books: Books) -> Entry:
        """Enters a request, or a part of one, into a worker's books."""
        entry = Entry(self._members[worker_id], books)
        entry.member.books = entry.member.books.plus(books)
        return entry

    def release(self, entry: Entry) -> None:
        """Takes an entry back out; the worker may be gone by now."""
        entry.member.books = entry.member.books.minus(entry.books)
        self._drop_if_gone(entry.member)

    def note_computed(self, worker: WorkerDescription, prefix: PromptPrefix) -> None:
        """This life of a worker has the prompt in its cache now, if it has one."""
        member = self._members.get(worker.worker_id)
        if member is None or member.worker.epoch != worker.epoch:
            return
        if worker.has_prefix_cache:
            member.prefixes.add(prefix.hashes(worker.block_tokens))

    async def close(self) -> None:
        """Ends every Session; what runs on them fails."""
        for member in self._members.values():
            self._close(member)
        self._members.clear()
        await asyncio.gather(*self._closing)

    def _drop_if_gone(self, member: _Member) -> None:
        name = member.worker.worker_id
        is_current = self._members.get(name) is member
        is_used = member.session.num_requests > 0 or member.books.requests > 0
        if is_current and not member.is_listed and not is_used:
            self._close(self._members.pop(name))

    def _close(self, member: _Member) -> None:
        task = asyncio.create_task(member.session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
