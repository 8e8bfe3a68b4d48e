"""Which READ may write into which block until when: decode's half of a hand-off, a pure machine.

`decode_workers/kv_import.py` puts the wire and the transfer around it. A request opens its export
as soon as it is here, so that prefill keeps the blocks while it waits for room; once the caller has
reserved the prompt's blocks they are this machine's, until all of them are read and fenced.

    import     waits for                    ends by
    QUEUED     room here                    receive -> READING
    READING    chunks, READs, the bundle    all of it -> Received
    both                                    cancel -> gone; abort, peer gone, nonsense, stalled
                                            (progress_timeout after the last word) -> NotReceived

    READ       writes into                  ends by
    LIVE       blocks of its import         done, epoch unchanged -> published, acknowledged;
                                            epoch changed, timeout -> the import fails;
                                            failed -> again, or the import fails; fenced -> again
    ABANDONED  quarantined blocks           done, failed, fenced -> its blocks are free

Every READ carries its own fence, so the last chunk's is the last word: nothing can revoke blocks
after Received. No READ can be stopped, hence ABANDONED: when its import ends first, its target
blocks stay out of use until it ended, by itself or because the import agent was rebuilt (too many
blocks in quarantine, or for too long). Live READs that a rebuild cut off are simply done again.
What comes for an import that is gone is late and does nothing. No clock, no I/O: deadlines fire
from `tick`, not from traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hocket.errors import HandOffFailed, HocketError
from hocket.scheduling.import_words import (
    Acknowledge,
    CloseLease,
    CloseReason,
    ImportCounters,
    ImportLimits,
    ImportWord,
    KeepAlive,
    NotReceived,
    OpenLease,
    ReadEnd,
    Received,
    TargetBlocks,
)
from hocket.scheduling.reads_in_flight import Read, ReadsInFlight
from hocket.types import RequestKey


@dataclass(frozen=True, slots=True)
class _Announced:
    """A position of the prompt that may be read: its block at the exporter, and its checksum."""

    position: int
    remote_block: int
    checksum: int | None


@dataclass(slots=True)
class _Import:
    """One prompt on its way. `covered` are the positions that are read and fenced, or were here
    before; QUEUED while `blocks` is None: then `waiting` keeps what was announced."""

    num_blocks: int
    slot_epoch: int
    started: float
    deadline: float
    last_sent: float
    is_opened: bool = False
    is_whole: bool = False
    blocks: list[int] | None = None
    first_block: int = 0
    num_read_blocks: int = 0
    num_announced: int = 0
    waiting: list[_Announced] = field(default_factory=list[_Announced])
    covered: set[int] = field(default_factory=set[int])
    reads: set[int] = field(default_factory=set[int])


class ImportOwnership:
    """All imports of one decode worker."""

    def __init__(self, pool: TargetBlocks, limits: ImportLimits) -> None:
        self.limits = limits
        self.counters = ImportCounters()
        self._pool = pool
        self._imports: dict[RequestKey, _Import] = {}
        self._outcomes: list[Received | NotReceived] = []
        self._words: list[ImportWord] = []
        self._reads = ReadsInFlight(pool, limits, self.counters, lambda w: self._words.append(w))

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._imports

    @property
    def is_idle(self) -> bool:
        """Nothing is being imported or to be told. Blocks may still be in quarantine."""
        return not self._imports and not self._outcomes and not self._words

    # The request's own progress, told by the engine.

    def open(self, key: RequestKey, num_blocks: int, slot_epoch: int, now: float) -> None:
        """Asks for an export of `num_blocks` blocks; they may be reserved here later."""
        assert key not in self._imports, f"{key} is imported already"
        self.counters.begun += 1
        deadline = now + self.limits.progress_timeout_s
        self._imports[key] = _Import(num_blocks, slot_epoch, now, deadline, now)
        self._words.append(OpenLease(key))

    def refuse(self, key: RequestKey, error: HocketError) -> None:
        """An export that this worker can't read: nothing is opened, the outcome says why."""
        self.counters.begun += 1
        self.counters.failed += 1
        self._outcomes.append(NotReceived(key, error))

    def receive(
        self, key: RequestKey, blocks: Sequence[int], now: float, first_block: int = 0
    ) -> None:
        """Takes over blocks[first_block:], one per block of the prompt, and READs into them. The
        blocks before hold the prompt already and stay the caller's. An import that has failed,
        which the next `tick` tells, frees them at once."""
        current = self._imports.get(key)
        if current is None:
            assert any(outcome.key == key for outcome in self._outcomes), f"{key} is not imported"
            self._pool.free(blocks[first_block:])
            return
        assert current.blocks is None, f"{key} has its blocks already"
        if len(blocks) != current.num_blocks:
            self._pool.free(blocks[first_block:])
            text = f"{key} has {current.num_blocks} blocks, not {len(blocks)}."
            self.fail(key, HandOffFailed(text), now)
            return
        current.blocks, current.first_block = list(blocks), first_block
        current.covered.update(range(first_block))
        waiting, current.waiting = current.waiting, []
        self._read_or_skip(key, current, waiting, now)

    def cancel(self, key: RequestKey, now: float) -> None:
        """The request is over: ends its import and takes its blocks. There is no outcome. A
        request that is not here is no error."""
        if key in self._imports:
            self.counters.cancelled += 1
            self._close(key, CloseReason.CANCELLED, now)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.key != key]

    # What comes down the stream.

    def peer_opened(self, key: RequestKey, now: float) -> None:
        """The exporter accepted: blocks may be announced."""
        if (current := self._heard(key, now)) is not None:
            current.is_opened = True

    def chunk_ready(
        self,
        key: RequestKey,
        first_block: int,
        remote_blocks: Sequence[int],
        checksums: Sequence[int],
        now: float,
    ) -> None:
        """The next blocks are computed: READ them at once, while prefill computes more."""
        if (current := self._heard(key, now)) is None:
            return
        positions = range(first_block, first_block + len(remote_blocks))
        if (nonsense := _nonsense(current, positions, len(checksums))) is not None:
            self.fail(key, HandOffFailed(f"{key}: {nonsense}."), now)
            return
        current.num_announced = positions.stop
        sums = checksums or [None] * len(remote_blocks)
        news = list(map(_Announced, positions, remote_blocks, sums))
        if current.blocks is None:
            current.waiting += news
        else:
            self._read_or_skip(key, current, news, now)

    def whole(self, key: RequestKey, now: float) -> None:
        """The bundle is here: nothing more will be announced."""
        if (current := self._heard(key, now)) is not None:
            current.is_whole = True

    def alive(self, key: RequestKey, now: float) -> None:
        """The exporter has nothing new."""
        self._heard(key, now)

    def fail(self, key: RequestKey, error: HocketError, now: float) -> None:
        """The hand-off can't go on: the exporter gave it up, is gone, or talks nonsense."""
        if key in self._imports:
            self.counters.failed += 1
            self._close(key, CloseReason.FAILED, now)
            self._outcomes.append(NotReceived(key, error))

    # What comes from the transfer.

    def live_reads(self) -> list[int]:
        """READs that have not ended, as numbered in `PostRead`; abandoned ones too."""
        return self._reads.numbers()

    def read_moved(self, number: int, moves: int, now: float) -> None:
        """`moves`: how often something of a READ, or of those before it on the same way, has
        landed. A slow one is not a stuck one: its deadline is counted from its last move."""
        self._reads.moved(number, moves, now)

    def read_ended(
        self, number: int, end: ReadEnd, now: float, epoch: int | None = None, error: str = ""
    ) -> None:
        """A READ is over: nothing writes into its blocks any more. `epoch`: the slot's, read after
        the data was here; set when DONE, and when CORRUPT: bytes of blocks that prefill has taken
        back are no wonder, and no reason to READ again."""
        if (read := self._reads.end(number)) is None:
            return
        current = self._imports[read.key]
        current.reads.discard(number)
        has_bytes = end in (ReadEnd.DONE, ReadEnd.CORRUPT)
        if has_bytes and not self._is_fenced(current, epoch):
            text = f"{read.key}: prefill took its blocks back while they were read"
            error = f"{text} (slot epoch {epoch}, not {current.slot_epoch})."
            self.fail(read.key, HandOffFailed(error), now)
        elif end is ReadEnd.DONE:
            self._publish(current, read, now)
        else:
            self._read_again(current, read, end, error, now)

    # Time.

    def tick(self, now: float) -> list[Received | NotReceived]:
        """Fires deadlines, keeps streams alive; what has ended since the last."""
        for read in self._reads.overdue(now):
            self._time_out(read, now)
        for key, current in list(self._imports.items()):
            if now >= current.deadline:
                said_nothing = f"prefill said nothing for {self.limits.progress_timeout_s:g} s"
                self.fail(key, HandOffFailed(f"{key}: {said_nothing}."), now)
            elif current.is_whole and current.blocks is not None and not current.reads:
                self._conclude(key, current, now)
            elif now >= self._alive_due(current):
                self._say(current, KeepAlive(key), now)
        self._reads.rebuild_if_needed(now)
        self.counters.reads_in_flight = len(self._reads)
        self.counters.blocks_in_quarantine = self._pool.num_quarantined
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens. The end
        of a READ is such a thing."""
        due = self._reads.next_due(now)
        due += [min(i.deadline, self._alive_due(i)) for i in self._imports.values()]
        return max(0.0, min(due) - now) if due else None

    def take_words(self) -> list[ImportWord]:
        """What is to be done and told since the last call, in order."""
        words, self._words = self._words, []
        return words

    def _alive_due(self, current: _Import) -> float:
        return current.last_sent + self.limits.progress_timeout_s / 3

    def _heard(self, key: RequestKey, now: float) -> _Import | None:
        """The import that a word is for; None when it is late."""
        current = self._imports.get(key)
        if current is not None:
            current.deadline = now + self.limits.progress_timeout_s
        return current

    def _conclude(self, key: RequestKey, current: _Import, now: float) -> None:
        """Nothing is on its way and nothing will come: all of the prompt is here, or it failed."""
        if missing := sorted(set(range(current.num_blocks)) - current.covered):
            text = (
                f"{key}: the bundle came, but {len(missing)} of {current.num_blocks} blocks "
                f"were never announced, the first one {missing[0]}."
            )
            self.fail(key, HandOffFailed(text), now)
            return
        del self._imports[key]
        self._words.append(CloseLease(key, CloseReason.DONE))
        self.counters.imported += 1
        self._outcomes.append(Received(key, current.num_read_blocks, now - current.started))

    def _close(self, key: RequestKey, reason: CloseReason, now: float) -> None:
        """Ends an import that did not succeed: exactly the targets of its READs in flight go to
        quarantine, its other blocks are free."""
        current = self._imports.pop(key)
        in_flight = self._reads.abandon(current.reads, now)
        own = [] if current.blocks is None else current.blocks[current.first_block :]
        self._pool.free([block for block in own if block not in in_flight])
        self._words.append(CloseLease(key, reason))

    # A READ.

    def _read_or_skip(
        self, key: RequestKey, current: _Import, news: list[_Announced], now: float
    ) -> None:
        """One READ for all of them that are not here; the others are acknowledged as they are."""
        assert current.blocks is not None
        skipped = [a.position for a in news if a.position < current.first_block]
        wanted = [a for a in news if a.position >= current.first_block]
        if skipped:
            self.counters.blocks_skipped += len(skipped)
            self._say(current, Acknowledge(key, skipped[0], len(skipped), read_s=None), now)
        if wanted:
            read = Read(
                key,
                wanted[0].position,
                tuple(a.remote_block for a in wanted),
                tuple(current.blocks[a.position] for a in wanted),
                tuple(a.checksum for a in wanted if a.checksum is not None),
            )
            current.reads.add(self._reads.post(read, now))

    def _is_fenced(self, current: _Import, epoch: int | None) -> bool:
        """Whether the exporter still held the blocks after their bytes were here."""
        self.counters.fences_checked += 1
        is_unchanged = epoch == current.slot_epoch
        self.counters.fences_tripped += not is_unchanged
        return is_unchanged

    def _publish(self, current: _Import, read: Read, now: float) -> None:
        num_blocks = len(read.local_blocks)
        current.covered.update(range(read.first_block, read.first_block + num_blocks))
        current.num_read_blocks += num_blocks
        ack = Acknowledge(read.key, read.first_block, num_blocks, read_s=now - read.posted)
        self._say(current, ack, now)

    def _read_again(
        self, current: _Import, read: Read, end: ReadEnd, error: str, now: float
    ) -> None:
        """A READ that failed gets another attempt; one that a rebuild cut off does not use one."""
        if end is not ReadEnd.FENCED:
            self.counters.reads_failed += end is ReadEnd.FAILED
            self.counters.reads_corrupt += end is ReadEnd.CORRUPT
            if read.attempt >= self.limits.max_read_attempts:
                self.fail(read.key, HandOffFailed(f"{read.key}: the READ failed: {error}"), now)
                return
            read.attempt += 1
        self.counters.reads_retried += 1
        current.reads.add(self._reads.post(read, now))

    def _time_out(self, read: Read, now: float) -> None:
        if read.is_abandoned:
            return  # Another READ of the same prompt was overdue, too.
        self.counters.reads_timed_out += 1
        timeout_s = self.limits.read_timeout_s
        error = f"{read.key}: a READ did not end within {timeout_s:g} s of its last move."
        self.fail(read.key, HandOffFailed(error), now)

    def _say(self, current: _Import, word: ImportWord, now: float) -> None:
        current.last_sent = now
        self._words.append(word)


def _nonsense(current: _Import, positions: range, num_checksums: int) -> str | None:
    """What is wrong with a chunk; None when it may be believed."""
    if not current.is_opened:
        return "blocks were announced before the pool they lie in"
    if num_checksums not in (0, len(positions)):
        return f"{len(positions)} blocks were announced with {num_checksums} checksums"
    is_next = positions.start == current.num_announced
    if positions and positions.stop <= current.num_blocks and is_next:
        return None
    return (
        f"blocks {positions.start}..{positions.stop - 1} of {current.num_blocks} were announced "
        f"after {current.num_announced} others"
    )
