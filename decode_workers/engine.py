"""The loop body of a decode worker: imports KV, joins requests to the batch, decodes with drafts.

Commands come from `server.py` through the engine thread's inbox, decisions from `scheduler.py`;
`seats.py` keeps who has which blocks; the import table (`kv_import.py`) moves the prompt's KV; the
runner computes. An import opens its stream when the request comes, so that prefill keeps the blocks
while the request waits here, and READs when it is admitted. While its KV is imported, the prompt's
blocks are the import table's: it gives them back clean, or keeps them in quarantine until no READ
can write into them any more. Before each step running requests get the blocks that they grow into;
when there are too few, a later one gives way. Its prefill twin is `prefill_workers/engine.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from decode_workers.group_peers import WakeUp
from decode_workers.import_stream import (
    EventArrived,
    ImportCommand,
    Imported,
    ImportFailed,
    ImportMessage,
    ReadsEnded,
    StreamGone,
)
from decode_workers.kv_import import ImportTable
from decode_workers.scheduler import DecodeScheduler, PlannedDecode
from decode_workers.seats import LiveRequest, Seats
from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    HandOffFailed,
    HocketError,
    InternalError,
)
from hocket.execution.engine_thread import (
    PULSE_S,
    BeginDrain,
    CancelRequest,
    Command,
    FailRequests,
    StepOutput,
)
from hocket.execution.grammars.requests import GrammarRequests
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.step_failures import StepFailures
from hocket.kv.prefix_cache import NoPrefixCache, PrefixCaching
from hocket.logs import about
from hocket.parallel.lockstep import Alone, StepTogether, Wish
from hocket.rpc.status import failed_from_error
from hocket.scheduling.chunk_planner import PlannedChunk
from hocket.scheduling.draft_controller import (
    DraftBatch,
    DraftController,
    DraftRequest,
    fixed_drafts,
)
from hocket.types import (
    Event,
    Finished,
    FinishReason,
    Joined,
    Load,
    RequestKey,
    StartRequest,
    TokenLogprobs,
    Tokens,
    VerifyStep,
)

DecodeCommand = Command | ImportCommand | WakeUp

_logger = logging.getLogger(__name__)


class DecodeEngine:
    """One decode worker's state; every method is called by the engine thread."""

    def __init__(
        self,
        scheduler: DecodeScheduler,
        runner: ModelRunner,
        imports: ImportTable,
        *,
        can_recompute: bool,
        together: StepTogether | None = None,
        prefixes: PrefixCaching | None = None,
        grammars: GrammarRequests | None = None,
        drafts: DraftController | None = None,
    ) -> None:
        """`together`: this rank's place in its expert-parallel group, if it has one. `prefixes`
        None: no request uses what another computed. `grammars` None: one that wants one fails.
        `drafts` None: always as many as the scheduler allows.

        `can_recompute`: a hand-off that broke is computed here instead of failing its request.
        One that prefill gave up on purpose, or that must not be, fails it in any case."""
        self._scheduler = scheduler
        self._runner = runner
        self._imports = imports
        self._can_recompute = can_recompute
        self._together = together or Alone()
        self._pool = runner.cache.pool
        block_tokens = runner.cache.layout.block_tokens
        self._seats = Seats(
            self._pool, prefixes or NoPrefixCache(), block_tokens, runner.start_behind
        )
        self._drafts = drafts or fixed_drafts(scheduler.policy.draft_tokens)
        self._grammars = grammars or GrammarRequests(None)
        self._live: dict[RequestKey, LiveRequest] = {}
        self._events: list[Event] = []
        self._prefill_failures = StepFailures()
        self._decode_failures = StepFailures()
        self._num_steps = 0
        self._computed_prompt_tokens = 0
        self._decode_steps = 0
        self._decode_batch_sum = 0
        self._emitted_tokens = 0
        self._is_busy = False

    def take(self, command: DecodeCommand, now: float) -> None:
        """Takes note of a command; what follows from it comes out of the next step."""
        match command:
            case StartRequest():
                self._start(command, now)
            case CancelRequest(key):
                self._end([key], Cancelled("The request was cancelled."), now)
            case BeginDrain():
                self._scheduler.is_draining = True
            case FailRequests(error):
                self.fail_all(error, now)
            case EventArrived() | StreamGone() | ReadsEnded():
                self._imports.take(command, now)
            case WakeUp(step):
                self._together.wake(step)

    def step(self, now: float) -> StepOutput[ImportMessage]:
        """One turn: timers, imports, room for the running, admissions, one model step, events.

        Running requests grow before anyone is admitted: what is free is theirs first. A turn that
        admits or joins a request computes nothing, so that what follows from it, a READ's
        acknowledgement or a first token to pass on, does not wait for a model step. The other
        ranks of a group wait that long.
        """
        self._num_steps += 1
        late = self._scheduler.take_expired(now)
        self._end(late, DeadlineExceeded("The deadline passed before the last token."), now)
        for key, error in self._grammars.take_ready():
            self._scheduler.release(key)
            if error is not None:
                self._end([key], error, now)
        outcomes = self._imports.tick(now)
        for outcome in outcomes:
            self._settle(outcome, now)
        plan = self._make_room()
        has_changed = self._admit(now) or bool(outcomes)
        self._is_busy = has_changed or self._compute(plan, now)
        return self.collect(now)

    def fail_all(self, error: HocketError, now: float) -> None:
        """Ends every request."""
        self._end(self._scheduler.keys(), error, now)

    def collect(self, now: float) -> StepOutput[ImportMessage]:
        """What is to be told since the last collection."""
        events, self._events = tuple(self._events), []
        messages = tuple(self._imports.take_messages())
        scheduler = self._scheduler
        is_drained = scheduler.is_draining and not scheduler.keys() and self._imports.is_idle
        return StepOutput(events, messages, self._load(), self._wait_s(now), is_drained)

    def _start(self, request: StartRequest, now: float) -> None:
        try:
            self._scheduler.submit(request, now)
        except HocketError as error:
            self._events.append(failed_from_error(request.key, error))
            return
        if self._grammars.take_in(request):
            self._scheduler.hold(request.key)
        live = self._live[request.key] = self._seats.arrive(request)
        if (handle := request.export) is None:
            return
        if handle.num_blocks == live.prompt_blocks:
            self._imports.open(request.key, handle, now)
        else:
            text = f"{request.key} has {handle.num_blocks} blocks, not {live.prompt_blocks}."
            self._settle(ImportFailed(request.key, HandOffFailed(text)), now)

    def _make_room(self) -> list[PlannedDecode]:
        """The plan of the next decode step, without those that have to sit it out for want of a
        block. First all get what their newest token needs, oldest first, if need be from later
        ones; then drafts get what is left, as far as it goes."""
        plan = [planned for planned in self._scheduler.plan_decode() if self._has_room(planned.key)]
        for planned in plan:
            sequence = self._live[planned.key].running
            num_drafts = min(planned.num_drafts, sequence.remaining_tokens - 1)
            self._seats.grow(self._live[planned.key], sequence.num_tokens + num_drafts)
        return plan

    def _has_room(self, key: RequestKey) -> bool:
        """Whether a running request can take a step, once others gave way; False when it gave way
        itself."""
        if not self._scheduler.is_running(key):
            return False
        live = self._live[key]
        while not self._seats.grow(live, live.running.num_tokens):
            if (victim := self._scheduler.victim_for(key)) is None:
                return False
            self._preempt(victim, key)
        return True

    def _preempt(self, key: RequestKey, in_favour_of: RequestKey) -> None:
        num_blocks = len(self._live[key].blocks)
        output = self._seats.give_way(self._live[key])
        self._scheduler.preempt(key, output)
        extra = about(key) | {"blocks": num_blocks, "in_favour_of": str(in_favour_of)}
        _logger.info("preempted", extra=extra)

    def _admit(self, now: float) -> bool:
        """Seats waiting requests, oldest first, as long as seats and blocks are there. True when
        any was."""
        num_before = self._scheduler.num_seated
        while (request := self._scheduler.next_waiting()) is not None:
            key, live = request.key, self._live[request.key]
            if not self._seats.take(live, self._scheduler.blocks_to_admit(request)):
                break
            live.grammar = self._grammars.of(key)
            live.is_importing = self._scheduler.admit(key, self._seats.cached_tokens(live))
            if live.is_importing:
                blocks = live.blocks[: live.prompt_blocks]
                self._imports.receive(key, blocks, now, first_block=live.num_hits)
            else:
                self._seats.begin_sequence(live, request)
        return self._scheduler.num_seated > num_before

    def _settle(self, outcome: Imported | ImportFailed, now: float) -> None:
        """An import ended: the request joins the batch, or fails, or is computed here. It may fail
        while the request still waits."""
        live = self._live[outcome.key]
        match outcome:
            case Imported():
                live.is_importing = False
                try:
                    self._join(live, outcome)
                except HocketError as error:
                    self._end([outcome.key], error, now)
            case ImportFailed(key, error) if self._can_recompute and error.is_retryable:
                text = "The hand-off of %s failed, it is computed again: %s"
                _logger.warning(text, key, error, extra=about(key))
                self._seats.leave(live)
                live.hand_off_fault = str(error)
                self._scheduler.recompute(key)
            case ImportFailed(key, error):
                self._end([key], error, now)

    def _join(self, live: LiveRequest, imported: Imported) -> None:
        """Takes an imported prompt into the batch; its first token is told first.

        Raises:
            InternalError: the bundle's hidden state or token is not one of this model.
        """
        key, bundle = imported.key, imported.bundle
        if bundle.first_token >= self._scheduler.limits.vocabulary_size:
            raise InternalError(f"prefill's first token is {bundle.first_token}, no token here")
        hidden_RH = None
        if bundle.finish_reason is None:
            prompt_tokens = len(live.request.token_ids)
            hidden_RH = self._runner.load_hidden_state(bundle.hidden_state, prompt_tokens)
        live.cached_tokens = bundle.usage.cached_tokens
        self._seats.begin_imported(live, bundle.first_token, hidden_RH)
        self._seats.publish(live)
        self._scheduler.join(key)
        num_found = self._seats.hit_tokens(live)
        self._events.append(Joined(key, imported.num_bytes, imported.transport, num_found))
        logprobs = () if bundle.logprobs is None else (bundle.logprobs,)
        self._emit(key, (bundle.first_token,), logprobs, bundle.finish_reason)

    def _compute(self, plan: list[PlannedDecode], now: float) -> bool:
        """One step, together with the group's other ranks; False when nobody has anything to
        compute."""
        chunks = self._scheduler.plan_chunks()
        keys = [planned.key for planned in plan]
        batch = DraftBatch(keys, lambda place: self._draft_request(plan[place]))
        proposal = self._drafts.propose(batch)
        wish = Wish(bool(chunks), bool(plan), proposal.offer)
        with self._together.step(wish) as agreement:
            if agreement is None:
                return False
            num_drafts = self._drafts.allot_agreed(proposal, agreement)
            if chunks:
                self._prefill(chunks, now)
            if plan:
                self._decode(keys, num_drafts, now)
                if not chunks and (times := self._runner.last_step) is not None:
                    self._drafts.observe_step(times)
        if plan or not chunks:
            self._decode_steps += 1
        return True

    def _draft_request(self, planned: PlannedDecode) -> DraftRequest:
        return self._runner.draft_request(self._live[planned.key].running, planned.num_drafts)

    def _prefill(self, plan: list[PlannedChunk], now: float) -> None:
        """Computes prompt chunks of requests whose KV was not handed over."""
        chunks = [PrefillChunk(self._live[c.key].running, c.num_tokens) for c in plan]
        first_tokens = self._prefill_failures.run(
            lambda: self._runner.prefill(chunks),
            [chunk.key for chunk in plan],
            lambda failed, error: self._end(failed, error, now),
        )
        for chunk, first in zip(plan, first_tokens or (), strict=bool(first_tokens)):
            self._scheduler.computed(chunk)
            self._computed_prompt_tokens += chunk.num_tokens
            live = self._live[chunk.key]
            self._seats.publish(live)
            if (prompt_logprobs := live.running.take_prompt_logprobs()) is not None:
                self._events.append(prompt_logprobs)
            if first is not None:
                if not live.has_joined:
                    is_recomputed = self._scheduler.is_recomputed(chunk.key)
                    how = (live.cached_tokens, is_recomputed, live.hand_off_fault)
                    self._events.append(Joined(chunk.key, 0, "", *how))
                logprobs = () if first.logprobs is None else (first.logprobs,)
                self._emit(chunk.key, (first.token_id,), logprobs, first.finish_reason)

    def _decode(self, keys: list[RequestKey], num_drafts: list[int], now: float) -> None:
        """One decode step over the whole batch."""
        sequences = [self._live[key].running for key in keys]
        outputs = self._decode_failures.run(
            lambda: self._runner.decode(sequences, num_drafts),
            keys,
            lambda failed, error: self._end(failed, error, now),
        )
        self._decode_batch_sum += len(keys)
        for key, output in zip(keys, outputs or (), strict=bool(outputs)):
            self._emitted_tokens += len(output.token_ids)
            self._drafts.observe(key, output.num_drafted, output.num_accepted)
            self._seats.publish(self._live[key])
            step = VerifyStep(output.num_drafted, output.num_accepted)
            self._emit(key, output.token_ids, output.logprobs, output.finish_reason, step)

    def _emit(
        self,
        key: RequestKey,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: FinishReason | None,
        step: VerifyStep | None = None,
    ) -> None:
        """Tells the newest tokens of a sequence, and its end if they are the last ones."""
        live = self._live[key]
        live.has_joined = True
        first_index = live.request.generated_tokens + live.output_tokens - len(token_ids)
        self._events.append(Tokens(key, first_index, token_ids, logprobs, step))
        if finish_reason is not None:
            self._events.append(Finished(key, finish_reason, live.usage()))
            self._scheduler.remove(key)
            self._release(key)

    def _end(self, keys: Iterable[RequestKey], error: HocketError, now: float) -> None:
        """Forgets requests wherever they are, their imports included, and frees their blocks."""
        for key in keys:
            if self._scheduler.remove(key):
                self._events.append(failed_from_error(key, error))
            self._imports.cancel(key, now)
            self._release(key)

    def _release(self, key: RequestKey) -> None:
        self._grammars.discard(key)
        self._drafts.forget(key)
        live = self._live.pop(key, None)
        if live is not None:
            self._seats.leave(live)

    def _wait_s(self, now: float) -> float:
        """How long nothing can happen by itself. A step may have made room: look again then."""
        if self._is_busy:
            return 0.0
        waits = [PULSE_S]
        if (grammar_s := self._grammars.wait_s) is not None:
            waits.append(grammar_s)
        if (deadline := self._scheduler.next_deadline()) is not None:
            waits.append(max(0.0, deadline - now))
        if (next_tick_s := self._imports.next_tick_s(now)) is not None:
            waits.append(next_tick_s)
        return min(waits)

    def _load(self) -> Load:
        return Load(
            running_requests=self._scheduler.num_seated,
            waiting_requests=self._scheduler.num_waiting,
            queued_prompt_tokens=self._scheduler.queued_prompt_tokens,
            free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            steps=self._num_steps,
            computed_prompt_tokens=self._computed_prompt_tokens,
            decode_steps=self._decode_steps,
            decode_batch_sum=self._decode_batch_sum,
            emitted_tokens=self._emitted_tokens,
        )
