"""Claims about the prefill engine alone: what it announces, when it starts, how it fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from hocket.errors import WorkerUnavailable
from hocket.execution.engine_thread import BeginDrain, CancelRequest, FailRequests, StepOutput
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import fingerprint_to_message, handle_to_message, key_to_message
from hocket.types import (
    Begun,
    Event,
    ExportHandle,
    Failed,
    Fingerprint,
    Finished,
    Leg,
    RequestKey,
    StartRequest,
    Tokens,
)
from prefill_workers.engine import PrefillEngine
from prefill_workers.export_stream import ExportMessage, StreamGone, UpdateArrived

NUM_BLOCKS = 16


@dataclass
class Rig:
    """An engine under a hand-moved clock; events and messages are kept as they come."""

    engine: PrefillEngine
    runner: Any
    fingerprint: Fingerprint
    events: list[Event]
    messages: list[ExportMessage]
    now: float = 1.0

    def turn(self, count: int = 1) -> StepOutput[ExportMessage]:
        for _ in range(count):
            output = self.engine.step(self.now)
            self.events += output.events
            self.messages += output.messages
        return output

    def start(self, name: str, prompt_tokens: int, max_tokens: int = 8) -> RequestKey:
        request = StartRequest(
            key=RequestKey(name),
            token_ids=tuple(i % 50 for i in range(prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens),
            leg=Leg.PREFILL,
            deadline_s=30.0,
        )
        self.engine.take(request, self.now)
        return request.key

    def open(self, key: RequestKey, stream: int = 1) -> None:
        (handle,) = [e.export for e in self.events if isinstance(e, Begun) and e.key == key]
        self.engine.take(UpdateArrived(stream, opening(key, handle, self.fingerprint)), self.now)

    def close(self, stream: int = 1) -> None:
        close = worker.CloseExport(reason=worker.CloseExport.REASON_DONE)
        update = worker.ExportUpdate(close=close)
        self.engine.take(UpdateArrived(stream, update), self.now)

    def of(self, kind: type) -> list[str]:
        return [event.key.request_id for event in self.events if isinstance(event, kind)]

    @property
    def free_blocks(self) -> int:
        return self.runner.cache.pool.num_free


def opening(key: RequestKey, handle: ExportHandle, fingerprint: Fingerprint) -> worker.ExportUpdate:
    return worker.ExportUpdate(
        open=worker.OpenExport(
            key=key_to_message(key),
            export=handle_to_message(handle),
            worker_id="d",
            worker_epoch=1,
            fingerprint=fingerprint_to_message(fingerprint),
        )
    )


@pytest.fixture
def rig(tiny_worker: Any) -> Rig:
    return Rig(tiny_worker.engine, tiny_worker.runner, tiny_worker.fingerprint, [], [])


def test_begun_is_told_before_anything_is_computed(rig: Rig) -> None:
    rig.start("a", 30)
    rig.turn()
    assert (rig.of(Begun), rig.of(Tokens)) == (["a"], [])
    rig.turn()
    assert (rig.of(Tokens), rig.of(Finished)) == (["a"], ["a"])


def test_full_blocks_are_announced_as_they_fill_and_the_partial_one_at_the_end(rig: Rig) -> None:
    key = rig.start("a", 90)
    rig.turn()
    rig.open(key)
    rig.turn(4)
    events = [message.event for message in rig.messages if hasattr(message, "event")]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["opened", "chunk", "chunk", "chunk", "bundle"]
    spans = [(e.chunk.first_block, len(e.chunk.blocks)) for e in events if e.HasField("chunk")]
    assert spans == [(0, 2), (2, 2), (4, 2)]
    assert events[-1].bundle.usage.prompt_tokens == 90


def test_above_the_unread_share_nothing_starts_until_blocks_are_read(rig: Rig) -> None:
    first = rig.start("first", 150)
    rig.turn(8)
    assert rig.of(Finished) == ["first"]
    rig.start("second", 20)
    output = rig.turn(3)
    assert rig.of(Begun) == ["first"]
    assert (output.load.unread_blocks, output.load.waiting_requests) == (10, 1)
    assert output.wait_s > 0
    rig.open(first)
    rig.turn()
    rig.close()
    rig.turn(2)
    assert rig.of(Begun) == ["first", "second"]


def test_one_token_requests_need_no_export_even_when_nothing_may_be_exported(rig: Rig) -> None:
    rig.start("first", 150)
    rig.turn(8)
    rig.start("one", 20, max_tokens=1)
    rig.turn(2)
    assert rig.of(Finished) == ["first", "one"]
    assert rig.free_blocks == NUM_BLOCKS - 10


def test_a_key_that_is_still_exported_is_refused(rig: Rig) -> None:
    rig.start("a", 20)
    rig.turn(2)
    rig.start("a", 20)
    rig.turn(2)
    (failed,) = [event for event in rig.events if isinstance(event, Failed)]
    assert (failed.reason, dict(failed.metadata)["field"]) == ("INVALID_REQUEST", "key")
    assert rig.free_blocks == NUM_BLOCKS - 2


def test_what_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    rig.start("huge", 257)
    rig.turn()
    (failed,) = [event for event in rig.events if isinstance(event, Failed)]
    assert (failed.reason, dict(failed.metadata)["limit"][:8]) == ("INVALID_REQUEST", "1 to 256")


def test_a_failed_step_fails_its_requests_and_the_next_ones_work(rig: Rig) -> None:
    rig.runner.num_broken = 1
    rig.start("a", 20)
    rig.start("b", 20)
    rig.turn(2)
    assert {e.reason for e in rig.events if isinstance(e, Failed)} == {"INTERNAL"}
    assert rig.of(Failed) == ["a", "b"]
    assert rig.free_blocks == NUM_BLOCKS
    rig.start("c", 20)
    rig.turn(2)
    assert rig.of(Finished) == ["c"]


def test_the_third_failed_step_in_a_row_ends_the_engine(rig: Rig) -> None:
    rig.runner.num_broken = 3
    for name in ("a", "b"):
        rig.start(name, 20)
        rig.turn(2)
    rig.start("c", 20)
    rig.turn()
    with pytest.raises(RuntimeError, match="broken kernel"):
        rig.turn()


def test_a_reader_that_leaves_early_stops_the_prompt_at_the_next_chunk(rig: Rig) -> None:
    key = rig.start("a", 120)
    rig.turn()
    rig.open(key)
    rig.turn()
    rig.engine.take(StreamGone(1), rig.now)
    rig.turn()
    (failed,) = [event for event in rig.events if isinstance(event, Failed)]
    assert failed.reason == "HAND_OFF_FAILED"
    assert rig.of(Tokens) == []
    assert rig.free_blocks == NUM_BLOCKS


def test_a_cancel_after_the_last_chunk_takes_back_the_export(rig: Rig) -> None:
    key = rig.start("a", 20)
    rig.turn(2)
    assert rig.free_blocks == NUM_BLOCKS - 2
    rig.engine.take(CancelRequest(key), rig.now)
    rig.turn()
    assert rig.free_blocks == NUM_BLOCKS
    assert rig.of(Failed) == []


def test_an_export_that_nobody_opens_is_given_up_without_traffic(rig: Rig) -> None:
    rig.start("a", 20)
    output = rig.turn(3)
    assert output.wait_s <= 5.0
    rig.now += 5.0
    rig.turn()
    assert rig.free_blocks == NUM_BLOCKS


def test_a_draining_worker_refuses_new_requests_and_keeps_blocks_until_they_are_read(
    rig: Rig,
) -> None:
    key = rig.start("a", 20)
    rig.turn()
    rig.engine.take(BeginDrain(), rig.now)
    rig.start("b", 20)
    assert not rig.turn(3).is_drained
    assert rig.of(Failed) == ["b"]
    rig.open(key)
    assert not rig.turn().is_drained
    rig.close()
    assert rig.turn(2).is_drained


def test_all_requests_and_exports_can_be_failed_at_once(rig: Rig) -> None:
    rig.start("done", 20)
    rig.turn(2)
    rig.start("running", 100)
    rig.turn(2)
    rig.start("waiting", 100)
    rig.engine.take(FailRequests(WorkerUnavailable("stop")), rig.now)
    rig.engine.take(BeginDrain(), rig.now)
    output = rig.turn(2)
    assert sorted(rig.of(Failed)) == ["running", "waiting"]
    assert rig.free_blocks == NUM_BLOCKS
    assert output.is_drained


def test_a_migrated_request_counts_its_output_from_where_it_stopped(rig: Rig) -> None:
    rig.start("a", 20)
    request = StartRequest(
        key=RequestKey("b"),
        token_ids=tuple(range(20)),
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(4),
        leg=Leg.PREFILL,
        deadline_s=30.0,
    )
    rig.engine.take(replace(request, generated_tokens=5), rig.now)
    rig.turn(3)
    indices = {e.key.request_id: e.output_index for e in rig.events if isinstance(e, Tokens)}
    assert indices == {"a": 0, "b": 5}
    (usage,) = [e.usage for e in rig.events if isinstance(e, Finished) and e.key.request_id == "b"]
    assert usage.prompt_tokens == 15
