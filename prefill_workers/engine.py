"""The loop body of a prefill worker: admits, computes prompts in chunks, exports their KV.

Commands come from `server.py` through the engine thread's inbox, decisions from `scheduler.py`;
the runner computes; the export table (`kv_export.py`) owns the exported blocks from admission
until a decode worker has read them. A request whose output ends with its first token by its own
limit (max_tokens 1) never reaches a decode worker: its blocks come straight from the pool, nothing
is exported, and they are free again at once. Its decode twin is `decode_workers/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hocket.errors import Cancelled, DeadlineExceeded, HocketError, InvalidRequest
from hocket.execution.engine_thread import (
    PULSE_S,
    BeginDrain,
    CancelRequest,
    Command,
    FailRequests,
    StepOutput,
)
from hocket.execution.grammars.requests import GrammarRequests
from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.model_runner import FirstToken, ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence
from hocket.execution.step_failures import StepFailures
from hocket.kv.prefix_cache import NoPrefixCache, Prefix, PrefixCaching
from hocket.rpc.status import failed_from_error
from hocket.scheduling.chunk_planner import PlannedChunk
from hocket.types import (
    Begun,
    Bundle,
    Event,
    Finished,
    Load,
    RequestKey,
    StartRequest,
    Tokens,
    Usage,
)
from prefill_workers.export_stream import (
    ExportCommand,
    ExportMessage,
    StreamGone,
    UpdateArrived,
)
from prefill_workers.kv_export import ExportTable
from prefill_workers.scheduler import PrefillScheduler


@dataclass(slots=True)
class _Running:
    """An admitted request. `num_ready` blocks of its prompt are computed; the first
    `cached_tokens` tokens were, before it came. When it `is_exported`, its blocks are the export
    table's to free."""

    request: StartRequest
    sequence: Sequence
    prefix: Prefix
    is_exported: bool
    num_ready: int
    cached_tokens: int


class PrefillEngine:
    """One prefill worker's state; every method is called by the engine thread."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        runner: ModelRunner,
        exports: ExportTable,
        *,
        synchronize: Callable[[], None],
        prefixes: PrefixCaching | None = None,
        grammars: GrammarRequests | None = None,
    ) -> None:
        """`synchronize` returns when the device has finished all work given to it. `prefixes`
        None: every prompt is computed in full. `grammars` None: a request that wants one fails."""
        self._scheduler = scheduler
        self._runner = runner
        self._exports = exports
        self._synchronize = synchronize
        self._prefixes = prefixes or NoPrefixCache()
        self._pool = runner.cache.pool
        self._grammars = grammars or GrammarRequests(None)
        self._block_tokens = runner.cache.layout.block_tokens
        # Named once, at arrival: a request may wait for room through many turns.
        self._waiting: dict[RequestKey, Prefix] = {}
        self._running: dict[RequestKey, _Running] = {}
        self._events: list[Event] = []
        self._failures = StepFailures()
        self._num_steps = 0
        self._computed_prompt_tokens = 0
        self._is_busy = False

    def take(self, command: Command | ExportCommand, now: float) -> None:
        """Takes note of a command; what follows from it comes out of the next step."""
        match command:
            case StartRequest():
                self._start(command, now)
            case CancelRequest(key):
                self._end(key, Cancelled("The request was cancelled."), now)
            case BeginDrain():
                self._scheduler.is_draining = True
            case FailRequests(error):
                self.fail_all(error, now)
            case UpdateArrived() | StreamGone():
                self._exports.take(command, now)

    def step(self, now: float) -> StepOutput[ExportMessage]:
        """One turn: timers, admissions, one prefill step, events.

        A turn that admits computes nothing: its Begun goes out first, so that decode can open its
        stream while the first chunk is computed.
        """
        self._num_steps += 1
        for key in self._scheduler.take_expired(now):
            self._end(key, DeadlineExceeded("The deadline passed before the first token."), now)
        for key, error in self._grammars.take_ready():
            self._scheduler.release(key)
            if error is not None:
                self._end(key, error, now)
        for lost in self._exports.tick(now):
            self._end(lost.key, lost.error, now)
        has_admitted = self._admit(now)
        chunks = [] if has_admitted else self._scheduler.plan_chunks()
        if chunks:
            self._prefill(chunks, now)
        self._is_busy = has_admitted or bool(chunks)
        return self.collect(now)

    def fail_all(self, error: HocketError, now: float) -> None:
        """Ends every request, and every export that is still to be read."""
        for key in [*self._scheduler.keys(), *self._exports.keys()]:
            self._end(key, error, now)

    def collect(self, now: float) -> StepOutput[ExportMessage]:
        """What is to be told since the last collection."""
        events, self._events = tuple(self._events), []
        messages = tuple(self._exports.take_messages())
        scheduler = self._scheduler
        is_drained = scheduler.is_draining and not scheduler.keys() and self._exports.is_idle
        return StepOutput(events, messages, self._load(), self._wait_s(now), is_drained)

    def _start(self, request: StartRequest, now: float) -> None:
        try:
            exported = self._exports.keys()
            if request.key in exported:
                raise InvalidRequest("key", str(request.key), "new: this attempt is exported here")
            self._scheduler.submit(request, now)
        except HocketError as error:
            self._events.append(failed_from_error(request.key, error))
        else:
            if self._grammars.take_in(request):
                self._scheduler.hold(request.key)
            is_fresh = request.sampling.prompt_logprobs is not None
            prefix = self._prefixes.prefix(request.token_ids, request.tenant_salt, is_fresh)
            self._waiting[request.key] = prefix

    def _admit(self, now: float) -> bool:
        """Starts waiting requests, oldest first, as long as all of a prompt's blocks are there.
        True when any was."""
        num_before = self._scheduler.num_running
        while (request := self._scheduler.next_waiting()) is not None:
            if (running := self._seat(request, now)) is None:
                break
            del self._waiting[request.key]
            self._running[request.key] = running
            self._scheduler.admit(request.key, running.sequence.num_computed)
        return self._scheduler.num_running > num_before

    def _seat(self, request: StartRequest, now: float) -> _Running | None:
        """Gives a request all of its prompt's blocks, shared ones first; None: there is no room."""
        num_blocks = self._scheduler.limits.blocks_needed(request)
        is_exported = request.stopping.max_tokens > 1
        prefix = self._waiting[request.key]
        hits = self._prefixes.look_up(prefix)
        num_hits = hits.num_blocks
        num_taken = num_blocks - num_hits + hits.num_free
        has_room = self._exports.can_begin if is_exported else self._pool.num_free.__ge__
        if not has_room(num_taken):
            return None
        blocks = self._prefixes.claim(prefix)
        blocks += self._pool.allocate(num_blocks - num_hits)
        if is_exported:
            handle = self._exports.begin(request.key, blocks, now, num_ready=num_hits)
            self._events.append(Begun(request.key, handle))
        grammar = self._grammars.of(request.key)
        num_shared = num_hits * self._block_tokens
        cached_tokens = self._runner.start_behind(num_shared)
        sequence = _sequence(request, blocks, num_shared, cached_tokens, grammar)
        return _Running(request, sequence, prefix, is_exported, num_hits, cached_tokens)

    def _prefill(self, plan: list[PlannedChunk], now: float) -> None:
        """One step over the planned chunks, then their outcome."""
        chunks = [PrefillChunk(self._running[c.key].sequence, c.num_tokens) for c in plan]

        def compute() -> list[FirstToken | None]:
            first_tokens = self._runner.prefill(chunks)
            # Decode may read what is announced below as soon as it is announced.
            self._synchronize()
            return first_tokens

        def fail(failed: list[RequestKey], error: HocketError) -> None:
            for key in failed:
                self._end(key, error, now)

        first_tokens = self._failures.run(compute, [chunk.key for chunk in plan], fail)
        for chunk, first in zip(plan, first_tokens or (), strict=bool(first_tokens)):
            self._scheduler.computed(chunk)
            self._computed_prompt_tokens += chunk.num_tokens
            self._announce(chunk, now)
            prompt_logprobs = self._running[chunk.key].sequence.take_prompt_logprobs()
            if prompt_logprobs is not None:
                self._events.append(prompt_logprobs)
            if first is not None:
                self._finish(chunk.key, first, now)

    def _announce(self, chunk: PlannedChunk, now: float) -> None:
        """Tells the reader which blocks became full; a partial last one counts at the end. Full
        ones may be shared from now on."""
        running = self._running[chunk.key]
        sequence, first_block = running.sequence, running.num_ready
        blocks = sequence.block_table
        self._prefixes.index(running.prefix, sequence.token_ids, blocks, sequence.num_complete)
        is_whole = sequence.num_computed == sequence.prompt_tokens
        num_full = len(blocks) if is_whole else sequence.num_computed // self._block_tokens
        # Behind a hit the first of several tokens that are computed again lie in blocks told of.
        running.num_ready = max(first_block, num_full)
        if running.is_exported and running.num_ready > first_block:
            num_blocks = running.num_ready - first_block
            self._exports.chunk_ready(chunk.key, first_block, num_blocks, now)

    def _finish(self, key: RequestKey, first: FirstToken, now: float) -> None:
        """The prompt is whole: the first token goes out, the rest of the hand-off to its table."""
        running = self._running[key]
        generated_tokens = running.request.generated_tokens
        prompt_tokens = len(running.request.token_ids) - generated_tokens
        cached_tokens = min(running.cached_tokens, prompt_tokens)
        usage = Usage(prompt_tokens, output_tokens=1, cached_tokens=cached_tokens)
        logprobs = () if first.logprobs is None else (first.logprobs,)
        self._events.append(Tokens(key, generated_tokens, (first.token_id,), logprobs))
        self._events.append(Finished(key, first.finish_reason, usage))
        if running.is_exported:
            hidden_state = self._runner.hidden_state_bytes(first.hidden_state)
            bundle = Bundle(
                first.token_id, first.logprobs, first.finish_reason, usage, hidden_state
            )
            self._exports.finish(key, bundle, now)
        self._release(key)

    def _end(self, key: RequestKey, error: HocketError, now: float) -> None:
        """Forgets a request wherever it is, its export included, and frees its blocks."""
        if self._scheduler.remove(key):
            self._events.append(failed_from_error(key, error))
        self._release(key)
        self._exports.abort(key, error, now)

    def _release(self, key: RequestKey) -> None:
        self._grammars.discard(key)
        self._waiting.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None and not running.is_exported:
            self._pool.free(running.sequence.block_table)

    def _wait_s(self, now: float) -> float:
        """How long nothing can happen by itself. A step may have made room: look again then."""
        if self._is_busy or self._scheduler.num_running:
            return 0.0
        waits = [PULSE_S]
        if (grammar_s := self._grammars.wait_s) is not None:
            waits.append(grammar_s)
        if (deadline := self._scheduler.next_deadline()) is not None:
            waits.append(max(0.0, deadline - now))
        if (next_tick_s := self._exports.next_tick_s(now)) is not None:
            waits.append(next_tick_s)
        return min(waits)

    def _load(self) -> Load:
        return Load(
            running_requests=self._scheduler.num_running,
            waiting_requests=self._scheduler.num_waiting,
            queued_prompt_tokens=self._scheduler.queued_prompt_tokens,
            free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            unread_blocks=self._exports.unread_blocks,
            steps=self._num_steps,
            computed_prompt_tokens=self._computed_prompt_tokens,
        )


def _sequence(
    request: StartRequest,
    blocks: list[int],
    num_shared: int,
    num_computed: int,
    grammar: CompiledGrammar | None,
) -> Sequence:
    """The prompt, its first `num_shared` slots in the cache, `num_computed` of them for good."""
    return Sequence(
        key=request.key,
        token_ids=list(request.token_ids),
        prompt_tokens=len(request.token_ids),
        sampling=request.sampling,
        stopping=request.stopping,
        block_table=blocks,
        num_computed=num_computed,
        num_shared=num_shared,
        num_generated=request.generated_tokens,
        grammar=grammar,
    )
