"""Imported prompts on the wire: decode's half of a hand-off, between its machine and the transfer.

The engine opens an import when a request comes, and lets it receive once the prompt's blocks are
reserved; each announced chunk is READ at once. It gets the blocks back only when all of them are
read and fenced and the bundle is there. What may happen when, and who may write into which block,
is `hocket.scheduling.import_ownership`'s; here its words become messages and READs, and messages
and READs' ends its calls. Twin: `prefill_workers/kv_export.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decode_workers.import_stream import (
    EndStream,
    EventArrived,
    ImportCommand,
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
from hocket.kv.transfer import KVImporter, PoolDescription, ReadId, ReadState
from hocket.kv.wire import error_from_message, pool_from_message
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import (
    bundle_from_message,
    fingerprint_to_message,
    handle_to_message,
    key_to_message,
)
from hocket.scheduling.import_ownership import ImportOwnership
from hocket.scheduling.import_words import (
    Acknowledge,
    CloseLease,
    CloseReason,
    ImportCounters,
    ImportWord,
    KeepAlive,
    NotReceived,
    OpenLease,
    PostRead,
    ReadEnd,
    RebuildAgent,
    Received,
    TargetBlocks,
)
from hocket.types import Bundle, ExportHandle, RequestKey

_REASONS = {
    CloseReason.DONE: worker.CloseExport.REASON_DONE,
    CloseReason.CANCELLED: worker.CloseExport.REASON_CANCELLED,
    CloseReason.FAILED: worker.CloseExport.REASON_FAILED,
}


@dataclass(slots=True)
class _Peer:
    """What an import needs to know of its exporter, and what it said at last."""

    handle: ExportHandle
    pool: PoolDescription | None = None
    bundle: Bundle | None = None


class ImportTable:
    """All imports of one decode worker. Every method is called by the engine thread."""

    def __init__(self, pool: TargetBlocks, importer: KVImporter, settings: ImportSettings) -> None:
        self.settings = settings
        self._importer = importer
        self._owned = ImportOwnership(pool, settings.limits())
        self._peers: dict[RequestKey, _Peer] = {}
        self._read_ids: dict[int, ReadId] = {}
        self._agents: dict[str, str] = {}
        self._messages: list[ImportMessage] = []

    @property
    def counters(self) -> ImportCounters:
        return self._owned.counters

    @property
    def is_idle(self) -> bool:
        """Nothing is being imported or to be told. Blocks may still be in quarantine."""
        return self._owned.is_idle and not self._messages

    # For the engine: the request's own progress.

    def open(self, key: RequestKey, handle: ExportHandle, now: float) -> None:
        """Opens the export, the lease on prefill's blocks; `receive` may follow much later. A
        handle that can't be read here fails by the next `tick`."""
        if difference := self.settings.fingerprint.difference(handle.fingerprint):
            error = FingerprintMismatch(f"{key} can't be read here: {difference}.")
            self._owned.refuse(key, error)
            return
        self._peers[key] = _Peer(handle)
        self._owned.open(key, handle.num_blocks, handle.slot_epoch, now)
        self._act()

    def receive(
        self, key: RequestKey, blocks: Sequence[int], now: float, first_block: int = 0
    ) -> None:
        """READs into blocks[first_block:], which the caller allocated, one block per block of the
        prompt, and gives up until `Imported`. Those before hold the prompt already; they stay the
        caller's and are not read."""
        self._owned.receive(key, blocks, now, first_block)
        self._act()

    def cancel(self, key: RequestKey, now: float) -> None:
        """The request is over: ends its import and takes its blocks. There is no outcome. A
        request that is not here is no error."""
        self._owned.cancel(key, now)
        self._act()
        self._peers.pop(key, None)

    def tick(self, now: float) -> list[Imported | ImportFailed]:
        """Looks at READs, fires deadlines, keeps streams alive; what has ended since the last."""
        for number in self._owned.live_reads():
            result = self._importer.poll(self._read_ids[number])
            if result.state is ReadState.IN_PROGRESS:
                self._owned.read_moved(number, result.moves, now)
            else:
                del self._read_ids[number]
                end = ReadEnd(result.state.value)
                self._owned.read_ended(number, end, now, result.epoch, result.error)
        outcomes = self._owned.tick(now)
        self._act()
        return [self._outcome(outcome) for outcome in outcomes]

    def next_tick_s(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: not before something happens. The end
        of a READ is such a thing: the importer notifies of it."""
        return self._owned.next_tick_s(now)

    # For the server: what comes and goes on the streams.

    def take(self, command: ImportCommand, now: float) -> None:
        """Takes what came on a stream. What is meant for an import that is gone is late: whoever
        ended it has told the peer and freed everything."""
        match command:
            case StreamGone(key, error):
                self._owned.fail(key, error, now)
            case EventArrived(key, event) if key in self._owned:
                try:
                    self._event(key, event, now)
                except HocketError as error:
                    self._owned.fail(key, error, now)
            case EventArrived() | ReadsEnded():
                pass
        self._act()

    def take_messages(self) -> list[ImportMessage]:
        """What is to be sent since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def _event(self, key: RequestKey, event: worker.ExportEvent, now: float) -> None:
        match event.WhichOneof("event"):
            case "opened":
                self._meet(self._peers[key], pool_from_message(event.opened))
                self._owned.peer_opened(key, now)
            case "chunk":
                chunk = event.chunk
                announced = (chunk.first_block, chunk.blocks, chunk.checksums)
                self._owned.chunk_ready(key, *announced, now)
            case "bundle":
                self._peers[key].bundle = _bundle(key, event.bundle)
                self._owned.whole(key, now)
            case "aborted":
                raise error_from_message(event.aborted)
            case _:
                # Progress, or a word of a newer protocol: the peer is alive.
                self._owned.alive(key, now)

    def _meet(self, peer: _Peer, pool: PoolDescription) -> None:
        """A worker that came back has a new agent: the old one goes."""
        peer.pool = pool
        before = self._agents.get(peer.handle.worker_id)
        if before is not None and before != pool.agent:
            self._importer.forget_peer(before)
        self._agents[peer.handle.worker_id] = pool.agent

    def _outcome(self, outcome: Received | NotReceived) -> Imported | ImportFailed:
        peer = self._peers.pop(outcome.key, None)
        if isinstance(outcome, NotReceived):
            return ImportFailed(outcome.key, outcome.error)
        assert peer is not None
        assert peer.bundle is not None
        assert peer.pool is not None
        num_bytes = outcome.num_read_blocks * peer.pool.block_bytes
        transport = self._importer.transport()
        return Imported(outcome.key, peer.bundle, num_bytes, transport, outcome.seconds)

    def _act(self) -> None:
        """Does what the machine says, at once: a READ does not wait for the next model step."""
        for word in self._owned.take_words():
            self._do(word)

    def _do(self, word: ImportWord) -> None:
        match word:
            case OpenLease(key):
                self._open_stream(key, self._peers[key].handle)
            case PostRead():
                self._post(word)
            case Acknowledge(key, first_block, num_blocks, read_s):
                if read_s is not None:
                    self._count_read(key, num_blocks, read_s)
                ack = worker.AcknowledgeBlocks(first_block=first_block, num_blocks=num_blocks)
                self._send(key, worker.ExportUpdate(acknowledge=ack))
            case KeepAlive(key):
                self._send(key, worker.ExportUpdate(progress=worker.Progress()))
            case CloseLease(key, reason):
                close = worker.CloseExport(reason=_REASONS[reason])
                self._send(key, worker.ExportUpdate(close=close))
                self._messages.append(EndStream(key))
            case RebuildAgent():
                self._importer.rebuild()

    def _open_stream(self, key: RequestKey, handle: ExportHandle) -> None:
        settings = self.settings
        opening = worker.OpenExport(
            key=key_to_message(key),
            export=handle_to_message(handle),
            worker_id=settings.worker_id,
            worker_epoch=settings.worker_epoch,
            fingerprint=fingerprint_to_message(settings.fingerprint),
        )
        update = worker.ExportUpdate(open=opening)
        self._messages.append(OpenStream(key, handle.address, update))

    def _post(self, post: PostRead) -> None:
        peer = self._peers[post.key]
        assert peer.pool is not None, f"{post.key}: nobody has announced anything"
        slot, remote, local = peer.handle.slot, list(post.remote_blocks), list(post.local_blocks)
        read = self._importer.read_blocks(peer.pool, slot, remote, local, post.checksums)
        self._read_ids[post.number] = read

    def _count_read(self, key: RequestKey, num_blocks: int, read_s: float) -> None:
        pool = self._peers[key].pool
        assert pool is not None
        self.counters.bytes += num_blocks * pool.block_bytes
        self.counters.read_seconds += read_s

    def _send(self, key: RequestKey, update: worker.ExportUpdate) -> None:
        self._messages.append(SendUpdate(key, update))


def _bundle(key: RequestKey, message: worker.Bundle) -> Bundle:
    try:
        return bundle_from_message(message)
    except ValueError as error:
        raise HandOffFailed(f"{key}: the bundle makes no sense: {error}.") from error
