"""Decode scheduling as transcripts: what happens on the left, what is decided on the right."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest

from decode_workers.scheduler import DecodePolicy, DecodeScheduler
from hocket.errors import HocketError, InvalidRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import ExportHandle, Fingerprint, Leg, RequestKey, StartRequest

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
    `lost NAME` (import failed), `remove NAME`, `step`, `at TIME`, `drain`, `full NAME` (it needs a
    block and there is none: who gives way?), `preempt NAME TOKENS` (after so many were put out). A
    step shows admissions (`+name` imports, `*name` computes here), chunks `name:tokens`, decodes
    `name/k`.
    """

    def __init__(self, *, max_batch: int = 4, max_waiting: int = 8, share: float = 1.0) -> None:
        limits = RequestLimits(64, 100, num_blocks=10, block_tokens=4)
        policy = DecodePolicy(max_batch, max_waiting, 8, 3, reserve_output_share=share)
        self.scheduler = DecodeScheduler(limits, policy)
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
                return f"{self.reserved.pop(words[0], 0)} blocks free"
            case "full":
                victim = self.scheduler.victim_for(RequestKey(words[0]))
                return "nobody" if victim is None else victim.request_id
            case "preempt":
                self.scheduler.preempt(RequestKey(words[0]), [2] * int(words[1]))
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
        while request := self.scheduler.next_waiting():
            name = request.key.request_id
            num_blocks = self.scheduler.blocks_to_admit(request)
            if num_blocks > 10 - sum(self.reserved.values()):
                break
            self.reserved[name] = num_blocks
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


def test_prompt_and_output_are_reserved_in_full_where_the_policy_says_so() -> None:
    Worker(share=1.0).run(
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


@pytest.mark.parametrize(
    ("share", "max_tokens", "num_blocks"),
    [
        (0.25, 24, 4),  # 8 tokens and 6
        (0.0, 24, 3),  # 8 and what one step with three drafts may write: 4
        (0.0, 2, 3),  # 8 and no more than there will ever be
        (1.0, 24, 8),
    ],
)
def test_a_share_of_the_output_is_reserved_and_at_least_one_step(
    share: float, max_tokens: int, num_blocks: int
) -> None:
    worker = Worker(share=share)
    worker.run(f"decode a 8 {max_tokens} -> queued\nstep -> +a")
    assert worker.reserved == {"a": num_blocks}


def test_the_latest_gives_way_to_earlier_ones_and_never_the_other_way_round() -> None:
    Worker(share=0.0).run(
        """
        decode a 4 20 -> queued
        whole b 4 20  -> queued
        whole c 12 20 -> queued
        step          -> +a *b *c b:4 c:4 b/3
        arrived a     -> joined
        full a        -> c
        full b        -> c
        full c        -> nobody
        preempt c 0   -> 4 blocks free
        full a        -> b
        full b        -> nobody
        preempt b 1   -> 2 blocks free
        full a        -> nobody
        """
    )


def test_the_oldest_is_the_first_to_arrive_not_the_first_to_join() -> None:
    Worker().run(
        """
        decode a 4 4 -> queued
        whole b 4 4  -> queued
        step         -> +a *b b:4 b/3
        arrived a    -> joined
        step         -> a/3 b/3
        full a       -> b
        full b       -> nobody
        """
    )


def test_an_import_never_gives_way() -> None:
    Worker().run(
        """
        whole a 4 4  -> queued
        decode b 4 4 -> queued
        step         -> *a +b a:4 a/3
        full a       -> nobody
        arrived b    -> joined
        full a       -> b
        """
    )


def test_who_gave_way_waits_before_all_that_came_later() -> None:
    Worker(max_batch=3).run(
        """
        whole a 4 4   -> queued
        whole b 4 4   -> queued
        whole c 4 4   -> queued
        decode d 4 4  -> queued
        step          -> *a *b *c a:4 b:4 a/3 b/3
        preempt c 0   -> 2 blocks free
        preempt b 1   -> 2 blocks free
        step          -> *b *c b:4 c:4 a/3 c/3
        """
    )


def test_what_was_put_out_is_prompt_when_it_is_computed_again() -> None:
    worker = Worker()
    worker.run(
        "decode a 8 8 -> queued\nstep -> +a\narrived a -> joined\npreempt a 3 -> 4 blocks free"
    )
    again = worker.scheduler.next_waiting()
    assert again is not None
    assert again.token_ids == (1,) * 8 + (2,) * 3
    assert (again.generated_tokens, again.stopping.max_tokens) == (3, 5)
    assert (again.leg, again.export) == (Leg.WHOLE, None)
    assert worker.scheduler.queued_prompt_tokens == 11
    assert worker.scheduler.counters.preemptions == 1
    assert not worker.scheduler.is_recomputed(RequestKey("a")), "its hand-off was well"
    worker.run("step -> *a a:8\nstep -> a:3 a/3")


def test_tokens_in_the_prefix_cache_are_not_computed() -> None:
    worker = Worker()
    worker.run("whole a 12 4 -> queued")
    assert worker.scheduler.queued_prompt_tokens == 12
    worker.scheduler.admit(RequestKey("a"), cached_tokens=7)
    assert worker.scheduler.queued_prompt_tokens == 5
    worker.run("step -> a:5 a/3")


def test_a_hand_off_that_fails_in_the_queue_keeps_its_place_there() -> None:
    worker = Worker()
    worker.run(
        """
        decode a 20 20 -> queued
        decode b 4 4   -> queued
        decode c 4 4   -> queued
        step           -> +a
        lost c         -> 0 blocks free
        lost b         -> 0 blocks free
        remove a       -> gone
        step           -> *b *c b:4 c:4 b/3 c/3
        """
    )
    assert worker.scheduler.is_recomputed(RequestKey("b"))


@pytest.mark.parametrize("leave", ["remove a -> gone", "at 3 -> a"])
@pytest.mark.parametrize(
    "before",
    [
        "decode a 8 8 3 -> queued",
        "decode a 8 8 3 -> queued\nstep -> +a",
        "decode a 8 8 3 -> queued\nstep -> +a\narrived a -> joined",
        "decode a 8 8 3 -> queued\nstep -> +a\nlost a -> 4 blocks free",
        "decode a 8 8 3 -> queued\nlost a -> 0 blocks free",
        "whole a 28 8 3 -> queued\nstep -> *a a:8",
        "whole a 28 8 3 -> queued\nstep -> *a a:8\npreempt a 0 -> 9 blocks free",
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
