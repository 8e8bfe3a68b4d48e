"""The loop body of a decode worker: imports KV, joins requests to the batch, decodes with drafts.

Commands come from `server.py` through the engine thread's inbox, decisions from `scheduler.py`;
the import table (`kv_import.py`) moves the prompt's KV; the runner computes. A request's blocks,
prompt and output, are reserved at admission and freed when it ends. While its KV is imported, the
prompt's blocks are the import table's: it gives them back clean, or keeps them in quarantine until
no READ can write into them any more. Its prefill twin is `prefill_workers/engine.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

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
from hocket.errors import Cancelled, DeadlineExceeded, HocketError
from hocket.execution.engine_thread import (
    PULSE_S,
    BeginDrain,
    CancelRequest,
    Command,
    FailRequests,
    StepOutput,
)
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence
from hocket.execution.step_failures import StepFailures
from hocket.logs import about
from hocket.parallel.lockstep import Alone, StepTogether, Wish
from hocket.rpc.status import failed_from_error
from hocket.scheduling.chunk_planner import PlannedChunk
from hocket.scheduling.request_limits import blocks_for
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
    Usage,
    VerifyStep,
)

DecodeCommand = Command | ImportCommand | WakeUp

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Seated:
    """An admitted request and its blocks, which cover prompt and output.

    While `is_importing` the first `prompt_blocks` of them are the import table's, and there is no
    sequence.
    """

    request: StartRequest
    blocks: list[int]
    prompt_blocks: int
    is_importing: bool
    sequence: Sequence | None = None
    cached_tokens: int = 0

    def own_blocks(self) -> list[int]:
        """The blocks that are this engine's to free."""
        return self.blocks[self.prompt_blocks :] if self.is_importing else self.blocks

    def begin_sequence(
        self, first_token: int | None = None, hidden_H: Tensor | None = None
    ) -> None:
        """From here on the request takes steps here. A first token, and the hidden state before
        it, come with an imported prompt; without them the prompt is to be computed."""
        token_ids = list(self.request.token_ids)
        self.sequence = Sequence(
            key=self.request.key,
            token_ids=token_ids if first_token is None else [*token_ids, first_token],
            prompt_tokens=len(token_ids),
            sampling=self.request.sampling,
            stopping=self.request.stopping,
            block_table=self.blocks,
            num_computed=0 if first_token is None else len(token_ids),
            pending_hidden=None if hidden_H is None else hidden_H[None],
        )


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
    ) -> None:
        """`together`: this rank's place in its expert-parallel group, if it has one.

        `can_recompute`: a hand-off that broke is computed here instead of failing its request.
        One that prefill gave up on purpose, or that must not be, fails it in any case."""
        self._scheduler = scheduler
        self._runner = runner
        self._imports = imports
        self._can_recompute = can_recompute
        self._together = together or Alone()
        self._pool = runner.cache.pool
        self._seated: dict[RequestKey, _Seated] = {}
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
        """One turn: timers, admissions, imports, prompt chunks, one decode step, events.

        A turn that admits or joins a request computes nothing, so that what follows from it, an
        Export stream to open or a first token to pass on, does not wait for a model step. The
        other ranks of a group wait that long.
        """
        self._num_steps += 1
        late = self._scheduler.take_expired(now)
        self._end(late, DeadlineExceeded("The deadline passed before the last token."), now)
        has_changed = self._admit(now)
        for outcome in self._imports.tick(now):
            self._settle(outcome, now)
            has_changed = True
        self._is_busy = has_changed or self._compute(now)
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

    def _admit(self, now: float) -> bool:
        """Seats waiting requests, oldest first, as long as seats and blocks are there. True when
        any was."""
        limits = self._scheduler.limits
        num_before = self._scheduler.num_seated
        while (request := self._scheduler.next_waiting(self._pool.num_free)) is not None:
            blocks = self._pool.allocate(limits.blocks_needed(request))
            prompt_blocks = blocks_for(len(request.token_ids), limits.block_tokens)
            is_importing = self._scheduler.admit(request.key)
            seated = _Seated(request, blocks, prompt_blocks, is_importing)
            self._seated[request.key] = seated
            if is_importing:
                assert request.export is not None
                self._imports.begin(request.key, request.export, blocks[:prompt_blocks], now)
            else:
                seated.begin_sequence()
        return self._scheduler.num_seated > num_before

    def _settle(self, outcome: Imported | ImportFailed, now: float) -> None:
        """An import ended: the request joins the batch, or fails, or is computed here."""
        seated = self._seated[outcome.key]
        match outcome:
            case Imported():
                seated.is_importing = False
                try:
                    self._join(seated, outcome)
                except HocketError as error:
                    self._end([outcome.key], error, now)
            case ImportFailed(key, error) if self._can_recompute and error.is_retryable:
                text = "The hand-off of %s failed, it is computed again: %s"
                _logger.warning(text, key, error, extra=about(key))
                self._release(key)
                self._scheduler.recompute(key)
            case ImportFailed(key, error):
                self._end([key], error, now)

    def _join(self, seated: _Seated, imported: Imported) -> None:
        """Takes an imported prompt into the batch; its first token is told first.

        Raises:
            InternalError: the bundle's hidden state is not one of this model.
        """
        key, bundle = imported.key, imported.bundle
        hidden_H = None
        if bundle.finish_reason is None:
            hidden_H = self._runner.load_hidden_state(bundle.hidden_state)
        seated.cached_tokens = bundle.usage.cached_tokens
        seated.begin_sequence(bundle.first_token, hidden_H)
        self._scheduler.join(key)
        self._events.append(Joined(key, imported.num_bytes, imported.transport))
        logprobs = () if bundle.logprobs is None else (bundle.logprobs,)
        self._emit(key, (bundle.first_token,), logprobs, bundle.finish_reason)

    def _compute(self, now: float) -> bool:
        """One step, together with the group's other ranks; False when nobody has anything to
        compute."""
        chunks = self._scheduler.plan_chunks()
        plan = self._scheduler.plan_decode()
        sequences = [self._sequence(planned.key) for planned in plan]
        num_drafts = [planned.num_drafts for planned in plan]
        draft_passes = self._runner.count_draft_passes(sequences, num_drafts)
        with self._together.step(Wish(bool(chunks), draft_passes, bool(plan))) as is_step:
            if chunks:
                self._prefill(chunks, now)
            if plan:
                self._decode(plan, now)
        if plan or (is_step and not chunks):
            self._decode_steps += 1
        return is_step

    def _prefill(self, plan: list[PlannedChunk], now: float) -> None:
        """Computes prompt chunks of requests whose KV was not handed over."""
        chunks = [PrefillChunk(self._sequence(c.key), c.num_tokens) for c in plan]
        first_tokens = self._prefill_failures.run(
            lambda: self._runner.prefill(chunks),
            lambda error: self._end([chunk.key for chunk in plan], error, now),
        )
        for chunk, first in zip(plan, first_tokens or (), strict=bool(first_tokens)):
            self._scheduler.computed(chunk)
            self._computed_prompt_tokens += chunk.num_tokens
            if first is not None:
                is_recomputed = self._scheduler.is_recomputed(chunk.key)
                self._events.append(Joined(chunk.key, 0, "", recomputed=is_recomputed))
                logprobs = () if first.logprobs is None else (first.logprobs,)
                self._emit(chunk.key, (first.token_id,), logprobs, first.finish_reason)

    def _decode(self, plan: list[PlannedDecode], now: float) -> None:
        """One decode step over the whole batch."""
        sequences = [self._sequence(planned.key) for planned in plan]
        outputs = self._decode_failures.run(
            lambda: self._runner.decode(sequences, [planned.num_drafts for planned in plan]),
            lambda error: self._end([planned.key for planned in plan], error, now),
        )
        self._decode_batch_sum += len(plan)
        for planned, output in zip(plan, outputs or (), strict=bool(outputs)):
            self._emitted_tokens += len(output.token_ids)
            step = VerifyStep(output.num_drafted, output.num_accepted)
            self._emit(planned.key, output.token_ids, output.logprobs, output.finish_reason, step)

    def _emit(
        self,
        key: RequestKey,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish_reason: FinishReason | None,
        step: VerifyStep | None = None,
    ) -> None:
        """Tells the newest tokens of a sequence, and its end if they are the last ones."""
        seated, sequence = self._seated[key], self._sequence(key)
        generated_tokens = seated.request.generated_tokens
        first_index = generated_tokens + sequence.output_tokens - len(token_ids)
        self._events.append(Tokens(key, first_index, token_ids, logprobs, step))
        if finish_reason is None:
            return
        usage = Usage(
            prompt_tokens=sequence.prompt_tokens - generated_tokens,
            output_tokens=sequence.output_tokens,
            cached_tokens=seated.cached_tokens,
            drafts=sequence.drafts,
        )
        self._events.append(Finished(key, finish_reason, usage))
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
        seated = self._seated.pop(key, None)
        if seated is not None:
            self._pool.free(seated.own_blocks())

    def _sequence(self, key: RequestKey) -> Sequence:
        sequence = self._seated[key].sequence
        assert sequence is not None, f"{key} takes no steps yet"
        return sequence

    def _wait_s(self, now: float) -> float:
        """How long nothing can happen by itself. A step may have made room: look again then."""
        if self._is_busy:
            return 0.0
        waits = [PULSE_S]
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
