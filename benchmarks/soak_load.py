"""What the clients of `soak.py` ask, when they leave, and what they got.

`make_wishes` draws everything at random from one seed. `Clients` ask the gateway over gRPC, a fixed
number at a time, and ask again when a worker died under a request, as a client would. Next:
`soak_report.py` compares what they got with the engine in one process.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from decode_workloads import docstring_tokens

from hocket.errors import HocketError, InternalError
from hocket.request_params import SamplingParams
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.clients import GenerationClient
from hocket.types import FinishReason

MAX_TRIES = 20
TRY_AGAIN_S = 0.5
REQUEST_TIMEOUT_S = 120.0

_PROMPT_TOKENS = (1, 1500)
_OUTPUT_TOKENS = (1, 64)
_NUM_BEGINNINGS = 6
_BEGINNING_TOKENS = 320
_SHARED_SHARE = 0.3
_SECONDS_TO_CANCEL = 1.5
_FINISH_REASONS = {
    generation.FINISH_REASON_STOP: FinishReason.STOP,
    generation.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class Cancel:
    """When the client leaves: after so many seconds, or with so many tokens, whichever is first."""

    after_s: float = math.inf
    after_tokens: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Wish:
    """One request. `num_drafts` None leaves drafting to the server; `cancel` None: the client
    stays."""

    number: int
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    ignore_eos: bool
    num_drafts: int | None
    cancel: Cancel | None

    def message(self) -> generation.GenerateRequest:
        """For the gateway."""
        request = generation.GenerateRequest(max_draft_tokens=self.num_drafts)
        request.token_ids.ids.extend(self.token_ids)
        request.sampling.temperature = self.sampling.temperature
        request.sampling.top_k = self.sampling.top_k
        request.sampling.top_p = self.sampling.top_p
        request.sampling.seed = self.sampling.seed
        request.stopping.max_tokens = self.max_tokens
        request.stopping.ignore_eos = self.ignore_eos
        return request


@dataclass(slots=True)
class Try:
    """One call: its tokens so far, and how it ended: "completed", "cancelled" by us, or "failed"
    with the error's `reason` and words. Seconds on the run's clock."""

    began_s: float
    token_ids: list[int] = field(default_factory=list[int])
    end: str = ""
    ended_s: float = 0.0
    finish_reason: FinishReason | None = None
    output_tokens: int = 0
    reason: str = ""
    error: str = ""
    is_retryable: bool = False


@dataclass(slots=True)
class Outcome:
    """All tries of one wish, in order."""

    number: int
    tries: list[Try] = field(default_factory=list[Try])

    @property
    def end(self) -> str:
        return self.tries[-1].end if self.tries else ""


def make_wishes(count: int, cancel_share: float, seed: int) -> list[Wish]:
    """Text of this repository's docstrings, lengths spread evenly over their orders of magnitude;
    some prompts begin alike, so that a prefix cache has something to find."""
    chance = random.Random(seed)
    texts = docstring_tokens()
    beginnings = [_text(chance, texts, _BEGINNING_TOKENS) for _ in range(_NUM_BEGINNINGS)]
    return [_make_wish(number, chance, texts, beginnings, cancel_share) for number in range(count)]


def _make_wish(
    number: int,
    chance: random.Random,
    texts: Sequence[int],
    beginnings: Sequence[tuple[int, ...]],
    cancel_share: float,
) -> Wish:
    token_ids = _text(chance, texts, _spread(chance, *_PROMPT_TOKENS))
    if chance.random() < _SHARED_SHARE:
        token_ids = (chance.choice(beginnings) + token_ids)[: _PROMPT_TOKENS[1]]
    sampling = SamplingParams(temperature=0.0)
    if chance.random() < 0.5:
        sampling = SamplingParams(
            temperature=chance.choice([0.5, 0.9, 1.3]),
            top_k=chance.choice([0, 40]),
            top_p=chance.choice([1.0, 0.9]),
            seed=chance.randrange(1 << 32),
        )
    max_tokens = _spread(chance, *_OUTPUT_TOKENS)
    cancel = None
    if chance.random() < cancel_share:
        cancel = Cancel(after_s=chance.uniform(0, _SECONDS_TO_CANCEL))
        if chance.random() < 0.5:
            cancel = Cancel(after_tokens=chance.randint(1, max_tokens))
    return Wish(
        number=number,
        token_ids=token_ids,
        max_tokens=max_tokens,
        sampling=sampling,
        ignore_eos=chance.random() < 0.5,
        num_drafts=chance.choice([None, None, 0, 1]),
        cancel=cancel,
    )


def _text(chance: random.Random, texts: Sequence[int], length: int) -> tuple[int, ...]:
    start = chance.randrange(len(texts) - length)
    return tuple(texts[start : start + length])


def _spread(chance: random.Random, least: int, most: int) -> int:
    return round(math.exp(chance.uniform(math.log(least), math.log(most))))


class Clients:
    """Asks for all wishes in order, `concurrency` at a time. `num_ended` grows meanwhile; any
    thread may read it."""

    def __init__(self, address: str, wishes: Sequence[Wish], began_s: float) -> None:
        """`began_s`: `time.monotonic()` at second 0 of the run's clock."""
        self.num_ended = 0
        self._address = address
        self._wishes = wishes
        self._began_s = began_s

    async def run(self, concurrency: int) -> list[Outcome]:
        """What became of the wishes, in their order."""
        outcomes = [Outcome(wish.number) for wish in self._wishes]
        waiting = iter(zip(self._wishes, outcomes, strict=True))
        client = GenerationClient(self._address)

        async def ask_on() -> None:
            for wish, outcome in waiting:
                await self._ask(client, wish, outcome)
                self.num_ended += 1

        try:
            await asyncio.gather(*(ask_on() for _ in range(concurrency)))
        finally:
            await client.close()
        return outcomes

    async def _ask(self, client: GenerationClient, wish: Wish, outcome: Outcome) -> None:
        """Until it ends otherwise than by an error that invites to ask again."""
        for number in range(MAX_TRIES):
            if number:
                await asyncio.sleep(TRY_AGAIN_S)
            one = Try(began_s=self._now_s())
            outcome.tries.append(one)
            try:
                await self._try(client, wish, one)
            except HocketError as error:
                one.end, one.reason, one.error = "failed", error.reason, str(error)
                one.is_retryable = error.is_retryable
            one.ended_s = self._now_s()
            if one.end != "failed" or not one.is_retryable:
                return

    async def _try(self, client: GenerationClient, wish: Wish, one: Try) -> None:
        """One call, left early as the wish says. Raises HocketError."""
        cancel = wish.cancel or Cancel()
        after_s = None if math.isinf(cancel.after_s) else cancel.after_s
        stream: Any = client.generate(wish.message(), timeout_s=REQUEST_TIMEOUT_S)
        one.end = "cancelled"
        try:
            async with asyncio.timeout(after_s):
                async for response in stream:
                    if response.token_ids and response.output_index != len(one.token_ids):
                        told = f"token {response.output_index} after {len(one.token_ids)} tokens"
                        raise InternalError(f"The gateway sent {told}.")
                    one.token_ids += response.token_ids
                    if response.HasField("finish"):
                        one.finish_reason = _FINISH_REASONS.get(response.finish.reason)
                        one.output_tokens = response.finish.usage.output_tokens
                        one.end = "completed"
                    elif len(one.token_ids) >= cancel.after_tokens:
                        return
        except TimeoutError:
            pass  # The client leaves.
        finally:
            await stream.aclose()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s
