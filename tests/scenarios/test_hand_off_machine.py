"""A14, the hand-off's part: hypothesis looks for an order of events that breaks its promises.

Both tables, their pools and the transfer are the shipped ones. Everything between them is a rule:
each message crosses by itself, or twice, each READ lands block by block, each engine takes its
turn, decode has room early or late and part of the prompt already, announcements get lost, streams
break, workers die, time passes, one clock jumps. After any of it, whatever the order: a published
prompt is right byte for byte and no fence of it failed, blocks in use are never written by a late
READ, a slot's epochs never repeat; and at the end, when all clients have left or the network is
gone, every block is free and no slot is held.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from decode_workers import import_stream as down
from decode_workers.import_stream import Imported
from hocket.errors import Cancelled, HandOffFailed
from hocket.types import RequestKey
from prefill_workers import export_stream as up
from tests.scenarios.hand_off_parts import Request, Stream
from tests.scenarios.hand_off_world import (
    GARBAGE,
    NUM_BLOCKS,
    OPEN_TIMEOUT_S,
    OWN,
    QUARANTINE_TIMEOUT_S,
    Decode,
    Prefill,
    bundle,
    content,
)
from tests.scenarios.transfers import MEMORY, Transfer

picks = st.integers(0, 5)
# How far decode's clock may fall behind prefill's.
_FARTHEST_BACK_S = 20.0


WEIGHTS: list[dict[str, int]] = [
    {"begin": 6, "compute": 6, "finish": 6, "abort": 3, "prefill_turn": 2, "litter": 2},
    {"open_import": 6, "receive": 8, "cancel": 1, "decode_turn": 4},
    {"write_output": 1, "free_output": 1},
    {"carry_up": 6, "carry_down": 6, "everything_arrives": 8},
    {"repeat_up": 1, "repeat_down": 1, "lose": 2},
    {"land": 3, "deliver": 8, "deliver_all": 2, "fail": 1, "take_back": 2},
    {"wait": 6, "wait_long": 1, "jump": 1},
    {"break_a_stream": 1, "restart_prefill": 1, "restart_decode": 1},
]
ACTIONS = [name for weights in WEIGHTS for name, weight in weights.items() for _ in range(weight)]


class HandOffs(RuleBasedStateMachine):
    """Every action does one thing, if it can be done now; `pick` says to whom or how much."""

    transfer: Transfer = MEMORY
    num_imported = 0

    @initialize(ends_in_silence=st.booleans())
    def start(self, ends_in_silence: bool) -> None:
        self.ends_in_silence = ends_in_silence
        # Nothing crosses any more, and no READ ends.
        self.is_cut = False
        self.now = 100.0
        # How far decode's clock is ahead of prefill's.
        self.ahead_s = 0.0
        self.fabric = self.transfer.fabric(is_automatic=False)
        self.prefill = Prefill(self.transfer, self.fabric)
        self.decode = Decode(self.transfer, self.fabric)
        self.requests: dict[RequestKey, Request] = {}
        self.streams: dict[int, Stream] = {}
        self.num_streams = 0
        self.epochs: set[tuple[int, int, int]] = set()
        # Blocks of decode that hold output of somebody: no READ may write there.
        self.own: list[int] = []

    # One rule for all: with a rule for each, hypothesis leaves most of them out of most runs.
    @rule(action=st.sampled_from(ACTIONS), pick=picks)
    def act(self, action: str, pick: int) -> None:
        getattr(self, action)(pick)
        self._send_down()
        self._send_up()

    # Prefill's engine.

    def begin(self, pick: int) -> None:
        num_blocks = 1 + pick % 4
        if not self.prefill.exports.can_begin(num_blocks):
            return
        count = len(self.requests)
        key = RequestKey(f"r-{chr(97 + count % 26)}", count // 26)
        blocks = self.prefill.pool.allocate(num_blocks)
        # Of some prompts, prefill has the first block already.
        num_ready = pick % 2
        for block in blocks[:num_ready]:
            self.prefill.exporter.pool[block] = content(key, 0)
        handle = self.prefill.exports.begin(key, blocks, self.now, num_ready)
        name = (handle.worker_epoch, handle.slot, handle.slot_epoch)
        assert name not in self.epochs, "a slot's epochs never repeat"
        self.epochs.add(name)
        self.requests[key] = Request(key, handle, num_ready)

    def compute(self, pick: int) -> None:
        if computing := [r for r in self._exported() if not r.is_finished]:
            self._compute(computing[pick % len(computing)], 1 + pick % 2)

    def finish(self, pick: int) -> None:
        if computing := [r for r in self._exported() if not r.is_finished]:
            request = computing[pick % len(computing)]
            self._compute(request, NUM_BLOCKS)
            self.prefill.exports.finish(request.key, bundle(), self.now)
            request.is_finished = True

    def abort(self, pick: int) -> None:
        if exported := self._exported():
            key = exported[pick % len(exported)].key
            self.prefill.exports.abort(key, Cancelled("no"), self.now)

    def prefill_turn(self, _pick: int) -> None:
        for lost in self.prefill.exports.tick(self.now):
            self.prefill.exports.abort(lost.key, lost.error, self.now)

    def litter(self, _pick: int) -> None:
        """Whatever is free is written by somebody else."""
        blocks = self.prefill.pool.allocate(self.prefill.pool.num_free)
        for block in blocks:
            self.prefill.exporter.pool[block] = GARBAGE
        self.prefill.pool.free(blocks)

    # Decode's engine.

    @property
    def decode_now(self) -> float:
        return self.now + self.ahead_s

    def open_import(self, pick: int) -> None:
        """Of the newest requests mostly; some are over by then."""
        if news := [r for r in self.requests.values() if not r.was_opened]:
            request = news[-1 - pick % len(news)]
            request.was_opened = request.is_importing = True
            self.decode.imports.open(request.key, request.handle, self.decode_now)

    def receive(self, pick: int) -> None:
        """There is room for the oldest that waits for it; now and then its first blocks are here
        already."""
        waiting = [r for r in self._importing() if not r.has_room]
        if not waiting or waiting[0].handle.num_blocks > self.decode.pool.num_free:
            return
        request = waiting[0]
        num_blocks = request.handle.num_blocks
        num_kept = min(max(0, pick - 3), num_blocks)
        blocks = self._allocate(num_blocks)
        request.kept, request.blocks = blocks[:num_kept], blocks[num_kept:]
        for position, block in enumerate(request.kept):
            self.decode.importer.pool[block] = content(request.key, position)
        self.decode.imports.receive(request.key, blocks, self.decode_now, num_kept)

    def cancel(self, pick: int) -> None:
        if importing := self._importing():
            request = importing[pick % len(importing)]
            self.decode.imports.cancel(request.key, self.decode_now)
            self._end_import(request)

    def decode_turn(self, _pick: int) -> None:
        for outcome in self.decode.imports.tick(self.decode_now):
            request = self.requests[outcome.key]
            if isinstance(outcome, Imported):
                assert not request.has_failed_fence
                assert all(position < len(request.kept) for position in request.lost)
                blocks = request.kept + request.blocks
                found = [self.decode.importer.pool[block] for block in blocks]
                assert len(found) == request.handle.num_blocks
                assert found == [content(request.key, i) for i in range(len(blocks))]
                self.decode.pool.free(request.blocks)
                type(self).num_imported += 1
            self._end_import(request)

    def write_output(self, pick: int) -> None:
        blocks = self._allocate(min(1 + pick, self.decode.pool.num_free))
        for block in blocks:
            self.decode.importer.pool[block] = OWN
        self.own += blocks

    def free_output(self, _pick: int) -> None:
        self.decode.pool.free(self.own)
        self.own = []

    # READs.

    def land(self, pick: int) -> None:
        if reads := [r for r in self.fabric.reads if r.num_copied < len(r.local_blocks)]:
            self.fabric.copy(reads[pick % len(reads)], 1)

    def deliver(self, pick: int) -> None:
        if not self.fabric.reads:
            return
        self._deliver(self.fabric.reads[pick % len(self.fabric.reads)])

    def _deliver(self, read: Any) -> None:
        request = self._reader_of(read)
        epoch = self.prefill.exporter.slot_epoch(read.slot)
        if request is not None and epoch != request.handle.slot_epoch:
            request.has_failed_fence = True
        self.fabric.deliver(read)

    def deliver_all(self, _pick: int) -> None:
        while self.fabric.reads:
            self.deliver(0)

    def fail(self, pick: int) -> None:
        if self.fabric.reads:
            self.fabric.fail(self.fabric.reads[pick % len(self.fabric.reads)])

    def take_back(self, pick: int) -> None:
        """Decode waits for nothing but a READ when prefill lets go of the blocks and somebody else
        writes into them; the bytes are faster than the news."""
        readers = [self._reader_of(read) for read in self.fabric.reads]
        alive = self._exported()
        taken = [request for request in readers if request in alive]
        if not taken:
            return
        request = taken[pick % len(taken)]
        if not request.is_finished:
            self._compute(request, NUM_BLOCKS)
            self.prefill.exports.finish(request.key, bundle(), self.now)
            request.is_finished = True
        self._send_down()
        for stream in [s for s in self.streams.values() if s.key == request.key]:
            while stream.going_down:
                self._carry_one_down(stream)
        self.prefill.exports.abort(request.key, Cancelled("no"), self.now)
        self.litter(0)
        for read in [r for r in self.fabric.reads if self._reader_of(r) is request]:
            self._deliver(read)
        self.decode_turn(0)

    # The network, and deaths.

    def carry_up(self, pick: int) -> None:
        streams = [stream for stream in self.streams.values() if stream.going_up]
        if not streams:
            return
        stream = streams[pick % len(streams)]
        update = stream.going_up.popleft()
        if update is None:
            stream.is_known_above = False
            self.prefill.exports.take(up.StreamGone(stream.number), self.now)
        else:
            stream.last_up = update
            self.prefill.exports.take(up.UpdateArrived(stream.number, update), self.now)
        self._send_down()
        self._forget(stream)

    def carry_down(self, pick: int) -> None:
        streams = [stream for stream in self.streams.values() if stream.going_down]
        if not streams:
            return
        self._carry_one_down(streams[pick % len(streams)])

    def _carry_one_down(self, stream: Stream) -> None:
        event = stream.going_down.popleft()
        if event is not None:
            stream.last_down = event
            self.decode.imports.take(down.EventArrived(stream.key, event), self.decode_now)
        else:
            stream.is_known_below = False
            if not stream.is_closed_by_decode:
                gone = down.StreamGone(stream.key, HandOffFailed("the stream ended"))
                self.decode.imports.take(gone, self.decode_now)
        self._send_up()
        self._forget(stream)

    def repeat_up(self, pick: int) -> None:
        """An update arrives a second time."""
        streams = [s for s in self.streams.values() if s.last_up and s.is_known_above]
        if streams:
            stream = streams[pick % len(streams)]
            assert stream.last_up is not None
            self.prefill.exports.take(up.UpdateArrived(stream.number, stream.last_up), self.now)

    def repeat_down(self, pick: int) -> None:
        """An event arrives a second time."""
        streams = [s for s in self.streams.values() if s.last_down and s.is_known_below]
        if streams:
            stream = streams[pick % len(streams)]
            assert stream.last_down is not None
            event = down.EventArrived(stream.key, stream.last_down)
            self.decode.imports.take(event, self.decode_now)

    def lose(self, pick: int) -> None:
        """An announcement does not arrive."""
        chunks = [
            (stream, event)
            for stream in self.streams.values()
            for event in stream.going_down
            if event is not None and event.HasField("chunk")
        ]
        if chunks:
            stream, event = chunks[pick % len(chunks)]
            stream.going_down.remove(event)
            first, count = event.chunk.first_block, len(event.chunk.blocks)
            self.requests[stream.key].lost.update(range(first, first + count))

    def everything_arrives(self, _pick: int) -> None:
        while not self.is_cut and any(s.going_up or s.going_down for s in self.streams.values()):
            self.carry_up(0)
            self.carry_down(0)
        self.act("prefill_turn", 0)
        self.act("decode_turn", 0)

    def wait(self, pick: int) -> None:
        self.now += 0.1 * pick

    def wait_long(self, pick: int) -> None:
        """Beyond more deadlines the higher the pick."""
        self.now += (2.5, 2.5, 5.0, 7.0, 16.0, 31.0)[pick]

    def jump(self, pick: int) -> None:
        """Decode's clock alone."""
        jump_s = (-10.0, -3.0, 1.0, 3.0, 7.0, 3600.0)[pick]
        self.ahead_s = max(-_FARTHEST_BACK_S, self.ahead_s + jump_s)

    def break_a_stream(self, pick: int) -> None:
        if self.streams:
            list(self.streams.values())[pick % len(self.streams)].end()

    def restart_prefill(self, pick: int) -> None:
        """Killed and started again at the same address; seldom."""
        if pick:
            return
        self.prefill.exporter.close()
        self.prefill = Prefill(self.transfer, self.fabric, epoch=self.prefill.epoch + 1)
        for stream in list(self.streams.values()):
            stream.is_known_above = False
            stream.end()
            self._forget(stream)

    def restart_decode(self, pick: int) -> None:
        """Its memory and its READs are gone with it; seldom."""
        if pick:
            return
        self.decode.importer.close()
        self.decode = Decode(self.transfer, self.fabric, self.decode.epoch + 1)
        self.own = []
        for request in self._importing():
            request.is_importing, request.kept, request.blocks = False, [], []
        for stream in list(self.streams.values()):
            stream.is_known_below = False
            stream.end()
            self._forget(stream)

    # What must hold.

    @invariant()
    def output_is_untouched(self) -> None:
        assert all(self.decode.importer.pool[block] == OWN for block in self.own)

    @invariant()
    def what_was_here_before_is_untouched(self) -> None:
        for request in self._importing():
            found = [self.decode.importer.pool[block] for block in request.kept]
            assert found == [content(request.key, i) for i in range(len(found))]

    @invariant()
    def no_block_is_held_by_nobody(self) -> None:
        importing = sum(len(request.kept + request.blocks) for request in self._importing())
        assert self.decode.pool.num_held <= importing + len(self.own)
        exported = sum(request.handle.num_blocks for request in self._exported())
        assert self.prefill.pool.num_held <= exported

    def teardown(self) -> None:
        """All clients leave, or nobody hears of anybody any more; time does the rest."""
        self.is_cut = self.ends_in_silence
        if not self.is_cut:
            for _ in self._importing():
                self.act("cancel", 0)
            for _ in self._exported():
                self.act("abort", 0)
        self.free_output(0)
        for _ in range(int(OPEN_TIMEOUT_S + QUARANTINE_TIMEOUT_S + _FARTHEST_BACK_S)):
            self.now += 1.0
            self.everything_arrives(0)
        assert self.prefill.pool.num_free == NUM_BLOCKS
        assert self.decode.pool.num_free == NUM_BLOCKS
        assert self.prefill.exports.is_idle
        assert self.decode.imports.is_idle
        assert not self.fabric.reads
        assert self.is_cut or not self.streams
        for _ in range(self.prefill.exports.settings.num_slots):
            assert self.prefill.exports.can_begin(1), "a slot is held"
            self.begin(0)
        self.decode.importer.close()
        self.prefill.exporter.close()

    # What the servers do, and what the tables are asked.

    def _exported(self) -> list[Request]:
        keys = self.prefill.exports.keys()
        return [self.requests[key] for key in keys]

    def _importing(self) -> list[Request]:
        return [request for request in self.requests.values() if request.is_importing]

    def _end_import(self, request: Request) -> None:
        """The blocks that the import had are no longer ours to free; the others are."""
        self.decode.pool.free(request.kept)
        request.is_importing, request.kept, request.blocks = False, [], []

    def _compute(self, request: Request, most: int) -> None:
        count = min(most, request.handle.num_blocks - request.num_computed)
        if count:
            self.prefill.compute(request.key, request.num_computed, count, self.now)
            request.num_computed += count

    def _allocate(self, count: int) -> list[int]:
        blocks = self.decode.pool.allocate(count)
        targets = {block for read in self.fabric.reads for block in read.local_blocks}
        assert targets.isdisjoint(blocks), "a READ may still write there"
        return blocks

    def _reader_of(self, read: Any) -> Request | None:
        """Whose blocks the READ writes; None when it was abandoned."""
        targets = set(read.local_blocks)
        return next((r for r in self._importing() if targets <= set(r.blocks)), None)

    def _send_up(self) -> None:
        for message in self.decode.imports.take_messages():
            match message:
                case down.OpenStream(key, _, update):
                    self.num_streams += 1
                    self.streams[self.num_streams] = Stream(self.num_streams, key, deque([update]))
                case down.SendUpdate(key, update):
                    for stream in self._writable(key):
                        stream.going_up.append(update)
                case down.EndStream(key) if not self.is_cut:
                    for stream in self._writable(key):
                        stream.is_closed_by_decode = True
                        stream.going_up.append(None)

    def _forget(self, stream: Stream) -> None:
        if not (stream.is_known_above or stream.is_known_below):
            del self.streams[stream.number]

    def _writable(self, key: RequestKey) -> list[Stream]:
        """The stream that decode writes to, if it is whole still."""
        return [s for s in self.streams.values() if s.key == key and s.is_whole]

    def _send_down(self) -> None:
        """A stream that prefill ends reads no more; the table hears of its end, as of any."""
        for message in self.prefill.exports.take_messages():
            stream = self.streams.get(message.stream)
            if self.is_cut and isinstance(message, up.EndStream):
                self.prefill.exports.take(up.StreamGone(message.stream), self.now)
            if stream is None or not stream.is_known_below or None in stream.going_down:
                continue
            match message:
                case up.SendEvent(_, event):
                    stream.going_down.append(event)
                case up.EndStream():
                    stream.going_down.append(None)
                    if stream.is_known_above and None not in stream.going_up:
                        stream.going_up.append(None)


def test_a14_no_order_of_events_leaks_or_publishes_what_is_not_so(transfer: Transfer) -> None:
    machine = type("HandOffs", (HandOffs,), {"transfer": transfer, "num_imported": 0})
    # Every READ and every restart is real work over NIXL; the search itself is the same.
    num_examples = 80 if transfer is MEMORY else 10
    limits = settings(
        max_examples=num_examples, stateful_step_count=150, deadline=None, database=None
    )
    run_state_machine_as_test(machine, settings=limits)
    assert machine.num_imported > num_examples / 8, "the search hardly ever finishes a hand-off"
