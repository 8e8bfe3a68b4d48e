"""Prefill scheduling as transcripts: what happens on the left, what is decided on the right."""

from __future__ import annotations

import textwrap

import pytest

from hocket.errors import HocketError, InvalidRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.request_limits import RequestLimits, blocks_for
from hocket.types import Leg, RequestKey, StartRequest
from prefill_workers.scheduler import PrefillPolicy, PrefillScheduler

BLOCK_TOKENS = 4


class Worker:
    """A scheduler between a pool of ten blocks and a transcript.

    Commands: `submit NAME PROMPT [DEADLINE]`, `remove NAME`, `read NAME` (decode has read its
    blocks), `step`, `at TIME`, `drain`. A step admits while blocks can be reserved and less than
    half of the pool is unread, then computes the planned chunks.
    """

    def __init__(self, *, chunk_tokens: int = 8, max_batch: int = 4, max_waiting: int = 8) -> None:
        limits = RequestLimits(64, 100, num_blocks=10, block_tokens=BLOCK_TOKENS)
        policy = PrefillPolicy(chunk_tokens, max_batch, max_waiting)
        self.scheduler = PrefillScheduler(limits, policy)
        self.now = 0.0
        self.reserved: dict[str, int] = {}
        self.unread: set[str] = set()

    def run(self, transcript: str) -> None:
        for line in textwrap.dedent(transcript).strip().splitlines():
            command, _, expected = (part.strip() for part in line.partition("->"))
            assert f"{command} -> {self.do(*command.split())}" == f"{command} -> {expected}"

    def do(self, verb: str, *words: str) -> str:
        match verb:
            case "submit":
                return self.submit(*words)
            case "remove":
                self.reserved.pop(words[0], None)
                return "gone" if self.scheduler.remove(RequestKey(words[0])) else "unknown"
            case "read":
                self.unread.remove(words[0])
                return f"{self.reserved.pop(words[0])} blocks free"
            case "at":
                self.now = float(words[0])
                expired = self.scheduler.take_expired(self.now)
                for key in expired:
                    self.scheduler.remove(key)
                    self.reserved.pop(key.request_id, None)
                return " ".join(key.request_id for key in expired) or "none"
            case "drain":
                self.scheduler.is_draining = True
                return "yes"
            case _:
                return self.step()

    def submit(self, name: str, prompt: str, deadline: str = "100") -> str:
        request = StartRequest(
            key=RequestKey(name),
            token_ids=(1,) * int(prompt),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_tokens=4),
            leg=Leg.PREFILL,
            deadline_s=float(deadline),
        )
        try:
            self.scheduler.submit(request, self.now)
        except HocketError as error:
            return error.reason
        return "queued"

    def step(self) -> str:
        admitted: list[str] = []
        while (request := self.scheduler.next_waiting()) is not None:
            needed = blocks_for(len(request.token_ids), BLOCK_TOKENS)
            unread = sum(self.reserved[name] for name in self.unread)
            if sum(self.reserved.values()) + needed > 10 or unread > 5:
                break
            self.scheduler.admit(request.key)
            self.reserved[request.key.request_id] = needed
            admitted.append(f"+{request.key.request_id}")
        chunks = self.scheduler.plan_chunks()
        for chunk in chunks:
            self.scheduler.computed(chunk)
            if chunk.key not in self.scheduler:
                self.unread.add(chunk.key.request_id)
        return " ".join([*admitted, *(f"{c.key.request_id}:{c.num_tokens}" for c in chunks)])


def test_prompts_advance_in_chunks_and_leave_when_whole() -> None:
    worker = Worker()
    worker.run(
        """
        submit a 18 -> queued
        step        -> +a a:8
        step        -> a:8
        step        -> a:2
        step        ->
        """
    )
    assert worker.scheduler.keys() == []
    assert worker.scheduler.next_deadline() is None


def test_a_short_prompt_finishes_beside_a_long_one() -> None:
    Worker().run(
        """
        submit long 24  -> queued
        submit short 4  -> queued
        step            -> +long +short long:4 short:4
        step            -> long:8
        """
    )


def test_nothing_is_admitted_whose_blocks_cannot_all_be_reserved() -> None:
    Worker().run(
        """
        submit a 24 -> queued
        submit b 20 -> queued
        step        -> +a a:8
        step        -> a:8
        step        -> a:8
        step        ->
        read a      -> 6 blocks free
        step        -> +b b:8
        """
    )


def test_above_the_unread_share_nothing_starts() -> None:
    Worker(chunk_tokens=100).run(
        """
        submit a 24 -> queued
        step        -> +a a:24
        submit b 4  -> queued
        step        ->
        read a      -> 6 blocks free
        step        -> +b b:4
        """
    )


def test_a_cancelled_prompt_stops_at_the_next_chunk_and_the_next_one_starts() -> None:
    Worker(max_batch=1).run(
        """
        submit a 24 -> queued
        submit b 8  -> queued
        step        -> +a a:8
        remove a    -> gone
        step        -> +b b:8
        remove a    -> unknown
        """
    )


def test_deadlines_hold_in_the_queue_and_between_chunks() -> None:
    Worker(max_batch=1).run(
        """
        submit a 24 5 -> queued
        submit b 24 2 -> queued
        submit c 8 9  -> queued
        step          -> +a a:8
        at 2          -> b
        at 4.9        -> none
        at 5          -> a
        step          -> +c c:8
        at 99         -> none
        """
    )


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    Worker().run(
        """
        submit huge 41 -> INVALID_REQUEST
        submit none 0  -> INVALID_REQUEST
        submit a 4     -> queued
        step           -> +a a:4
        """
    )


def test_queue_limit_duplicates_and_drain_are_refused_each_with_its_reason() -> None:
    Worker(max_waiting=2).run(
        """
        submit a 4 -> queued
        submit a 4 -> INVALID_REQUEST
        submit b 4 -> queued
        submit c 4 -> OVERLOADED
        step       -> +a +b a:4 b:4
        submit c 4 -> queued
        drain      -> yes
        submit d 4 -> WORKER_UNAVAILABLE
        step       -> +c c:4
        """
    )


def test_a_decode_leg_is_refused() -> None:
    scheduler = Worker().scheduler
    request = StartRequest(
        RequestKey("a"), (1,), SamplingParams(), StoppingParams(1), Leg.WHOLE, deadline_s=1.0
    )
    with pytest.raises(InvalidRequest, match="leg"):
        scheduler.submit(request, 0.0)


def test_queued_prompt_tokens_count_what_is_not_computed() -> None:
    worker = Worker(max_batch=1)
    worker.run(
        """
        submit a 24 -> queued
        submit b 10 -> queued
        step        -> +a a:8
        """
    )
    assert worker.scheduler.queued_prompt_tokens == 16 + 10
    worker.run("remove a -> gone")
    assert worker.scheduler.queued_prompt_tokens == 10
