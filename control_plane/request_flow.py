"""The story of a request, from what the client sent to its last message.

Validate, tokenise, find a pair of workers. Start prefill; when it has begun to export the prompt's
KV, start decode with the handle. Tokens of both legs become one output, streamed as it grows. When
a worker refuses or loses the request before decode has joined, other workers begin again. The end,
an error, a deadline or the client's leaving ends both legs on their workers.

The gateway calls `RequestFlow.serve` once per request; all time here is the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from control_plane.attempts import Attempts, LegFailed
from control_plane.detokenizer import OutputText
from control_plane.legs import LegEvent, Legs
from control_plane.output import Output, OutputPiece
from control_plane.request_log import RequestRecord
from control_plane.router.pool import WorkerPool
from control_plane.router.snapshot import Need
from control_plane.tokenizer import ModelTokenizer
from control_plane.turns import Turns
from control_plane.validation import ModelLimits, ValidRequest, check_lengths, validate
from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    HandOffFailed,
    HocketError,
    InternalError,
    InvalidRequest,
)
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.convert import finish_reason_to_message, logprobs_to_message, usage_to_message
from hocket.rpc.status import error_from_failed
from hocket.telemetry import GatewayMetrics
from hocket.types import (
    Begun,
    DraftCounts,
    Failed,
    Finished,
    Joined,
    Leg,
    RequestKey,
    StartRequest,
    StoppingParams,
    Tokens,
    Usage,
)

logger = logging.getLogger(__name__)

Send = Callable[[generation.GenerateResponse], Awaitable[None]]
"""Passes a message on to the client; waits while the client is slow."""


class RequestFlow:
    """Serves requests over a pool of workers. One per gateway."""

    def __init__(
        self,
        pool: WorkerPool,
        tokenizer: ModelTokenizer,
        metrics: GatewayMetrics,
        new_seed: Callable[[], int],
    ) -> None:
        """`new_seed` gives a uint64 for a request that brought none."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._new_seed = new_seed
        self._turns = Turns(asyncio.get_running_loop())

    async def serve(
        self,
        message: generation.GenerateRequest,
        limits: ModelLimits,
        timeout_s: float,
        send: Send,
    ) -> None:
        """Answers one request through `send`; the last message has `finish`.

        Raises HocketError for everything that ends a request before its time. When the caller is
        cancelled (the client left), both legs are.
        """
        arrival_s = asyncio.get_running_loop().time()
        record = RequestRecord(message.request_id or uuid.uuid4().hex)
        story = _Story(record, arrival_s, timeout_s, send)
        outcome, fault = InternalError.reason, ""
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout_at(story.deadline_s):
                await self._serve(message, limits, story)
            outcome = "OK"
        except TimeoutError:
            outcome = DeadlineExceeded.reason
            limit_s = f"{timeout_s:g}"
            raise DeadlineExceeded(
                f"not finished {limit_s} s after arrival", limit_s=limit_s
            ) from None
        except HocketError as error:
            outcome = error.reason
            # The message of an invalid request quotes what the client sent: not for logs.
            fault = error.field if isinstance(error, InvalidRequest) else str(error)
            raise
        except asyncio.CancelledError:
            # Many a client leaves as soon as it has read the last message.
            outcome = "OK" if record.is_answered else Cancelled.reason
            raise
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(outcome).inc()
            record.ended(outcome, asyncio.get_running_loop().time() - arrival_s, fault)

    async def _serve(
        self, message: generation.GenerateRequest, limits: ModelLimits, story: _Story
    ) -> None:
        request = validate(message, limits)
        if not request.has_seed:
            request = replace(request, sampling=replace(request.sampling, seed=self._new_seed()))
        token_ids = await self._tokenizer.tokenize(request.prompt, limits.most_prompt_tokens)
        max_tokens = check_lengths(len(token_ids), request.max_tokens, limits)
        self._metrics.observe_arrival(len(token_ids))
        story.record.prompt_tokens = len(token_ids)
        attempts = Attempts(self._pool, Need(len(token_ids), max_tokens))

        start = self._start_request(request, story, token_ids, max_tokens)
        text = OutputText(self._tokenizer.backend, request.stop_strings)
        output = Output(text, start.stopping.stop_token_ids, max_tokens)
        with _Run(story, output, start, self._metrics) as run:
            await self._follow(run, attempts, story)
        await run.send_finish()

    async def _follow(self, run: _Run, attempts: Attempts, story: _Story) -> None:
        """Both legs to the end of the output, on other workers when one loses the request early."""
        while True:
            story.record.placed(attempts.placement)
            placed = (attempts.placement, attempts.need, story.deadline_s)
            try:
                with Legs(self._pool, self._turns, *placed) as legs:
                    await run.follow(legs, attempts.number)
                return
            except LegFailed as failed:
                if not run.can_begin_again:
                    raise failed.error from None
                attempts.next(failed, must_agree=run.has_tokens)
                reason = failed.error.reason
            self._metrics.replacements.labels(reason).inc()
            extra = {"request_id": story.request_id, "attempt": attempts.number, "reason": reason}
            logger.info("request placed again", extra=extra)

    def _start_request(
        self, request: ValidRequest, story: _Story, token_ids: tuple[int, ...], max_tokens: int
    ) -> StartRequest:
        """The prefill leg; decode's differs in leg and handle."""
        stop_token_ids = request.stop_token_ids
        if not request.ignore_eos:
            stop_token_ids |= self._tokenizer.end_token_ids
        return StartRequest(
            # Clients may use an id twice at a time; workers may not see it twice.
            key=RequestKey(f"{story.request_id}.{uuid.uuid4().hex[:12]}"),
            token_ids=token_ids,
            sampling=request.sampling,
            stopping=StoppingParams(max_tokens, stop_token_ids),
            leg=Leg.PREFILL,
            deadline_s=story.timeout_s,
            max_draft_tokens=request.max_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Story:
    """What stays the same from arrival to the end. Times are readings of the loop's clock."""

    record: RequestRecord
    arrival_s: float
    timeout_s: float
    send: Send

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.timeout_s


class _Run:
    """A request that is being served: events in, messages out."""

    def __init__(
        self,
        story: _Story,
        output: Output,
        start: StartRequest,
        metrics: GatewayMetrics,
    ) -> None:
        self._story = story
        self._output = output
        self._start = start
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._joined: Joined | None = None
        self._usages: dict[Leg, Usage] = {}
        self._drafts = DraftCounts()
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        self._hand_off_s = 0.0
        self._sent_s = 0.0
        self._unsent: OutputPiece | None = None

    def __enter__(self) -> _Run:
        self._metrics.queued.inc()
        return self

    def __exit__(self, *error: object) -> None:
        if self._first_token_s is None:
            self._metrics.queued.dec()

    async def follow(self, legs: Legs, attempt: int) -> None:
        """Starts the legs and goes with them to the end of the output.

        Raises LegFailed when a worker gives the request up.
        """
        self._legs = legs
        self._start = replace(self._start, key=replace(self._start.key, attempt=attempt))
        legs.start(self._start)
        while not self.is_over:
            for item in await legs.events():
                self.take(item)
            await self.send_piece()

    @property
    def can_begin_again(self) -> bool:
        """Whether nothing is lost with these legs: no token is told yet, or prefill would choose
        the same first token."""
        if self._legs.has_joined:
            return False
        is_same = self._legs.placement.prefill.fingerprint.is_batch_invariant
        return self._output.num_tokens <= (1 if is_same else 0)

    @property
    def has_tokens(self) -> bool:
        """Whether the output has begun."""
        return self._output.num_tokens > 0

    @property
    def is_over(self) -> bool:
        """The output is, and decode has ended by itself, so that it needs no cancel.

        An output that ended with its first token or at a stop string waits for nobody.
        """
        if not self._output.is_over:
            return False
        is_cut = bool(self._output.matched_stop) or self._output.num_tokens <= 1
        return is_cut or not self._legs.is_running(Leg.DECODE)

    def take(self, item: LegEvent) -> None:
        """Takes the next event of either leg. Raises LegFailed, or InternalError for nonsense."""
        match item.event:
            case Begun(export=export):
                if self._start.stopping.max_tokens > 1 and not self._output.is_over:
                    self._legs.start_decode(export)
            case Tokens():
                self._take_tokens(item.event)
            case Joined():
                self._take_joined(item.event)
            case Finished():
                self._take_finished(item.leg, item.event)
            case Failed():
                error = error_from_failed(item.event)
                if not (self._is_done(item.leg, error) or self._output.is_over):
                    raise LegFailed(item.leg, error)

    def _is_done(self, leg: Leg, error: HocketError) -> bool:
        """Whether this leg is not needed any more. Prefill's is not once decode has joined; and a
        hand-off that fails while decode has the request, for example in its queue, is decode's to
        make good or to fail, by its policy."""
        if leg is not Leg.PREFILL:
            return False
        is_decodes = isinstance(error, HandOffFailed) and self._legs.is_running(Leg.DECODE)
        return self._legs.has_joined or is_decodes

    def _take_joined(self, joined: Joined) -> None:
        self._joined = joined
        if self._legs.placement.is_whole:
            return
        self._hand_off_s = self._legs.running_s(Leg.DECODE)
        self._metrics.hand_off_s.observe(self._hand_off_s)
        self._metrics.hand_off_bytes.labels(joined.transport).inc(joined.imported_bytes)

    def _take_tokens(self, tokens: Tokens) -> None:
        num_before = self._output.num_tokens
        self._output.add(tokens)
        num_new = self._output.num_tokens - num_before
        self._metrics.output_tokens.inc(num_new)
        self._story.record.output_tokens = self._output.num_tokens
        if tokens.step is not None and num_new:
            # Counted as the worker counts a step that its last token cut short.
            num_accepted = min(tokens.step.accepted_tokens, num_new)
            self._drafts = self._drafts.add_step(tokens.step.drafted_tokens, num_accepted, num_new)
        if self._first_token_s is None and self._output.num_tokens:
            now_s = self._loop.time()
            self._first_token_s = now_s - self._story.arrival_s
            self._story.record.first_token_s = self._first_token_s
            self._prefill_s = self._legs.running_s(Leg.PREFILL)
            self._metrics.queued.dec()
            self._metrics.first_token_s.observe(self._first_token_s)
            self._metrics.prefill_s.observe(self._prefill_s)

    def _take_finished(self, leg: Leg, finished: Finished) -> None:
        self._usages[leg] = finished.usage
        if leg is not Leg.PREFILL:
            if finished.reason is None:
                raise InternalError("decode ended without a reason", leg=leg.value)
            self._output.end(finished.reason)
        elif not self._output.is_over and not self._legs.was_started(Leg.DECODE):
            raise InternalError("prefill ended without a hand-off", leg=leg.value)

    async def send_piece(self) -> None:
        """Sends what is new, unless it can go with the last message."""
        piece = self._output.take()
        if piece is None:
            return
        self._observe_gap(piece)
        if self._output.is_over and self._unsent is None:
            self._unsent = piece
        else:
            await self._story.send(self._response(piece))

    async def send_finish(self) -> None:
        """Sends the last message."""
        usage = self._usage()
        self._metrics.observe_usage(usage)
        total_s = self._loop.time() - self._story.arrival_s
        self._metrics.request_s.observe(total_s)
        response = self._response(self._unsent)
        assert self._output.reason is not None
        finish = response.finish
        finish.reason = finish_reason_to_message(self._output.reason)
        finish.seed = self._start.sampling.seed
        finish.matched_stop = self._output.matched_stop
        finish.usage.CopyFrom(usage_to_message(usage))
        finish.timing.first_token_s = self._first_token_s or 0.0
        finish.timing.total_s = total_s
        finish.timing.prefill_s = self._prefill_s
        finish.timing.hand_off_s = self._hand_off_s
        if self._joined is not None and self._joined.imported_bytes:
            finish.hand_off.bytes = self._joined.imported_bytes
            finish.hand_off.transport = self._joined.transport
            finish.hand_off.prefill_worker = self._legs.placement.prefill.worker_id
            finish.hand_off.decode_worker = self._legs.placement.decode.worker_id
        self._story.record.is_answered = True
        await self._story.send(response)

    def _response(self, piece: OutputPiece | None) -> generation.GenerateResponse:
        if piece is None:
            return generation.GenerateResponse(
                request_id=self._story.request_id, output_index=self._output.num_tokens
            )
        return generation.GenerateResponse(
            request_id=self._story.request_id,
            output_index=piece.output_index,
            token_ids=piece.token_ids,
            text=piece.text,
            logprobs=[logprobs_to_message(entry) for entry in piece.logprobs],
        )

    def _observe_gap(self, piece: OutputPiece) -> None:
        now_s = self._loop.time()
        if self._sent_s and piece.token_ids:
            self._metrics.observe_tokens(now_s - self._sent_s, len(piece.token_ids))
        self._sent_s = now_s

    def _usage(self) -> Usage:
        """The workers know what was cached, only we what was sent, and of it what was drafted."""
        prefill = self._usages.get(Leg.PREFILL, Usage())
        decode = self._usages.get(Leg.DECODE)
        return Usage(
            prompt_tokens=len(self._start.token_ids),
            output_tokens=self._output.num_tokens,
            cached_tokens=max(prefill.cached_tokens, decode.cached_tokens if decode else 0),
            drafts=self._drafts,
        )
