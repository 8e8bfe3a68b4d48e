"""What a worker can never serve, said before it is queued: the same check in both workers.

A request that can never fit must not stand at the head of a queue; it is refused with the value
and the limit. The gateway checks the same against the model; a worker also against its own pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import InvalidRequest
from hocket.types import Leg, StartRequest


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_tokens)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The sizes that bound one request on one worker.

    max_context_tokens: prompt and output together.
    vocabulary_size: token ids lie below it.
    num_blocks, block_tokens: the worker's whole KV pool.
    """

    max_context_tokens: int
    vocabulary_size: int
    num_blocks: int
    block_tokens: int

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: one output token must fit into the context with it."""
        return min(self.max_context_tokens - 1, self.num_blocks * self.block_tokens)

    def blocks_needed(self, request: StartRequest) -> int:
        """KV blocks the leg takes: the prompt's on prefill, the output's too where it decodes."""
        decodes = request.leg is not Leg.PREFILL
        return self.blocks_for_output(request, request.stopping.max_tokens if decodes else 0)

    def blocks_for_output(self, request: StartRequest, num_tokens: int) -> int:
        """KV blocks for the prompt and `num_tokens` of output."""
        return blocks_for(len(request.token_ids) + num_tokens, self.block_tokens)

    def check(self, request: StartRequest) -> None:
        """Raises:
        InvalidRequest: the request can never be served here.
        """
        num_tokens, max_tokens = len(request.token_ids), request.stopping.max_tokens
        if not 1 <= num_tokens <= self.max_prompt_tokens:
            limit = f"1 to {self.max_prompt_tokens} tokens, what this worker can hold"
            raise InvalidRequest("prompt_tokens", num_tokens, limit, "Send a shorter prompt.")
        if max_tokens < 1 or num_tokens + max_tokens > self.max_context_tokens:
            limit = (
                f"1 to {self.max_context_tokens - num_tokens}: prompt ({num_tokens} tokens) and "
                f"output share a context of {self.max_context_tokens}"
            )
            raise InvalidRequest("max_tokens", max_tokens, limit)
        if (needed := self.blocks_needed(request)) > self.num_blocks:
            limit = (
                f"at most {self.num_blocks * self.block_tokens - num_tokens}: prompt and output "
                f"need {needed} KV blocks, the worker has {self.num_blocks}"
            )
            raise InvalidRequest("max_tokens", max_tokens, limit)
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self.vocabulary_size:
            bad = next(t for t in request.token_ids if not 0 <= t < self.vocabulary_size)
            raise InvalidRequest("token_ids", bad, f"0 to {self.vocabulary_size - 1}")
