"""The story of a request, from what the client sent to its last message.

Validate, tokenise, find a pair of workers. Start prefill; when it has begun to export the prompt's
KV, start decode with the handle. Tokens of both legs become one output, streamed as it grows. When
a worker refuses or loses the request, others go on from the tokens that are there: the client sees
neither a repeat nor a gap. The end, an error, a deadline or the client's leaving ends both legs on
their workers. What happens in between, event by event, is in `control_plane.request_run`.

Of several choices each is served so, on workers of its own; `control_plane.choices` makes them one
stream.

The gateway calls `RequestFlow.serve` once per request; all time here is the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace

from control_plane.attempts import Attempts, LegFailed
from control_plane.choices import OneStream, Send
from control_plane.degradation import Degradation
from control_plane.detokenizer import OutputText
from control_plane.legs import Legs
from control_plane.model_limits import ModelLimits
from control_plane.output import Output
from control_plane.request_log import RequestRecord
from control_plane.request_run import Run, Story
from control_plane.router.pool import WorkerPool
from control_plane.router.prefixes import NO_PREFIX, PromptPrefix
from control_plane.router.snapshot import Need
from control_plane.tokenizer import ModelTokenizer
from control_plane.turns import Turns
from control_plane.validation import ValidRequest, check_lengths, validate
from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    HocketError,
    InternalError,
    InvalidRequest,
)
from hocket.request_params import StoppingParams
from hocket.rpc import generation_pb2 as generation
from hocket.telemetry import GatewayMetrics
from hocket.types import Leg, RequestKey, StartRequest

logger = logging.getLogger(__name__)

# From here on hashing takes a good part of a millisecond.
LONG_PROMPT_TOKENS = 8192


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
        loop = asyncio.get_running_loop()
        self._turns = Turns(loop)
        self._degradation = Degradation(metrics, loop.time)

    async def serve(
        self,
        message: generation.GenerateRequest,
        limits: ModelLimits,
        timeout_s: float,
        send: Send,
    ) -> None:
        """Answers one request through `send`; the last message of each choice has `finish`.

        Raises HocketError for everything that ends a request before its time. When the caller is
        cancelled (the client left), both legs are.
        """
        arrival_s = asyncio.get_running_loop().time()
        record = RequestRecord(message.request_id or uuid.uuid4().hex)
        stream = OneStream(send, max(1, message.n), record)
        story = Story(record, arrival_s, timeout_s, stream.send)
        outcome, fault = InternalError.reason, ""
        self._metrics.in_flight.inc()
        try:
            async with asyncio.timeout_at(story.deadline_s):
                await self._serve(message, limits, story, stream)
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
            total_s = asyncio.get_running_loop().time() - arrival_s
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(outcome).inc()
            if outcome == "OK":
                self._metrics.request_s.observe(total_s)
            record.ended(outcome, total_s, fault)

    async def _serve(
        self,
        message: generation.GenerateRequest,
        limits: ModelLimits,
        story: Story,
        stream: OneStream,
    ) -> None:
        request = validate(message, limits)
        if not request.has_seed:
            request = replace(request, sampling=replace(request.sampling, seed=self._new_seed()))
        token_ids = await self._tokenizer.tokenize(request.prompt, limits.most_prompt_tokens)
        max_tokens = check_lengths(len(token_ids), request, limits)
        num_choices = request.num_choices
        # Every choice reads the prompt, as far as it is not cached by then.
        self._metrics.observe_arrival(num_choices * len(token_ids))
        story.record.prompt_tokens = len(token_ids)
        need = Need(len(token_ids), max_tokens, prefix=await self._prefix(token_ids))
        start = self._start_request(request, story, token_ids, max_tokens)
        runs = [self._run(request, story, start, choice) for choice in range(num_choices)]

        async def serve(run: Run) -> None:
            if run is not runs[0] and need.prefix is not NO_PREFIX:
                # By then there is a worker that has the prompt cached.
                await runs[0].has_token.wait()
            attempts = Attempts(self._pool, need)
            with run:
                await self._follow(run, attempts, story)
            await run.send_finish()

        await stream.serve([serve(run) for run in runs])

    async def _prefix(self, token_ids: tuple[int, ...]) -> PromptPrefix:
        """The prompt's blocks, hashed already, as far as any worker can make use of it. A long
        prompt is hashed aside."""
        prefix = PromptPrefix(token_ids)
        sizes = {w.block_tokens for w in self._pool.workers() if w.has_prefix_cache}
        if not sizes:
            return NO_PREFIX
        for block_tokens in sizes:
            if len(token_ids) < LONG_PROMPT_TOKENS:
                prefix.hashes(block_tokens)
            else:
                await asyncio.to_thread(prefix.hashes, block_tokens)
        return prefix

    async def _follow(self, run: Run, attempts: Attempts, story: Story) -> None:
        """Both legs to the end of the output, on other workers when one loses the request."""
        while True:
            placement = attempts.placement
            story.record.placed(placement)
            if run.needs_prompt_logprobs:  # workers read all of a prompt for them
                placement = replace(placement, promised_tokens=0)
            placed = (placement, attempts.need, story.deadline_s)
            try:
                with Legs(self._pool, self._turns, *placed) as legs:
                    await run.follow(legs, attempts.number)
                return
            except LegFailed as failed:
                attempts.next(failed, num_emitted=run.num_tokens)
                reason = failed.error.reason
            self._metrics.replacements.labels(reason).inc()
            if run.num_tokens:
                self._metrics.migrations.inc()
            extra = {
                "request_id": story.request_id,
                "attempt": attempts.number,
                "reason": reason,
                "output_tokens": run.num_tokens,
            }
            logger.info("request placed again", extra=extra)

    def _start_request(
        self, request: ValidRequest, story: Story, token_ids: tuple[int, ...], max_tokens: int
    ) -> StartRequest:
        """The first attempt's prefill leg of choice 0; decode's differs in leg and handle."""
        stop_token_ids = request.stop_token_ids
        if not request.ignore_eos:
            stop_token_ids |= self._tokenizer.end_token_ids
        return StartRequest(
            key=_new_key(story),
            token_ids=token_ids,
            sampling=request.sampling,
            stopping=StoppingParams(max_tokens, stop_token_ids, request.min_tokens),
            leg=Leg.PREFILL,
            deadline_s=story.timeout_s,
            max_draft_tokens=request.max_draft_tokens,
        )

    def _run(self, request: ValidRequest, story: Story, start: StartRequest, choice: int) -> Run:
        """One choice, which has a key and noise of its own; the logprobs of the prompt, which are
        the same for all, are told by choice 0."""
        if choice:
            sampling = replace(start.sampling, choice=choice, prompt_logprobs=None)
            start = replace(start, key=_new_key(story), sampling=sampling)
        text = OutputText(
            self._tokenizer.backend, request.stop_strings, include_stop=request.include_stop
        )
        output = Output(text, start.stopping)
        return Run(story, output, start, self._metrics, self._degradation)


def _new_key(story: Story) -> RequestKey:
    """Clients may use an id twice at a time; workers may not see it twice."""
    return RequestKey(f"{story.request_id}.{uuid.uuid4().hex[:12]}")
