"""One choice of a request while it is served: events of its workers in, messages out.

`request_flow` starts a `Run` when the prompt is known and has it follow the legs of one attempt
after the other. What the client has seen stays: a later attempt begins where the output stands,
with what was put out so far as part of its prompt.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from control_plane.attempts import LegFailed
from control_plane.choices import Send
from control_plane.degradation import Degradation
from control_plane.legs import LegEvent, Legs
from control_plane.output import Output, OutputPiece
from control_plane.prompt_logprobs import PromptLogprobsInOrder
from control_plane.request_log import RequestRecord
from hocket.errors import HandOffFailed, HocketError, InternalError
from hocket.request_params import StoppingParams
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
    PromptLogprobs,
    StartRequest,
    Tokens,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Story:
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


class Run:
    """A choice that is being served: events in, messages out."""

    def __init__(
        self,
        story: Story,
        output: Output,
        start: StartRequest,
        metrics: GatewayMetrics,
        degradation: Degradation,
    ) -> None:
        """`start` is the first attempt's prefill leg."""
        self.has_token = asyncio.Event()
        self._story = story
        self._output = output
        wants_prompt = start.sampling.prompt_logprobs is not None
        self._prompt = PromptLogprobsInOrder(len(start.token_ids) - 1 if wants_prompt else 0)
        self._is_first_choice = start.sampling.choice == 0
        self._first = self._start = start
        self._metrics = metrics
        self._degradation = degradation
        self._loop = asyncio.get_running_loop()
        self._joined: Joined | None = None
        self._is_synthetic = False
        self._usages: dict[Leg, Usage] = {}
        self._cached_tokens: int | None = None
        self._drafts = DraftCounts()
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        self._hand_off_s = 0.0
        self._sent_s = 0.0
        self._unsent: OutputPiece | None = None

    def __enter__(self) -> Run:
        self._metrics.queued.inc(self._is_first_choice)
        return self

    def __exit__(self, *error: object) -> None:
        if self._first_token_s is None:
            self._metrics.queued.dec(self._is_first_choice)

    async def follow(self, legs: Legs, attempt: int) -> None:
        """Starts the legs and goes with them to the end of the output.

        Raises LegFailed when a worker gives the request up.
        """
        if self.num_tokens and self._cached_tokens is None:
            # Usage is of the attempt that read the client's prompt; later ones repeat its work.
            self._cached_tokens = self._count_cached()
        self._legs, self._joined, self._usages = legs, None, {}
        self._is_synthetic |= legs.placement.decode.synthetic_acceptance > 0
        self._output.drop_early()
        self._start = self._what_is_left(attempt)
        legs.start(self._start)
        while not self.is_over:
            for item in await legs.events():
                self.take(item)
            is_running = legs.is_running(Leg.PREFILL) or legs.is_running(Leg.DECODE)
            if self.needs_prompt_logprobs and not is_running:
                raise InternalError("not all logprobs of the prompt have come")
            await self.send_news()

    def _what_is_left(self, attempt: int) -> StartRequest:
        """The output so far is part of the prompt. Seed and positions are the same, so that the
        next token is the one that the earlier attempt would have chosen, where workers are
        batch-invariant; else it is drawn from the same distribution."""
        first, emitted = self._first, self._output.token_ids
        stopping = first.stopping.after(len(emitted))
        if self._output.is_over:  # only logprobs of the prompt are missing
            emitted, stopping = (), StoppingParams(max_tokens=1)
        prompt_logprobs = first.sampling.prompt_logprobs if self.needs_prompt_logprobs else None
        return replace(
            first,
            key=replace(first.key, attempt=attempt),
            token_ids=first.token_ids + emitted,
            sampling=replace(first.sampling, prompt_logprobs=prompt_logprobs),
            stopping=stopping,
            generated_tokens=len(emitted),
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt were asked for and have not all come."""
        return not self._prompt.is_complete

    @property
    def num_tokens(self) -> int:
        """Tokens of the output so far."""
        return self._output.num_tokens

    @property
    def is_over(self) -> bool:
        """The output is, and decode has ended by itself, so that it needs no cancel.

        An output that ended with its first token (of this attempt) or at a stop string waits for
        nobody but logprobs of the prompt.
        """
        if not self._output.is_over or self.needs_prompt_logprobs:
            return False
        is_cut = bool(self._output.matched_stop)
        is_cut = is_cut or self.num_tokens <= self._start.generated_tokens + 1
        return is_cut or not self._legs.is_running(Leg.DECODE)

    def take(self, item: LegEvent) -> None:
        """Takes the next event of either leg. Raises LegFailed, or InternalError for nonsense."""
        match item.event:
            case Begun(export=export):
                if self._start.stopping.max_tokens > 1 and not self._output.is_over:
                    self._legs.start_decode(export)
            case Tokens():
                self._take_tokens(item.leg, item.event)
            case PromptLogprobs():
                self._prompt.add(item.event)
            case Joined():
                self._take_joined(item.event)
            case Finished():
                self._take_finished(item.leg, item.event)
            case Failed():
                error = error_from_failed(item.event)
                if not self._is_done(item.leg, error):
                    raise LegFailed(item.leg, error)

    def _is_done(self, leg: Leg, error: HocketError) -> bool:
        """Whether this leg is not needed any more. Prefill's is not once decode has joined; and a
        hand-off that fails while decode has the request, for example in its queue, is decode's to
        make good or to fail, by its policy."""
        has_joined = self._legs.has_joined
        if self._output.is_over or (leg is Leg.PREFILL and has_joined):
            return not self.needs_prompt_logprobs
        is_decodes = isinstance(error, HandOffFailed) and self._legs.is_running(Leg.DECODE)
        return leg is Leg.PREFILL and is_decodes

    def _take_joined(self, joined: Joined) -> None:
        self._joined = joined
        placement = self._legs.placement
        if placement.is_whole:
            self._degradation.found(placement, joined.cached_tokens)
            return
        self._hand_off_s = self._legs.running_s(Leg.DECODE)
        if joined.recomputed:
            self._degradation.recomputed(placement, joined.recompute_reason)
            return
        self._metrics.hand_off_s.observe(self._hand_off_s)
        self._metrics.hand_off_bytes.labels(joined.transport).inc(joined.imported_bytes)

    def _take_tokens(self, leg: Leg, tokens: Tokens) -> None:
        num_before = self._output.num_tokens
        self._add_tokens(leg, tokens)
        num_new = self._output.num_tokens - num_before
        self._metrics.output_tokens.inc(num_new)
        self._story.record.output_tokens += num_new
        if tokens.step is not None and num_new:
            # Counted as the worker counts a step that its last token cut short.
            num_accepted = min(tokens.step.accepted_tokens, num_new)
            self._drafts = self._drafts.add_step(tokens.step.drafted_tokens, num_accepted, num_new)
        if self._first_token_s is None and self._output.num_tokens:
            self._note_first_token()

    def _add_tokens(self, leg: Leg, tokens: Tokens) -> None:
        try:
            self._output.add(tokens)
        except InternalError as error:
            is_recomputed = self._joined is not None and self._joined.recomputed
            if not is_recomputed or self._legs.placement.decode.fingerprint.is_batch_invariant:
                raise
            # Decode computed the prompt again and, as it may, began in another way.
            if leg is Leg.DECODE:
                raise LegFailed(leg, HandOffFailed(str(error))) from None

    def _note_first_token(self) -> None:
        self._first_token_s = self._loop.time() - self._story.arrival_s
        self._prefill_s = self._legs.running_s(Leg.PREFILL)
        self._metrics.prefill_s.observe(self._prefill_s)
        self.has_token.set()
        if self._is_first_choice:
            self._story.record.first_token_s = self._first_token_s
            self._metrics.queued.dec()
            self._metrics.first_token_s.observe(self._first_token_s)

    def _take_finished(self, leg: Leg, finished: Finished) -> None:
        self._usages[leg] = finished.usage
        if leg is Leg.PREFILL:
            self._degradation.found(self._legs.placement, finished.usage.cached_tokens)
        if leg is not Leg.PREFILL:
            if finished.reason is None:
                raise InternalError("decode ended without a reason", leg=leg.value)
            self._output.end(finished.reason)
        elif not self._output.is_over and not self._legs.was_started(Leg.DECODE):
            raise InternalError("prefill ended without a hand-off", leg=leg.value)

    async def send_news(self) -> None:
        """Sends what is new, unless it can go with the last message. Tokens wait for the logprobs
        of the prompt."""
        for entries in self._prompt.take():
            response = self._response(None)
            response.prompt_logprobs.extend(map(logprobs_to_message, entries))
            await self._story.send(response)
        if self.needs_prompt_logprobs:
            return
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
        joined, placement = self._joined, self._legs.placement
        if joined is not None and not (joined.recomputed or placement.is_whole):
            finish.hand_off.bytes = joined.imported_bytes
            finish.hand_off.transport = joined.transport
            finish.hand_off.prefill_worker = placement.prefill.worker_id
            finish.hand_off.decode_worker = placement.decode.worker_id
        finish.acceptance = self._acceptance()
        await self._story.send(response)

    def _acceptance(self) -> generation.Acceptance:
        if self._is_synthetic:
            return generation.ACCEPTANCE_SYNTHETIC
        if self._first.sampling.acceptance is not None:
            return generation.ACCEPTANCE_TYPICAL
        return generation.ACCEPTANCE_EXACT

    def _response(self, piece: OutputPiece | None) -> generation.GenerateResponse:
        """A message with this piece, or without tokens."""
        piece = piece or OutputPiece(self._output.num_taken, (), "", ())
        return generation.GenerateResponse(
            request_id=self._story.request_id,
            choice=self._first.sampling.choice,
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
        cached_tokens = self._cached_tokens
        return Usage(
            prompt_tokens=len(self._first.token_ids),
            output_tokens=self.num_tokens,
            cached_tokens=self._count_cached() if cached_tokens is None else cached_tokens,
            drafts=self._drafts,
        )

    def _count_cached(self) -> int:
        """Prompt tokens that nobody computed in this attempt: as who computed the others says."""
        joined = self._joined
        if joined is not None and (joined.recomputed or self._legs.placement.is_whole):
            return joined.cached_tokens
        usage = self._usages.get(Leg.PREFILL) or self._usages.get(Leg.DECODE) or Usage()
        return usage.cached_tokens
