"""Both ownership machines, their pools, and everything that may happen between them, as numbers.

`World.act(choice)` does one of many things, if it can be done now: a list of numbers is an order of
events. A block's content is the prompt's name and position, so that a wrong byte is seen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hocket.errors import Cancelled, HandOffFailed, HocketError
from hocket.kv.block_pool import BlockPool
from hocket.scheduling import export_words as down
from hocket.scheduling import import_words as up
from hocket.scheduling.export_ownership import ExportOwnership
from hocket.scheduling.import_ownership import ImportOwnership
from hocket.types import RequestKey

NUM_BLOCKS = 8
NUM_SLOTS = 3
EXPORT_LIMITS = down.ExportLimits(NUM_SLOTS, 6.0, 15.0, max_unread_share=0.5)
IMPORT_LIMITS = up.ImportLimits(
    progress_timeout_s=6.0,
    read_timeout_s=4.0,
    max_quarantine_share=0.5,
    quarantine_timeout_s=30.0,
    max_read_attempts=2,
)
# The longest deadline of all, and a little.
AT_REST_S = 31.0
OURS = ("decode's own", 0)

Content = tuple[object, int]


class Slots:
    """The epoch words of one life of prefill."""

    def __init__(self, first_epoch: int) -> None:
        self.epochs = [first_epoch] * NUM_SLOTS

    def slot_epoch(self, slot: int) -> int:
        return self.epochs[slot]

    def bump_slot_epoch(self, slot: int) -> int:
        self.epochs[slot] += 1
        return self.epochs[slot]


@dataclass
class Request:
    """A prompt, as gateway and engines know it."""

    key: RequestKey
    num_blocks: int
    slot: int
    epoch: int
    life: int
    num_computed: int = 0
    is_finished: bool = False
    was_opened: bool = False
    blocks: list[int] = field(default_factory=list[int])
    num_kept: int = 0
    is_over_on_decode: bool = False


@dataclass
class Stream:
    """What is on its way; None, always last, tells a side that the stream is over."""

    number: int
    request: Request
    going_up: deque[up.ImportWord | None] = field(default_factory=deque)
    going_down: deque[down.ExportWord | None] = field(default_factory=deque)
    is_known_above: bool = True
    is_known_below: bool = True

    def end(self) -> None:
        """What was on its way is lost; both sides will hear of it."""
        self.going_up = deque([None] if self.is_known_above else ())
        self.going_down = deque([None] if self.is_known_below else ())


@dataclass
class Flight:
    """A READ on its way; its first `num_landed` blocks are here."""

    post: up.PostRead
    slot: int
    life: int
    num_landed: int = 0


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_received = 0
        self.num_tripped = 0
        self.requests: list[Request] = []
        self.streams: dict[int, Stream] = {}
        self.num_streams = 0
        self.flights: dict[int, Flight] = {}
        self.own: list[int] = []
        self.life = 0
        self.exports_by_key: dict[RequestKey, Request] = {}
        self._new_prefill()
        self._new_decode()

    def _new_prefill(self) -> None:
        self.life += 1
        self.prefill_pool = BlockPool(NUM_BLOCKS)
        self.prefill_content: list[Content] = [("empty", 0)] * NUM_BLOCKS
        self.slots = Slots(1000 * self.life)
        self.exports = ExportOwnership(self.prefill_pool, self.slots, EXPORT_LIMITS)

    def _new_decode(self) -> None:
        self.decode_pool = BlockPool(NUM_BLOCKS)
        self.decode_content: list[Content] = [("empty", 0)] * NUM_BLOCKS
        self.imports = ImportOwnership(self.decode_pool, IMPORT_LIMITS)
        self.flights.clear()
        self.own = []

    def act(self, choice: int) -> None:
        """One event; `choice` // len(ACTIONS) says to whom or how much."""
        which, pick = choice % len(ACTIONS), choice // len(ACTIONS)
        ACTIONS[which](self, pick)
        self._sort_words()
        self.check()

    def check(self) -> None:
        """What holds at any moment."""
        for block in self.own:
            assert self.decode_content[block] == OURS, "a READ wrote into somebody's block"
        assert self.prefill_pool.num_held + self.prefill_pool.num_free == NUM_BLOCKS

    def come_to_rest(self) -> None:
        """All clients leave; time does the rest. Then nothing may be left."""
        for request in self.requests:
            self.exports.abort(request.key, Cancelled("the client left"), self.now)
            self.imports.cancel(request.key, self.now)
            self._over_on_decode(request)
        self.decode_pool.free(self.own)
        self.own = []
        for _ in range(3):
            self._sort_words()
            while self.streams:
                for stream in list(self.streams.values()):
                    if stream.going_up:
                        self._carry_up(stream)
                    if stream.going_down:
                        self._carry_down(stream)
                    self._sort_words()
            self._tick()
            self.now += AT_REST_S
        assert self.prefill_pool.num_free == NUM_BLOCKS, "a block is missing on prefill"
        assert self.decode_pool.num_free == NUM_BLOCKS, "a block is missing on decode"
        assert self.exports.is_idle
        assert self.imports.is_idle
        assert self.exports.next_tick_s(self.now) is None
        assert self.imports.next_tick_s(self.now) is None

    # Prefill's engine.

    def begin(self, pick: int) -> None:
        num_blocks = 1 + pick % 4
        if not self.exports.can_begin(num_blocks):
            return
        key = RequestKey("r", len(self.requests))
        blocks = self.prefill_pool.allocate(num_blocks)
        num_ready = min(pick % 3, num_blocks)
        for position in range(num_ready):
            self.prefill_content[blocks[position]] = (key, position)
        slot, epoch = self.exports.begin(key, blocks, self.now, num_ready)
        request = Request(key, num_blocks, slot, epoch, self.life, num_computed=num_ready)
        self.requests.append(request)
        self.exports_by_key[key] = request

    def compute(self, pick: int) -> None:
        if request := self._computing(pick):
            self._compute(request, 1 + pick % 2)

    def finish(self, pick: int) -> None:
        if request := self._computing(pick):
            self._compute(request, request.num_blocks)
            request.is_finished = True
            self.exports.finish(request.key, self.now)

    def abort(self, pick: int) -> None:
        if request := self._newest(pick):
            self.exports.abort(request.key, Cancelled("the client left"), self.now)
            request.is_finished = True

    def _computing(self, pick: int) -> Request | None:
        live = [self.exports_by_key[key] for key in list(self.exports.keys())]
        computing = [request for request in live if not request.is_finished]
        return computing[pick % len(computing)] if computing else None

    def _compute(self, request: Request, most: int) -> None:
        first = request.num_computed
        count = min(most, request.num_blocks - first)
        if count <= 0:
            return
        blocks = self.exports.blocks(request.key)
        for position in range(first, first + count):
            self.prefill_content[blocks[position]] = (request.key, position)
        request.num_computed += count
        self.exports.chunk_ready(request.key, first, count, self.now)

    # Decode's engine.

    def open(self, pick: int) -> None:
        request = self._newest(pick)
        if request and not request.was_opened and not request.is_over_on_decode:
            request.was_opened = True
            self.imports.open(request.key, request.num_blocks, request.epoch, self.now)

    def receive(self, pick: int) -> None:
        request = self._newest(pick)
        if request is None or not request.was_opened or request.blocks:
            return
        if request.is_over_on_decode or request.num_blocks > self.decode_pool.num_free:
            return
        request.blocks = self._allocate(request.num_blocks)
        request.num_kept = min(pick % 2, request.num_blocks)
        for position in range(request.num_kept):
            self.decode_content[request.blocks[position]] = (request.key, position)
        self.imports.receive(request.key, request.blocks, self.now, request.num_kept)

    def cancel(self, pick: int) -> None:
        if request := self._newest(pick):
            self.imports.cancel(request.key, self.now)
            self._over_on_decode(request)

    def write_output(self, pick: int) -> None:
        blocks = self._allocate(min(1 + pick % 3, self.decode_pool.num_free))
        for block in blocks:
            self.decode_content[block] = OURS
        self.own += blocks

    def free_output(self, _pick: int) -> None:
        self.decode_pool.free(self.own)
        self.own = []

    def _over_on_decode(self, request: Request) -> None:
        """The engine frees what it has kept; the machine has freed the rest."""
        if request.blocks and not request.is_over_on_decode:
            self.decode_pool.free(request.blocks[: request.num_kept])
        request.is_over_on_decode = True
        request.blocks = []

    def _allocate(self, count: int) -> list[int]:
        blocks = self.decode_pool.allocate(count)
        for flight in self.flights.values():
            assert not set(blocks) & set(flight.post.local_blocks), "a READ may still write there"
        return blocks

    def _newest(self, pick: int) -> Request | None:
        recent = self.requests[-4:]
        return recent[pick % len(recent)] if recent else None

    # READs.

    def land(self, pick: int) -> None:
        if flight := self._flight(pick):
            self._land(flight, flight.num_landed + 1)

    def end_read(self, pick: int) -> None:
        if flight := self._flight(pick):
            self._land(flight, len(flight.post.local_blocks))
            # The epoch is read after the data.
            epoch = self.slots.epochs[flight.slot] if flight.life == self.life else None
            del self.flights[flight.post.number]
            end = up.ReadEnd.DONE if epoch is not None else up.ReadEnd.FAILED
            self.imports.read_ended(flight.post.number, end, self.now, epoch)

    def break_read(self, pick: int) -> None:
        if flight := self._flight(pick):
            del self.flights[flight.post.number]
            epoch = self.slots.epochs[flight.slot] if flight.life == self.life else None
            is_here = pick % 2 == 1 and epoch is not None
            end = up.ReadEnd.CORRUPT if is_here else up.ReadEnd.FAILED
            self.imports.read_ended(flight.post.number, end, self.now, epoch, error="broken")

    def _flight(self, pick: int) -> Flight | None:
        flights = list(self.flights.values())
        return flights[pick % len(flights)] if flights else None

    def _land(self, flight: Flight, end: int) -> None:
        post = flight.post
        if flight.life != self.life:
            return
        for i in range(flight.num_landed, min(end, len(post.local_blocks))):
            self.decode_content[post.local_blocks[i]] = self.prefill_content[post.remote_blocks[i]]
            flight.num_landed = i + 1

    # The network, time and deaths.

    def carry_up(self, pick: int) -> None:
        if streams := [s for s in self.streams.values() if s.going_up]:
            self._carry_up(streams[pick % len(streams)])

    def carry_down(self, pick: int) -> None:
        if streams := [s for s in self.streams.values() if s.going_down]:
            self._carry_down(streams[pick % len(streams)])

    def everything_arrives(self, _pick: int) -> None:
        """All messages, and both engines take a turn; READs stay where they are."""
        for _ in range(3):
            for stream in list(self.streams.values()):
                while stream.going_up:
                    self._carry_up(stream)
                self._sort_words()
                while stream.going_down:
                    self._carry_down(stream)
                self._sort_words()
        self._tick()

    def repeat_down(self, pick: int) -> None:
        """A message that comes twice."""
        if streams := [s for s in self.streams.values() if s.going_down and s.going_down[0]]:
            stream = streams[pick % len(streams)]
            stream.going_down.appendleft(stream.going_down[0])

    def repeat_up(self, pick: int) -> None:
        if streams := [s for s in self.streams.values() if s.going_up and s.going_up[0]]:
            stream = streams[pick % len(streams)]
            stream.going_up.appendleft(stream.going_up[0])

    def tick(self, _pick: int) -> None:
        self._tick()

    def wait(self, pick: int) -> None:
        self.now += 0.1 * (pick % 8)

    def wait_long(self, pick: int) -> None:
        self.now += (2.5, 5.0, 7.0, 16.0, 31.0)[pick % 5]

    def break_stream(self, pick: int) -> None:
        if self.streams:
            list(self.streams.values())[pick % len(self.streams)].end()

    def restart_prefill(self, pick: int) -> None:
        if pick % 4:
            return
        self._new_prefill()
        for stream in list(self.streams.values()):
            stream.is_known_above = False
            stream.end()
            self._forget(stream)

    def restart_decode(self, pick: int) -> None:
        if pick % 4:
            return
        for request in self.requests:
            request.is_over_on_decode, request.blocks = True, []
        self._new_decode()
        for stream in list(self.streams.values()):
            stream.is_known_below = False
            stream.end()
            self._forget(stream)

    def _tick(self) -> None:
        for lost in self.exports.tick(self.now):
            self.exports.abort(lost.key, lost.error, self.now)
        for outcome in self.imports.tick(self.now):
            request = self.exports_by_key[outcome.key]
            assert not request.is_over_on_decode, "an outcome after the end"
            if isinstance(outcome, up.Received):
                self._received(request)
            self._over_on_decode(request)

    def _received(self, request: Request) -> None:
        found = [self.decode_content[block] for block in request.blocks]
        wanted = [(request.key, position) for position in range(request.num_blocks)]
        assert found == wanted, "wrong bytes were served"
        self.decode_pool.free(request.blocks[request.num_kept :])
        self.num_received += 1

    def _carry_up(self, stream: Stream) -> None:
        word, machine, number = stream.going_up.popleft(), self.exports, stream.number
        try:
            match word:
                case None:
                    stream.is_known_above = False
                    machine.peer_gone(number, self.now)
                case up.OpenLease(key):
                    request = self.exports_by_key[key]
                    if request.life != self.life:
                        raise HandOffFailed("another life")
                    machine.open(number, key, request.slot, request.epoch, 0, self.now)
                case up.Acknowledge(_, first_block, num_blocks, _):
                    machine.acknowledge(number, first_block, num_blocks, self.now)
                case up.KeepAlive():
                    machine.progress(number, self.now)
                case up.CloseLease(_, reason):
                    machine.close(number, reason is up.CloseReason.DONE, self.now)
                case _:
                    raise AssertionError(word)
        except HocketError as error:
            machine.refuse(number, error, self.now)
        self._forget(stream)

    def _carry_down(self, stream: Stream) -> None:
        word, key = stream.going_down.popleft(), stream.request.key
        match word:
            case None:
                stream.is_known_below = False
                self.imports.fail(key, HandOffFailed("the stream ended"), self.now)
            case down.Opened():
                self.imports.peer_opened(key, self.now)
            case down.Ready(_, first_block, blocks):
                self.imports.chunk_ready(key, first_block, blocks, (), self.now)
            case down.Whole():
                self.imports.whole(key, self.now)
            case down.Alive():
                self.imports.alive(key, self.now)
            case down.Ended(_, error):
                if error is not None:
                    self.imports.fail(key, error, self.now)
        self._forget(stream)

    def _sort_words(self) -> None:
        """Puts what the machines have said on its way."""
        for word in self.imports.take_words():
            match word:
                case up.OpenLease(key):
                    self.num_streams += 1
                    request = self.exports_by_key[key]
                    stream = Stream(self.num_streams, request, deque([word]))
                    self.streams[self.num_streams] = stream
                case up.PostRead():
                    request = self.exports_by_key[word.key]
                    self.flights[word.number] = Flight(word, request.slot, request.life)
                case up.RebuildAgent():
                    fenced, self.flights = self.flights, {}
                    for number in fenced:
                        self.imports.read_ended(number, up.ReadEnd.FENCED, self.now)
                    self._sort_words()
                case _:
                    self._write_up(word)
        for word in self.exports.take_words():
            stream = self.streams.get(word.stream)
            if stream is None or not stream.is_known_below:
                continue
            if None not in stream.going_down:
                stream.going_down.append(word)
            if isinstance(word, down.Ended):
                stream.going_down.append(None)
                if stream.is_known_above:
                    stream.going_up = deque([None])

    def _write_up(self, word: up.Acknowledge | up.KeepAlive | up.CloseLease) -> None:
        for stream in self.streams.values():
            is_whole = None not in stream.going_up and stream.is_known_above
            if stream.request.key == word.key and is_whole:
                stream.going_up.append(word)
                if isinstance(word, up.CloseLease):
                    stream.going_up.append(None)

    def _forget(self, stream: Stream) -> None:
        if not (stream.is_known_above or stream.is_known_below):
            self.streams.pop(stream.number, None)


# The more often a thing is listed, the more often it happens.
ACTIONS = [
    *[World.begin, World.open, World.receive, World.compute, World.finish] * 7,
    *[World.carry_up, World.carry_down] * 4,
    *[World.everything_arrives, World.end_read] * 9,
    *[World.land, World.tick, World.write_output, World.wait] * 2,
    *[World.abort, World.cancel, World.free_output, World.break_read, World.break_stream],
    *[World.wait_long, World.restart_prefill, World.restart_decode],
    *[World.repeat_down, World.repeat_up],
]
