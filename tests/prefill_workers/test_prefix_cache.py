"""Claims about the prefill engine's prefix cache: what is computed, announced, counted, shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hocket.execution.engine_thread import CancelRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import fingerprint_to_message, handle_to_message, key_to_message
from hocket.types import Begun, Event, Finished, Leg, RequestKey, StartRequest, Tokens
from prefill_workers.export_stream import ExportMessage, SendEvent, UpdateArrived

BLOCK_TOKENS = 16
NUM_BLOCKS = 16
GREEDY = SamplingParams(temperature=0.0)
DONE = worker.ExportUpdate(close=worker.CloseExport(reason=worker.CloseExport.REASON_DONE))


@dataclass
class Rig:
    """A caching engine, and a reader that takes every export as soon as it has begun."""

    worker: Any
    events: list[Event] = field(default_factory=list[Event])
    messages: list[ExportMessage] = field(default_factory=list[ExportMessage])
    num_streams: int = 0

    @property
    def pool(self) -> Any:
        return self.worker.runner.cache.pool

    @property
    def computed_tokens(self) -> int:
        return self.turn().load.computed_prompt_tokens

    def turn(self) -> Any:
        output = self.worker.engine.step(1.0)
        self.events += output.events
        self.messages += output.messages
        return output

    def start(self, name: str, tokens: list[int], max_tokens: int = 8, salt: bytes = b"") -> None:
        stopping = StoppingParams(max_tokens)
        request = StartRequest(
            RequestKey(name), tuple(tokens), GREEDY, stopping, Leg.PREFILL, 30.0, tenant_salt=salt
        )
        self.worker.engine.take(request, 1.0)

    def run(self, name: str, tokens: list[int], salt: bytes = b"") -> Finished:
        """A request from its start to the moment that decode has all of it."""
        self.start(name, tokens, salt=salt)
        self.turn()
        self.open(name)
        while not (finished := self.find(Finished, name)):
            self.turn()
        self.turn()
        self.close()
        return finished

    def open(self, name: str) -> None:
        key = RequestKey(name)
        opening = worker.OpenExport(
            key=key_to_message(key),
            export=handle_to_message(self.find(Begun, name).export),
            worker_id="d",
            worker_epoch=1,
            fingerprint=fingerprint_to_message(self.worker.fingerprint),
        )
        self.num_streams += 1
        update = UpdateArrived(self.num_streams, worker.ExportUpdate(open=opening))
        self.worker.engine.take(update, 1.0)

    def close(self) -> None:
        self.worker.engine.take(UpdateArrived(self.num_streams, DONE), 1.0)
        self.turn()

    def find(self, kind: type, name: str) -> Any:
        found = [e for e in self.events if isinstance(e, kind) and e.key.request_id == name]
        return found[0] if found else None

    def chunks(self) -> list[tuple[int, int]]:
        """First block and number of blocks of every announcement on the newest stream."""
        sent = [m for m in self.messages if isinstance(m, SendEvent)]
        ours = [m.event.chunk for m in sent if m.stream == self.num_streams]
        return [(chunk.first_block, len(chunk.blocks)) for chunk in ours if chunk.blocks]


@pytest.fixture
def rig(caching_worker: Any) -> Rig:
    return Rig(caching_worker)


def tokens(count: int, start: int = 0) -> list[int]:
    return [(start + i * i) % 50 for i in range(count)]


def test_an_equal_beginning_is_computed_once_and_usage_says_so(rig: Rig) -> None:
    shared = tokens(40)
    assert rig.run("first", shared + tokens(20, 3)).usage.cached_tokens == 0
    before = rig.computed_tokens
    finished = rig.run("second", shared + tokens(30, 7))
    # Two full blocks are equal; the last token of them is computed again for its hidden state.
    assert finished.usage.cached_tokens == 2 * BLOCK_TOKENS - 1
    assert rig.computed_tokens - before == 70 - finished.usage.cached_tokens


def test_blocks_that_were_here_are_announced_as_soon_as_the_reader_is(rig: Rig) -> None:
    rig.run("first", tokens(48))
    rig.start("second", tokens(60))
    rig.turn()
    rig.open("second")
    rig.turn()
    assert rig.chunks()[0] == (0, 3)
    rig.turn()
    assert rig.chunks() == [(0, 3), (3, 1)]


def test_a_prompt_that_is_here_as_a_whole_computes_its_last_token(rig: Rig) -> None:
    first = rig.run("first", tokens(48))
    before = rig.computed_tokens
    second = rig.run("second", tokens(48))
    assert rig.computed_tokens - before == 1
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 47)
    tokens_of = [rig.find(Tokens, name).token_ids for name in ("first", "second")]
    assert tokens_of[0] == tokens_of[1]


def test_c13_another_tenant_shares_nothing(rig: Rig) -> None:
    rig.run("first", tokens(48), salt=b"a")
    assert rig.run("second", tokens(48), salt=b"b").usage.cached_tokens == 0
    assert rig.run("third", tokens(48), salt=b"a").usage.cached_tokens == 47


def test_two_readers_of_the_same_blocks_free_them_once_each(rig: Rig) -> None:
    rig.run("first", tokens(48))
    for name in ("second", "third"):
        rig.start(name, tokens(48))
    for _ in range(3):
        rig.turn()
    # Three blocks, held by both.
    assert rig.pool.num_held == 3
    for name in ("second", "third"):
        rig.worker.engine.take(CancelRequest(RequestKey(name)), 1.0)
        rig.turn()
    assert rig.pool.num_free == NUM_BLOCKS
    assert rig.run("fourth", tokens(48)).usage.cached_tokens == 47


def test_a_cancelled_prompt_leaves_what_was_computed_of_it(rig: Rig) -> None:
    rig.start("first", tokens(200))
    for _ in range(3):
        rig.turn()
    rig.worker.engine.take(CancelRequest(RequestKey("first")), 1.0)
    rig.turn()
    assert rig.pool.num_free == NUM_BLOCKS
    # Two chunks of 40 tokens, cut at block boundaries.
    assert rig.run("second", tokens(200)).usage.cached_tokens == 4 * BLOCK_TOKENS - 1


def test_room_is_counted_without_the_blocks_that_are_shared(rig: Rig) -> None:
    """Cached blocks are free until they are shared: counted twice, there would be room for more
    than there is."""
    rig.run("first", tokens(7 * BLOCK_TOKENS))
    assert rig.pool.num_free == NUM_BLOCKS
    rig.start("other", tokens(8 * BLOCK_TOKENS, 9))
    rig.turn()
    # 8 free blocks, 7 of them cached: 7 shared and 2 new ones are more than there are.
    rig.start("second", tokens(9 * BLOCK_TOKENS))
    rig.turn()
    assert rig.find(Begun, "second") is None
    rig.worker.engine.take(CancelRequest(RequestKey("other")), 1.0)
    assert rig.run("second-again", tokens(9 * BLOCK_TOKENS)).usage.cached_tokens > 0


def test_one_token_requests_use_and_fill_the_cache_too(rig: Rig) -> None:
    rig.start("first", tokens(48), max_tokens=1)
    rig.start("second", tokens(48), max_tokens=1)
    while rig.find(Finished, "first") is None:
        rig.turn()
    rig.start("third", tokens(48), max_tokens=1)
    while rig.find(Finished, "third") is None:
        rig.turn()
    assert rig.find(Finished, "third").usage.cached_tokens == 47
    assert rig.pool.num_free == NUM_BLOCKS


def test_unread_blocks_that_prompts_share_count_once(rig: Rig) -> None:
    rig.run("first", tokens(48))
    for name in ("second", "third"):
        rig.start(name, tokens(48))
    for _ in range(3):
        rig.turn()
    assert rig.turn().load.unread_blocks == 3
