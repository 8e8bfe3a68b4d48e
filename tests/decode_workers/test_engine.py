"""Claims about the decode engine alone: whole requests, refused hand-offs, queues, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_workers.import_stream import (
    EventArrived,
    OpenStream,
    SendUpdate,
    StreamGone,
)
from hocket.errors import HandOffFailed, WorkerUnavailable
from hocket.execution.engine_thread import BeginDrain, CancelRequest, FailRequests
from hocket.kv.wire import error_to_event
from hocket.request_params import StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.types import Finished, FinishReason, Joined, RequestKey, Tokens
from tests.decode_workers.rig import Rig

NUM_BLOCKS = 8


@pytest.fixture
def rig(make_worker: Callable[..., Any]) -> Rig:
    return Rig(make_worker())


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


def test_a_request_that_waits_for_blocks_keeps_its_export_alive(rig: Rig) -> None:
    rig.start("big", prompt=60, max_tokens=60)
    rig.turn()
    rig.import_("a")
    rig.turn()
    assert [message.key.request_id for message in rig.messages] == ["a"]
    rig.prefill_hands_over("a")
    for _ in range(9):
        rig.now += 1.0
        rig.turn()
        rig.prefill_says("a", worker.ExportEvent(progress=worker.Progress()))
    assert rig.said("a").count("progress") > 3
    assert rig.of(Joined) == ["big"]
    rig.turn_until(lambda: "a" in rig.of(Finished))
    (joined,) = [e for e in rig.events if isinstance(e, Joined) and e.key.request_id == "a"]
    assert (joined.imported_bytes, joined.recomputed) == (16, False)
    assert rig.is_at_rest


def test_a_hand_off_that_fails_in_the_queue_is_computed_at_its_turn_and_told(rig: Rig) -> None:
    rig.start("big", prompt=60, max_tokens=60)
    rig.turn()
    rig.import_("a")
    rig.start("b", prompt=60, max_tokens=60)
    rig.turn()
    rig.engine.take(StreamGone(RequestKey("a"), HandOffFailed("cut")), rig.now)
    rig.turn_until(lambda: len(rig.of(Finished)) == 3)
    joined = {e.key.request_id: e.recomputed for e in rig.events if isinstance(e, Joined)}
    assert joined == {"big": False, "a": True, "b": False}
    assert rig.of(Joined) == ["big", "a", "b"]
    assert rig.is_at_rest


def test_a_hand_off_that_fails_in_the_queue_fails_where_nothing_may_be_recomputed(
    make_worker: Callable[..., Any],
) -> None:
    rig = Rig(make_worker(can_recompute=False))
    rig.start("big", prompt=60, max_tokens=60)
    rig.turn()
    rig.import_("a")
    rig.turn()
    rig.engine.take(StreamGone(RequestKey("a"), HandOffFailed("cut")), rig.now)
    rig.turn()
    assert rig.failures() == [("a", "HAND_OFF_FAILED")]
    rig.turn_until(lambda: rig.is_at_rest)


@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_cancel_and_deadline_reach_an_import_that_waits_and_end_its_stream(
    rig: Rig, leave: str
) -> None:
    rig.start("big", prompt=60, max_tokens=60)
    rig.turn()
    rig.import_("a", deadline_s=2.0)
    rig.turn()
    if leave == "cancel":
        rig.engine.take(CancelRequest(RequestKey("a")), rig.now)
    else:
        rig.now += 2.0
    rig.turn()
    assert rig.failures() == [("a", "CANCELLED" if leave == "cancel" else "DEADLINE_EXCEEDED")]
    assert rig.said("a") == ["close"]
    rig.turn_until(lambda: rig.is_at_rest)


def test_an_export_of_another_prompts_size_is_never_opened(rig: Rig) -> None:
    rig.import_("a", prompt=20)
    rig.import_("b", prompt=20, token_ids=(1,) * 40)
    rig.turn_until(lambda: "b" in rig.of(Finished))
    assert [m.key.request_id for m in rig.messages if isinstance(m, OpenStream)] == ["a"]
    assert [e.recomputed for e in rig.events if isinstance(e, Joined)] == [True]


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
    rig = Rig(make_worker(can_recompute=False))
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


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [(129, 1), (201, 1), (60, 70), (100, 101)],
    ids=["the pool", "the model", "the pool with output", "the model with output"],
)
def test_what_is_longer_than_the_capacity_is_refused_at_once_and_the_queue_moves(
    rig: Rig, prompt: int, max_tokens: int
) -> None:
    """E1 on the decode side."""
    rig.start("first", prompt=60, max_tokens=60)
    rig.start("huge", prompt=prompt, max_tokens=max_tokens)
    rig.import_("huge too", prompt=prompt, stopping=StoppingParams(max_tokens))
    rig.start("behind")
    rig.turn()
    assert rig.failures() == [("huge", "INVALID_REQUEST"), ("huge too", "INVALID_REQUEST")]
    assert not [m for m in rig.messages if isinstance(m, OpenStream)]
    rig.turn_until(lambda: rig.of(Finished) == ["first", "behind"])
    assert rig.is_at_rest


def test_imports_that_hold_all_blocks_while_prefill_waits_for_another_do_not_lock(
    rig: Rig,
) -> None:
    """E3: prefill can't go on with the first three before someone reads the last; it is read from
    the queue's end as soon as there is room, and there is room because stalled imports end."""
    for name in ("a", "b", "c"):
        rig.import_(name, prompt=30, stopping=StoppingParams(10))
    rig.turn()
    assert rig.free_blocks < 3
    rig.import_("last", prompt=30, stopping=StoppingParams(10))
    rig.turn()
    opened = [m.key.request_id for m in rig.messages if isinstance(m, OpenStream)]
    assert opened == ["a", "b", "c", "last"], "prefill must hear of every request it waits for"
    rig.prefill_hands_over("last")
    for _ in range(7):
        rig.now += 1.0
        rig.turn()
        rig.prefill_says("last", worker.ExportEvent(progress=worker.Progress()))
    rig.turn_until(lambda: len(rig.of(Finished)) == 4)
    joined = {e.key.request_id: e.recomputed for e in rig.events if isinstance(e, Joined)}
    assert joined == {"a": True, "b": True, "c": True, "last": False}
    assert rig.is_at_rest


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


def test_b3_damaged_kv_of_one_request_ends_that_one_and_changes_no_other(
    make_worker: Callable[..., Any],
) -> None:
    undisturbed = Rig(make_worker())
    rig = Rig(make_worker())
    for each in (undisturbed, rig):
        for name, prompt in (("a", 11), ("b", 20), ("c", 17)):
            each.start(name, prompt=prompt, max_tokens=12)
        each.turn_until(lambda each=each: len(each.of(Joined)) == 3)
    damaged = rig.worker.engine._live[RequestKey("b")].blocks
    rig.worker.runner.cache.storage[damaged] = 0xFF  # NaN in every dtype
    for each in (undisturbed, rig):
        each.turn(40)
    assert [name for name, _ in rig.failures()] == ["b"]
    assert sorted(rig.of(Finished)) == ["a", "c"]
    for name in ("a", "c"):
        assert rig.output(name) == undisturbed.output(name)
    assert rig.free_blocks == NUM_BLOCKS
