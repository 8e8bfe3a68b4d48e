"""Claims about the decode engine alone: whole requests, refused hand-offs, queues, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from decode_workers.engine import DecodeEngine
from decode_workers.import_stream import (
    EventArrived,
    ImportMessage,
    OpenStream,
    SendUpdate,
    StreamGone,
)
from hocket.errors import HandOffFailed, WorkerUnavailable
from hocket.execution.engine_thread import BeginDrain, CancelRequest, FailRequests, StepOutput
from hocket.kv.wire import error_to_event
from hocket.types import (
    Event,
    ExportHandle,
    Failed,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Leg,
    RequestKey,
    SamplingParams,
    StartRequest,
    StoppingParams,
    Tokens,
)

NUM_BLOCKS = 8


@dataclass
class Rig:
    """An engine under a hand-moved clock; events and messages are kept as they come."""

    engine: DecodeEngine
    runner: Any
    fingerprint: Fingerprint
    events: list[Event]
    messages: list[ImportMessage]
    now: float = 1.0

    def turn(self, count: int = 1) -> StepOutput[ImportMessage]:
        for _ in range(count):
            output = self.engine.step(self.now)
            self.events += output.events
            self.messages += output.messages
        return output

    def start(self, name: str, prompt: int = 20, max_tokens: int = 8, **changes: object) -> None:
        request = StartRequest(
            key=RequestKey(name),
            token_ids=tuple(i % 50 for i in range(prompt)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens),
            leg=Leg.WHOLE,
            deadline_s=30.0,
        )
        self.engine.take(replace(request, **changes), self.now)  # type: ignore[arg-type]

    def import_(self, name: str, weights: str = "w") -> None:
        fingerprint = replace(self.fingerprint, weights=weights)
        handle = ExportHandle("p", 1, "p:1", 0, 1, fingerprint, num_blocks=2)
        self.start(name, leg=Leg.DECODE, export=handle)

    def of(self, kind: type) -> list[str]:
        return [event.key.request_id for event in self.events if isinstance(event, kind)]

    def failures(self) -> list[tuple[str, str]]:
        failed = [event for event in self.events if isinstance(event, Failed)]
        return [(event.key.request_id, event.reason) for event in failed]

    @property
    def free_blocks(self) -> int:
        return self.runner.cache.pool.num_free


def rig_of(worker: Any) -> Rig:
    return Rig(worker.engine, worker.runner, worker.fingerprint, [], [])


@pytest.fixture
def rig(make_worker: Callable[..., Any]) -> Rig:
    return rig_of(make_worker())


def test_a_whole_request_joins_and_finishes_with_its_draft_counts(rig: Rig) -> None:
    rig.start("a")
    rig.turn(20)
    (finished,) = [event for event in rig.events if isinstance(event, Finished)]
    usage = finished.usage
    assert (finished.reason, usage.prompt_tokens, usage.output_tokens) == (
        FinishReason.LENGTH,
        20,
        8,
    )
    assert usage.drafts.emitted_tokens == 7
    assert usage.drafts.drafted_tokens > 0
    assert rig.of(Joined) == ["a"]
    assert rig.free_blocks == NUM_BLOCKS


def test_a_request_can_turn_drafting_off_for_itself(rig: Rig) -> None:
    rig.start("plain", max_draft_tokens=0)
    rig.start("one", max_draft_tokens=1)
    rig.turn(20)
    drafts = {e.key.request_id: e.usage.drafts for e in rig.events if isinstance(e, Finished)}
    assert drafts["plain"].drafted_by_position == ()
    assert len(drafts["one"].drafted_by_position) == 1


def test_an_import_opens_its_stream_in_the_turn_that_admits_it(rig: Rig) -> None:
    rig.import_("a")
    rig.turn()
    assert [type(message) for message in rig.messages] == [OpenStream]
    assert rig.free_blocks == NUM_BLOCKS - 2


def test_a_stream_that_breaks_is_computed_here_and_told(rig: Rig) -> None:
    rig.import_("a")
    rig.turn()
    rig.engine.take(StreamGone(RequestKey("a"), HandOffFailed("cut")), rig.now)
    rig.turn(20)
    (joined,) = [event for event in rig.events if isinstance(event, Joined)]
    assert (joined.recomputed, joined.imported_bytes) == (True, 0)
    assert rig.of(Finished) == ["a"]
    assert rig.free_blocks == NUM_BLOCKS


def test_a_stream_that_breaks_fails_the_request_where_nothing_may_be_recomputed(
    make_worker: Callable[..., Any],
) -> None:
    rig = rig_of(make_worker(can_recompute=False))
    rig.import_("a")
    rig.turn()
    rig.engine.take(StreamGone(RequestKey("a"), HandOffFailed("cut")), rig.now)
    rig.turn(2)
    assert rig.failures() == [("a", "HAND_OFF_FAILED")]
    assert rig.free_blocks == NUM_BLOCKS


def test_an_export_of_another_model_fails_and_is_never_recomputed(rig: Rig) -> None:
    rig.import_("a", weights="other")
    rig.turn(3)
    assert rig.failures() == [("a", "FINGERPRINT_MISMATCH")]
    assert not [m for m in rig.messages if isinstance(m, OpenStream)]
    assert rig.free_blocks == NUM_BLOCKS


def test_a_prefill_that_gives_up_is_heard_at_once(rig: Rig) -> None:
    rig.import_("a")
    rig.turn()
    aborted = error_to_event(WorkerUnavailable("prefill drains"))
    rig.engine.take(EventArrived(RequestKey("a"), aborted), rig.now)
    rig.turn(20)
    assert rig.of(Finished) == ["a"]
    assert [e.recomputed for e in rig.events if isinstance(e, Joined)] == [True]


def test_a_request_waits_until_blocks_are_free_and_its_deadline_holds_there(rig: Rig) -> None:
    rig.start("big", prompt=60, max_tokens=60)
    rig.start("patient", prompt=20, max_tokens=8)
    rig.start("late", prompt=20, max_tokens=8, deadline_s=2.0)
    rig.turn(3)
    assert rig.of(Joined) == []
    rig.now += 2.0
    output = rig.turn()
    assert rig.failures() == [("late", "DEADLINE_EXCEEDED")]
    assert output.load.waiting_requests == 1
    rig.engine.take(CancelRequest(RequestKey("big")), rig.now)
    rig.turn(20)
    assert rig.of(Finished) == ["patient"]
    assert rig.free_blocks == NUM_BLOCKS


def test_what_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    rig.start("huge", prompt=60, max_tokens=70)
    rig.start("a")
    rig.turn(20)
    assert rig.failures() == [("huge", "INVALID_REQUEST")]
    assert rig.of(Finished) == ["a"]


def test_a_failed_step_fails_its_requests_and_the_next_ones_work(rig: Rig) -> None:
    rig.start("a")
    rig.turn(3)
    rig.runner.num_broken = 1
    rig.turn()
    rig.start("b")
    rig.turn(20)
    assert rig.failures() == [("a", "INTERNAL")]
    assert rig.of(Finished) == ["b"]
    assert rig.free_blocks == NUM_BLOCKS


def test_steps_that_all_fail_end_the_engine(rig: Rig) -> None:
    rig.runner.num_broken = 3
    for name in ("a", "b", "c"):
        rig.start(name)
    rig.turn(2)
    for name in ("d", "e"):
        rig.start(name)
    with pytest.raises(RuntimeError, match="broken kernel"):
        # Prompts are still computed in between, which does not make decoding work.
        rig.turn(40)


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(rig: Rig) -> None:
    rig.start("a")
    rig.turn()
    rig.engine.take(BeginDrain(), rig.now)
    rig.start("b")
    assert not rig.turn().is_drained
    assert rig.turn(20).is_drained
    assert rig.of(Finished) == ["a"]
    assert rig.failures() == [("b", "WORKER_UNAVAILABLE")]


def test_all_requests_can_be_failed_at_once_in_every_state(rig: Rig) -> None:
    rig.start("running", prompt=10)
    rig.turn(4)
    rig.import_("importing")
    rig.start("prefilling", prompt=40)
    rig.turn()
    rig.start("waiting", prompt=60, max_tokens=60)
    rig.engine.take(FailRequests(WorkerUnavailable("stop")), rig.now)
    rig.engine.take(BeginDrain(), rig.now)
    output = rig.turn(2)
    assert {name for name, _ in rig.failures()} >= {"importing", "prefilling", "waiting"}
    assert [m.update.close.reason for m in rig.messages if isinstance(m, SendUpdate)] == [2]
    assert rig.free_blocks == NUM_BLOCKS
    assert output.is_drained


def test_tokens_are_told_in_order_without_gap(rig: Rig) -> None:
    rig.start("a", generated_tokens=5)
    rig.turn(20)
    index = 5
    for event in rig.events:
        if isinstance(event, Tokens):
            assert event.output_index == index
            index += len(event.token_ids)
    assert index == 5 + 8
