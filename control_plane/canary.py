"""A canary: a small request of the gateway's own, all the way through workers that are new.

It goes as clients' requests go, prompt, hand-off, tokens, end (`control_plane.legs`), and its whole
stream is read: what stops it would stop the first client. It stays below the doors: no metric or
log line of requests counts it. Its prompt is a few random tokens, less than a block and salted, so
that no cache can answer for the KV path. `control_plane.readiness` decides who gets one.
"""

from __future__ import annotations

import asyncio
import secrets

from control_plane.legs import LegEvent, Legs
from control_plane.router.snapshot import Need, Placement
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import (
    Begun,
    ExportHandle,
    Failed,
    Finished,
    Joined,
    Leg,
    PromptLogprobs,
    RequestKey,
    StartRequest,
    Tokens,
)

# As far as the workers' limits allow; one token of output alone would need no hand-off.
PROMPT_TOKENS = 4
OUTPUT_TOKENS = 3


class CanaryFailed(Exception):
    """It did not come through. The words name the worker, its address, and what it did not do."""


def canary_need(placement: Placement) -> Need:
    """The length of the canary for these workers, in tokens."""
    most = placement.decode.max_context_tokens
    prompt_tokens = min(PROMPT_TOKENS, placement.prefill.max_prompt_tokens, most - OUTPUT_TOKENS)
    prompt_tokens = max(prompt_tokens, 1)
    return Need(prompt_tokens, max(1, min(OUTPUT_TOKENS, most - prompt_tokens)))


class Canary:
    """One that is on its way from here on; `arrive` reads it to its end."""

    def __init__(self, legs: Legs, need: Need, *, vocabulary_size: int, timeout_s: float) -> None:
        """`legs` are of the workers that it goes through, and not yet started."""
        self._legs = legs
        self._need = need
        self._timeout_s = timeout_s
        self._export: ExportHandle | None = None
        self._joined: Joined | None = None
        self._token_ids: dict[int, int] = {}
        token_ids = tuple(secrets.randbelow(vocabulary_size) for _ in range(need.prompt_tokens))
        request = StartRequest(
            key=RequestKey(f"canary.{secrets.token_hex(12)}"),
            token_ids=token_ids,
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(need.max_tokens),
            leg=Leg.PREFILL,
            deadline_s=timeout_s,
            tenant_salt=secrets.token_bytes(16),
        )
        legs.start(request)

    async def arrive(self) -> None:
        """Reads all that its workers say. Raises CanaryFailed."""
        try:
            with self._legs:
                async with asyncio.timeout(self._timeout_s):
                    while self._is_running:
                        for item in await self._legs.events():
                            self._take(item)
        except TimeoutError:
            raise CanaryFailed(f"{self._missing()} within {self._timeout_s:g} s") from None
        self._check_whole()

    @property
    def _is_running(self) -> bool:
        """Every leg ends by itself: one that would need a cancel has not been read to its end."""
        return self._legs.is_running(Leg.PREFILL) or self._legs.is_running(Leg.DECODE)

    def _take(self, item: LegEvent) -> None:
        match item.event:
            case Begun(export=export):
                self._export = export
                if self._need.max_tokens > 1:
                    self._legs.start_decode(export)
            case Joined():
                self._joined = item.event
            case Tokens(output_index=first, token_ids=token_ids):
                for index, token_id in enumerate(token_ids, first):
                    if self._token_ids.setdefault(index, token_id) != token_id:
                        raise CanaryFailed(f"{self._pair()} differ about output token {index}")
            case Failed(message=message):
                raise CanaryFailed(f"{self._worker_of(item.leg)}: {message}")
            case Finished() | PromptLogprobs():
                pass

    def _check_whole(self) -> None:
        """All tokens are there, and the KV was really handed over. Raises CanaryFailed."""
        expected = self._need.max_tokens
        if sorted(self._token_ids) != list(range(expected)):
            raise CanaryFailed(f"{self._decode()} ended without all of {expected} tokens")
        joined = self._joined
        if self._legs.placement.is_whole or expected == 1:
            return
        if joined is None:
            raise CanaryFailed(f"{self._decode()} ended without having joined")
        if joined.recomputed:
            text = f"{self._decode()} had to compute the prompt itself: its KV did not come from"
            why = joined.recompute_reason or "it does not say why"
            raise CanaryFailed(f"{text} {self._exporter()}: {why}")
        if not joined.imported_bytes:
            raise CanaryFailed(f"{self._decode()} imported no bytes from {self._exporter()}")

    def _missing(self) -> str:
        """What has not happened in time."""
        if not self._legs.placement.is_whole:
            if self._export is None and not self._token_ids:
                return f"{self._worker_of(Leg.PREFILL)} has not begun"
            if self._joined is None and self._need.max_tokens > 1:
                return f"{self._decode()} has not got the KV of {self._exporter()}"
        return f"{self._decode()} has not answered"

    def _exporter(self) -> str:
        """Prefill, at the address that it tells decode: where the KV must come from."""
        prefill = self._legs.placement.prefill
        address = self._export.address if self._export is not None else prefill.address
        return f"{prefill.worker_id} at {address}"

    def _decode(self) -> str:
        return self._worker_of(Leg.DECODE)

    def _worker_of(self, leg: Leg) -> str:
        placement = self._legs.placement
        worker = placement.prefill if leg is Leg.PREFILL else placement.decode
        return f"{worker.worker_id} at {worker.address}"

    def _pair(self) -> str:
        return f"{self._worker_of(Leg.PREFILL)} and {self._decode()}"
