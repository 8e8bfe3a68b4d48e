"""Decode scheduling as transcripts: what happens on the left, what is decided on the right."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.errors import HocketError, InvalidRequest
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import (
    ExportHandle,
    Fingerprint,
    Leg,
    RequestKey,
    SamplingParams,
    StartRequest,
    StoppingParams,
)

HANDLE = ExportHandle("p", 1, "127.0.0.1:1", 0, 1, Fingerprint("w", "kv", 4, "f", "n"), 1)


def start(name: str, prompt: int, max_tokens: int, leg: Leg = Leg.DECODE) -> StartRequest:
    return StartRequest(
        key=RequestKey(name),
        token_ids=(1,) * prompt,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens),
        leg=leg,
        deadline_s=100.0,
        export=HANDLE if leg is Leg.DECODE else None,
    )


class Worker:
    """A scheduler between a pool of ten blocks of four tokens and a transcript.

    Commands: `decode|whole NAME PROMPT MAX_TOKENS [DEADLINE]`, `arrived NAME` (KV was imported),
    `lost NAME` (import failed), `remove NAME`, `step`, `at TIME`, `drain`. A step shows
    admissions (`+name` imports, `*name` computes here), chunks `name:tokens`, decodes `name/k`.
    """

    def __init__(self, *, max_batch: int = 4, max_waiting: int = 8) -> None:
        limits = RequestLimits(64, 100, num_blocks=10, block_tokens=4)
        self.scheduler = DecodeScheduler(limits, DecodePolicy(max_batch, max_waiting, 8, 3))
        self.now = 0.0
        self.reserved: dict[str, int] = {}

    def run(self, transcript: str) -> None:
        for line in textwrap.dedent(transcript).strip().splitlines():
            command, _, expected = (part.strip() for part in line.partition("->"))
            assert f"{command} -> {self.do(*command.split())}" == f"{command} -> {expected}"

    def do(self, verb: str, *words: str) -> str:
        match verb:
            case "decode" | "whole":
                return self.submit(Leg(verb), *words)
            case "arrived":
                self.scheduler.join(RequestKey(words[0]))
                return "joined"
            case "lost":
                self.scheduler.recompute(RequestKey(words[0]))
                return f"{self.reserved.pop(words[0])} blocks free"
            case "remove":
                self.reserved.pop(words[0], None)
                return "gone" if self.scheduler.remove(RequestKey(words[0])) else "unknown"
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

    def submit(self, leg: Leg, name: str, prompt: str, most: str, deadline: str = "100") -> str:
        request = replace(start(name, int(prompt), int(most), leg), deadline_s=float(deadline))
        try:
            self.scheduler.submit(request, self.now)
        except HocketError as error:
            return error.reason
        return "queued"

    def step(self) -> str:
        shown: list[str] = []
        while request := self.scheduler.next_waiting(10 - sum(self.reserved.values())):
            name = request.key.request_id
            self.reserved[name] = self.scheduler.limits.blocks_needed(request)
            shown.append(("+" if self.scheduler.admit(request.key) else "*") + name)
        for chunk in self.scheduler.plan_chunks():
            self.scheduler.computed(chunk)
            shown.append(f"{chunk.key.request_id}:{chunk.num_tokens}")
        shown += [f"{p.key.request_id}/{p.num_drafts}" for p in self.scheduler.plan_decode()]
        return " ".join(shown)


def test_a_request_joins_the_batch_when_its_kv_arrived() -> None:
    worker = Worker()
    worker.run(
        """
        decode a 8 8 -> queued
        step         -> +a
        step         ->
        arrived a    -> joined
        step         -> a/3
        remove a     -> gone
        step         ->
        """
    )
    assert worker.scheduler.keys() == []
    assert worker.scheduler.next_deadline() is None


def test_prompt_and_output_are_reserved_in_full_before_anything_starts() -> None:
    Worker().run(
        """
        decode a 12 12 -> queued
        decode b 8 12  -> queued
        step           -> +a
        remove a       -> gone
        step           -> +b
        """
    )


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    Worker().run(
        """
        decode a 12 12    -> queued
        decode big 16 12  -> queued
        decode small 4 4  -> queued
        step              -> +a
        remove a          -> gone
        step              -> +big +small
        """
    )


def test_the_batch_limit_counts_seats_from_admission_on() -> None:
    Worker(max_batch=2).run(
        """
        decode a 4 4 -> queued
        decode b 4 4 -> queued
        decode c 4 4 -> queued
        step         -> +a +b
        arrived b    -> joined
        step         -> b/3
        remove a     -> gone
        step         -> +c b/3
        """
    )


def test_a_whole_request_is_computed_in_chunks_while_others_decode() -> None:
    Worker().run(
        """
        decode a 4 4  -> queued
        step          -> +a
        arrived a     -> joined
        whole b 18 2  -> queued
        step          -> *b b:8 a/3
        step          -> b:8 a/3
        step          -> b:2 a/3 b/3
        """
    )


def test_after_a_failed_import_the_request_is_computed_here_before_others_start() -> None:
    worker = Worker()
    worker.run(
        """
        decode a 8 8    -> queued
        step            -> +a
        decode b 12 16  -> queued
        lost a          -> 4 blocks free
        step            -> *a a:8 a/3
        """
    )
    assert worker.scheduler.is_recomputed(RequestKey("a"))
    worker.run("remove a -> gone")
    assert not worker.scheduler.is_recomputed(RequestKey("a"))


@pytest.mark.parametrize("leave", ["remove a -> gone", "at 3 -> a"])
@pytest.mark.parametrize(
    "before",
    [
        "decode a 8 8 3 -> queued",
        "decode a 8 8 3 -> queued\nstep -> +a",
        "decode a 8 8 3 -> queued\nstep -> +a\narrived a -> joined",
        "decode a 8 8 3 -> queued\nstep -> +a\nlost a -> 4 blocks free",
        "whole a 28 8 3 -> queued\nstep -> *a a:8",
    ],
)
def test_cancel_and_deadline_end_a_request_wherever_it_is(before: str, leave: str) -> None:
    worker = Worker()
    worker.run(f"{before}\n{leave}\nremove a -> unknown\nstep ->")
    assert worker.scheduler.queued_prompt_tokens == 0
    assert worker.scheduler.num_seated == worker.scheduler.num_waiting == 0
    assert worker.reserved == {}


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    Worker().run(
        """
        decode huge 20 21 -> INVALID_REQUEST
        decode a 20 20    -> queued
        step              -> +a
        """
    )


def test_queue_limit_duplicates_and_drain_are_refused_each_with_its_reason() -> None:
    Worker(max_waiting=1).run(
        """
        decode a 4 4 -> queued
        decode a 4 4 -> INVALID_REQUEST
        whole b 4 4  -> OVERLOADED
        step         -> +a
        drain        -> yes
        whole b 4 4  -> WORKER_UNAVAILABLE
        arrived a    -> joined
        step         -> a/3
        """
    )


def test_a_request_may_lower_its_draft_length_but_not_raise_it() -> None:
    scheduler = Worker().scheduler
    for name, asked in (("none", None), ("zero", 0), ("one", 1), ("many", 9)):
        scheduler.submit(replace(start(name, 4, 4), max_draft_tokens=asked), 0.0)
        scheduler.admit(RequestKey(name))
        scheduler.join(RequestKey(name))
    drafts = {p.key.request_id: p.num_drafts for p in scheduler.plan_decode()}
    assert drafts == {"none": 3, "zero": 0, "one": 1, "many": 3}


@pytest.mark.parametrize(
    "request_",
    [start("a", 4, 4, Leg.PREFILL), replace(start("a", 4, 4), export=None)],
)
def test_a_prefill_leg_or_a_decode_leg_without_export_is_refused(request_: StartRequest) -> None:
    with pytest.raises(InvalidRequest):
        Worker().scheduler.submit(request_, 0.0)
