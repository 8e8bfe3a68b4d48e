"""Imported prompts: which READ may write into which block until when. Decode's half of a hand-off.

The engine reserves a prompt's blocks and begins an import; the table opens the Export stream, READs
each announced chunk at once, and hands the blocks back only when all of them are read and fenced
and the bundle is there. Until then they are the table's. Twin: `prefill_workers/kv_export.py`.

    import     waits for                    ends by
    OPENING    the exporter's pool          opened -> READING
    READING    chunks, READs, the bundle    all of it -> Imported
    both                                    cancel -> gone; abort, peer gone, bad message, stalled
                                            (progress_timeout after the last event) -> ImportFailed

    READ       writes into                  ends by
    LIVE       blocks of its import         done, epoch unchanged -> published, acknowledged;
                                            epoch changed, timeout -> the import fails;
                                            failed -> again, or the import fails; fenced -> again
    ABANDONED  quarantined blocks           done, failed, fenced -> its blocks are free

Every READ carries its own fence, so the last chunk's is the last word: nothing can revoke blocks
after Imported. NIXL can't stop a READ, hence ABANDONED: when its import ends first, its target
blocks stay out of use until it ended, by itself or because the import agent was rebuilt (too many
blocks in quarantine, or for too long). Live READs that a rebuild cut off are simply done again.
Nothing here reads a clock; deadlines fire from `tick`, not from traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decode_workers.import_stream import (
    EndStream,
    EventArrived,
    ImportCommand,
    ImportCounters,
    Imported,
    ImportFailed,
    ImportMessage,
    ImportSettings,
    OpenStream,
    ReadsEnded,
    SendUpdate,
    StreamGone,
)
from hocket.errors import FingerprintMismatch, HandOffFailed, HocketError
from hocket.kv.block_pool import BlockPool
from hocket.kv.transfer import KVImporter, PoolDescription, ReadId, ReadResult, ReadState
from hocket.kv.wire import error_from_message, pool_from_message
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import (
    bundle_from_message,
    fingerprint_to_message,
    handle_to_message,
    key_to_message,
)
from hocket.types import Bundle, ExportHandle, RequestKey


@dataclass(slots=True)
class _Import:
    """One prompt on its way. `announced` and `covered` are positions in the prompt; `covered` ones
    are read and fenced (or were here before). OPENING until `peer` is known."""

    handle: ExportHandle
    blocks: list[int]
    started: float
    deadline: float
    last_sent: float
    announced: set[int]
    covered: set[int]
    peer: PoolDescription | None = None
    bundle: Bundle | None = None
    num_bytes: int = 0
    reads: set[ReadId] = field(default_factory=set[ReadId])


@dataclass(slots=True)
class _Read:
    """One READ, of positions first_block.. of a prompt. ABANDONED when `is_abandoned`: then its
    import is gone and `local_blocks` are in quarantine since `deadline`."""

    key: RequestKey
    first_block: int
    remote_blocks: list[int]
    local_blocks: list[int]
    posted: float
    deadline: float
    attempt: int
    is_abandoned: bool = False


class ImportTable:
    """All imports of one decode worker. Every method is called by the engine thread."""

    def __init__(self, pool: BlockPool, importer: KVImporter, settings: ImportSettings) -> None:
        self.settings = settings
        self.counters = ImportCounters()
        self._pool = pool
        self._importer = importer
        self._imports: dict[RequestKey, _Import] = {}
        self._reads: dict[ReadId, _Read] = {}
        self._agents: dict[str, str] = {}
        self._being_fenced: set[ReadId] = set()
        self._outcomes: list[Imported | ImportFailed] = []
        self._messages: list[ImportMessage] = []

    @property
    def is_idle(self) -> bool:
        """Nothing is being imported or to be told. Blocks may still be in quarantine."""
        return not self._imports and not self._outcomes and not self._messages

    def begin(
        self,
        key: RequestKey,
        handle: ExportHandle,
        blocks: list[int],
        now: float,
        first_block: int = 0,
    ) -> None:
        """Starts an import into `blocks`, one per block of the prompt, which the caller allocated
        and gives up until `Imported`. The first `first_block` of them hold the prompt already."""
        assert key not in self._imports, f"{key} is imported already"
        settings = self.settings
        self.counters.begun += 1
        if difference := settings.fingerprint.difference(handle.fingerprint):
            error = FingerprintMismatch(f"{key} can't be read here: {difference}.")
            self._refuse(key, blocks, error)
            return
        if handle.num_blocks != len(blocks):
            error = HandOffFailed(f"{key} has {handle.num_blocks} blocks, not {len(blocks)}.")
            self._refuse(key, blocks, error)
            return
        known = set(range(first_block))
        deadline = now + settings.progress_timeout_s
        self._imports[key] = _Import(
            handle, list(blocks), now, deadline, now, announced=known, covered=set(known)
        )
        opening = worker.OpenExport(
            key=key_to_message(key),
            export=handle_to_message(handle),
            worker_id=settings.worker_id,
            worker_epoch=settings.worker_epoch,
            fingerprint=fingerprint_to_message(settings.fingerprint),
            first_block=first_block,
        )
        update = worker.ExportUpdate(open=opening)
        self._messages.append(OpenStream(key, handle.address, update))

    def cancel(self, key: RequestKey, now: float) -> None:
        """The request is over: ends its import and takes its blocks. There is no outcome. A
        request that is not here is no error."""
        if key in self._imports:
            self.counters.cancelled += 1
            self._close(key, worker.CloseExport.REASON_CANCELLED, now)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.key != key]

    def take(self, command: ImportCommand, now: float) -> None:
        """Takes what came on a stream. What is meant for an import that is gone is late: whoever
        ended it has told the peer and freed everything."""
        match command:
            case StreamGone(key, error) if key in self._imports:
                self._fail(key, error, now)
            case EventArrived(key, event) if key in self._imports:
                current = self._imports[key]
                current.deadline = now + self.settings.progress_timeout_s
                try:
                    self._event(key, current, event, now)
                except HocketError as error:
                    self._fail(key, error, now)
            case EventArrived() | StreamGone() | ReadsEnded():
                pass

    def take_messages(self) -> list[ImportMessage]:
        """What is to be sent since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def tick(self, now: float) -> list[Imported | ImportFailed]:
        """Looks at READs, fires deadlines, keeps streams alive; what has ended since the last."""
        for id, read in list(self._reads.items()):
            self._look_at(id, read, now)
        for key, current in list(self._imports.items()):
            if now >= current.deadline:
                timeout_s = self.settings.progress_timeout_s
                self._fail(
                    key, HandOffFailed(f"{key}: prefill said nothing for {timeout_s:g} s."), now
                )
            elif current.bundle is not None and not current.reads:
                self._conclude(key, current, current.bundle, now)
            elif now - current.last_sent >= self.settings.progress_timeout_s / 3:
                self._send(key, worker.ExportUpdate(progress=worker.Progress()), now)
        self._rebuild_if_needed(now)
        self.counters.reads_in_flight = len(self._reads)
        self.counters.blocks_in_quarantine = self._pool.num_quarantined
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens. The end
        of a READ is such a thing: the importer notifies of it."""
        due = [read.deadline for read in self._reads.values() if not read.is_abandoned]
        due += [
            min(i.deadline, i.last_sent + self.settings.progress_timeout_s / 3)
            for i in self._imports.values()
        ]
        # The blocks of an abandoned READ are missing until then, but nobody waits for them.
        due += [now + self.settings.progress_timeout_s / 3] if self._reads else []
        return max(0.0, min(due) - now) if due else None

    # An import.

    def _event(
        self, key: RequestKey, current: _Import, event: worker.ExportEvent, now: float
    ) -> None:
        match event.WhichOneof("event"):
            case "opened":
                self._opened(current, pool_from_message(event.opened))
            case "chunk":
                self._chunk(key, current, event.chunk, now)
            case "bundle":
                current.bundle = _bundle(key, event.bundle)
            case "aborted":
                raise error_from_message(event.aborted)
            case _:
                pass  # Progress, or a word of a newer protocol: the peer is alive.

    def _opened(self, current: _Import, peer: PoolDescription) -> None:
        """The stream is accepted. A worker that came back has a new agent: the old one goes."""
        current.peer = peer
        before = self._agents.get(current.handle.worker_id)
        if before is not None and before != peer.agent:
            self._importer.forget_peer(before)
        self._agents[current.handle.worker_id] = peer.agent

    def _chunk(
        self, key: RequestKey, current: _Import, chunk: worker.ChunkReady, now: float
    ) -> None:
        """Some more blocks are computed: READ them at once, while prefill computes the next."""
        if current.peer is None:
            raise HandOffFailed(f"{key}: blocks were announced before the pool they lie in.")
        positions = range(chunk.first_block, chunk.first_block + len(chunk.blocks))
        is_new = current.announced.isdisjoint(positions)
        if not positions or positions.stop > len(current.blocks) or not is_new:
            raise HandOffFailed(
                f"{key}: blocks {positions.start}..{positions.stop - 1} of {len(current.blocks)} "
                f"were announced after {len(current.announced)} others."
            )
        current.announced.update(positions)
        local = current.blocks[positions.start : positions.stop]
        read = _Read(key, positions.start, list(chunk.blocks), local, now, deadline=0.0, attempt=1)
        self._post(current, current.peer, read, now)

    def _conclude(self, key: RequestKey, current: _Import, bundle: Bundle, now: float) -> None:
        """Nothing is on its way and nothing will come: all of the prompt is here, or it failed."""
        missing = sorted(set(range(len(current.blocks))) - current.covered)
        if missing:
            self._fail(
                key,
                HandOffFailed(
                    f"{key}: the bundle came, but {len(missing)} of {len(current.blocks)} blocks "
                    f"were never announced, the first one {missing[0]}."
                ),
                now,
            )
            return
        del self._imports[key]
        self._send_close(key, worker.CloseExport.REASON_DONE)
        self.counters.imported += 1
        seconds = now - current.started
        transport = self._importer.transport()
        self._outcomes.append(Imported(key, bundle, current.num_bytes, transport, seconds))

    def _refuse(self, key: RequestKey, blocks: list[int], error: HocketError) -> None:
        """The handle is not for this worker: no stream is opened."""
        self.counters.failed += 1
        self._pool.free(blocks)
        self._outcomes.append(ImportFailed(key, error))

    def _fail(self, key: RequestKey, error: HocketError, now: float) -> None:
        self.counters.failed += 1
        self._close(key, worker.CloseExport.REASON_FAILED, now)
        self._outcomes.append(ImportFailed(key, error))

    def _close(self, key: RequestKey, reason: worker.CloseExport.Reason, now: float) -> None:
        """Ends an import that did not succeed: exactly the targets of its READs in flight go to
        quarantine, its other blocks are free."""
        current = self._imports.pop(key)
        in_flight: list[int] = []
        for id in current.reads:
            read = self._reads[id]
            read.is_abandoned = True
            read.deadline = now
            in_flight += read.local_blocks
        self._pool.quarantine(in_flight)
        self._pool.free([b for b in current.blocks if b not in set(in_flight)])
        self.counters.reads_abandoned += len(current.reads)
        self.counters.quarantined_blocks += len(in_flight)
        self._send_close(key, reason)

    # A READ.

    def _post(self, current: _Import, peer: PoolDescription, read: _Read, now: float) -> None:
        read.posted = now
        read.deadline = now + self.settings.read_timeout_s
        slot = current.handle.slot
        id = self._importer.read_blocks(peer, slot, read.remote_blocks, read.local_blocks)
        self._reads[id] = read
        current.reads.add(id)
        self.counters.reads += 1

    def _look_at(self, id: ReadId, read: _Read, now: float) -> None:
        result = self._importer.poll(id)
        if result.state is ReadState.IN_PROGRESS:
            if not read.is_abandoned and now >= read.deadline:
                self.counters.reads_timed_out += 1
                timeout_s = self.settings.read_timeout_s
                error = HandOffFailed(f"{read.key}: a READ did not end within {timeout_s:g} s.")
                self._fail(read.key, error, now)
            return
        del self._reads[id]
        self._being_fenced.discard(id)
        if read.is_abandoned:
            self._pool.release_quarantined(read.local_blocks)
            return
        current = self._imports[read.key]
        current.reads.discard(id)
        if result.state is ReadState.DONE:
            self._publish(current, read, result, now)
        else:
            self._read_again(current, read, result, now)

    def _publish(self, current: _Import, read: _Read, result: ReadResult, now: float) -> None:
        """The bytes are here. They count only if the exporter still held them afterwards."""
        self.counters.fences_checked += 1
        if result.epoch != current.handle.slot_epoch:
            self.counters.fences_tripped += 1
            self._fail(
                read.key,
                HandOffFailed(
                    f"{read.key}: prefill took its blocks back while they were read (slot epoch "
                    f"{result.epoch}, not {current.handle.slot_epoch})."
                ),
                now,
            )
            return
        assert current.peer is not None
        num_blocks = len(read.local_blocks)
        num_bytes = num_blocks * current.peer.block_bytes
        current.covered.update(range(read.first_block, read.first_block + num_blocks))
        current.num_bytes += num_bytes
        self.counters.bytes += num_bytes
        self.counters.read_seconds += now - read.posted
        ack = worker.AcknowledgeBlocks(first_block=read.first_block, num_blocks=num_blocks)
        self._send(read.key, worker.ExportUpdate(acknowledge=ack), now)

    def _read_again(self, current: _Import, read: _Read, result: ReadResult, now: float) -> None:
        """A READ that failed gets another attempt; one that a rebuild cut off does not use one."""
        if result.state is ReadState.FAILED:
            self.counters.reads_failed += 1
            if read.attempt >= self.settings.max_read_attempts:
                error = HandOffFailed(f"{read.key}: the READ failed: {result.error}")
                self._fail(read.key, error, now)
                return
            read.attempt += 1
        assert current.peer is not None
        self.counters.reads_retried += 1
        self._post(current, current.peer, read, now)

    def _rebuild_if_needed(self, now: float) -> None:
        """Ends abandoned READs by force. One rebuild at a time: it ends all that are there."""
        if self._being_fenced or not self._pool.num_quarantined:
            return
        abandoned = {id: read for id, read in self._reads.items() if read.is_abandoned}
        assert abandoned, f"{self._pool.num_quarantined} blocks in quarantine, and no READ"
        limit = self.settings.max_quarantine_share * self._pool.num_blocks
        oldest = min(read.deadline for read in abandoned.values())
        is_overdue = now - oldest >= self.settings.quarantine_timeout_s
        if self._pool.num_quarantined > limit or is_overdue:
            self.counters.rebuilds += 1
            self._being_fenced = set(abandoned)
            self._importer.rebuild()

    # The stream.

    def _send(self, key: RequestKey, update: worker.ExportUpdate, now: float) -> None:
        self._imports[key].last_sent = now
        self._messages.append(SendUpdate(key, update))

    def _send_close(self, key: RequestKey, reason: worker.CloseExport.Reason) -> None:
        """The peer learns at once why; nothing follows."""
        close = worker.CloseExport(reason=reason)
        self._messages.append(SendUpdate(key, worker.ExportUpdate(close=close)))
        self._messages.append(EndStream(key))


def _bundle(key: RequestKey, message: worker.Bundle) -> Bundle:
    try:
        return bundle_from_message(message)
    except ValueError as error:
        raise HandOffFailed(f"{key}: the bundle makes no sense: {error}.") from error
