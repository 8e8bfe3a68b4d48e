"""The whole engine in one process: no hand-off, no network, no scheduler to speak of.

It is the reference that the disaggregated path must equal token for token, and what benchmarks
drive. It shares `ModelRunner` with the workers and keeps only the plainest continuous batching: a
request is admitted when blocks for its prompt and whole output are free, prompts are computed in
chunks, everything that is prefilled decodes together. With a prefix cache a prompt starts behind
the blocks that earlier requests computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from hocket.errors import InvalidRequest
from hocket.execution.drafting.speculation import DraftSource, MTPDraftSource
from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import NoPrefixCache, Prefix, PrefixCache, PrefixCaching
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.draft_controller import (
    DraftBatch,
    DraftController,
    fixed_drafts,
)
from hocket.types import FinishReason, RequestKey, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """One prompt. `num_drafts` None takes the engine's; `key` names it for a draft source; requests
    of different `tenant_salt` share no cached prefix; `grammar` is what `sampling.grammar` was
    compiled to."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    num_drafts: int | None = None
    key: RequestKey | None = None
    tenant_salt: bytes = b""
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True, slots=True)
class LocalResult:
    """One finished output; `logprobs` is empty or one per token, `prompt_logprobs` begin with the
    second token of the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class _Running:
    """A request with blocks: what it has put out so far."""

    index: int
    sequence: Sequence
    num_drafts: int
    prefix: Prefix
    cached_tokens: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class LocalEngineLimits:
    """`num_drafts` is k, the drafts per step, 0 = off; the rest bounds memory and step size."""

    num_blocks: int = 256
    num_drafts: int = 0
    max_batch: int = 32
    chunk_tokens: int = 512
    prefix_cache: bool = False


class LocalEngine:
    """Runs requests to their end on one model. Not thread-safe.

    `draft_source` replaces the model's own MTP module (tests, benchmarks). `drafts` decides each
    step how many of a request's drafts are worth their time; None: always all. Raises ConfigError
    when drafts are wanted of a checkpoint that has none.
    """

    def __init__(
        self,
        model: Transformer,
        limits: LocalEngineLimits | None = None,
        draft_source: DraftSource | None = None,
        drafts: DraftController | None = None,
    ) -> None:
        self.limits = limits or LocalEngineLimits()
        self.cache = PagedCache(model.kv_layout(), self.limits.num_blocks, model.device)
        if draft_source is None and self.limits.num_drafts > 0:
            draft_source = MTPDraftSource(model, self.cache)
        self.runner = ModelRunner(model, self.cache, draft_source)
        self.drafts = drafts or fixed_drafts(self.limits.num_drafts)
        self.prefixes: PrefixCaching = NoPrefixCache()
        if self.limits.prefix_cache:
            self.prefixes = PrefixCache(self.cache.pool, "", self.cache.layout.block_tokens)

    def generate(self, requests: Seq[LocalRequest]) -> list[LocalResult]:
        """Run all requests to their end; results in the order of the requests.

        Raises InvalidRequest for a request that could never be admitted.
        """
        for request in requests:
            self._check(request)
        waiting = deque(enumerate(requests))
        running: list[_Running] = []
        results: dict[int, LocalResult] = {}
        while waiting or running:
            while waiting and len(running) < self.limits.max_batch:
                admitted = self._admit(*waiting[0])
                if admitted is None:
                    break
                waiting.popleft()
                running.append(admitted)
            self._step(running)
            self._share_complete_blocks(running)
            for request in [r for r in running if r.finish_reason is not None]:
                running.remove(request)
                self.cache.pool.free(request.sequence.block_table)
                results[request.index] = _result(request)
        return [results[index] for index in range(len(requests))]

    def _step(self, running: list[_Running]) -> None:
        """One prefill step if a prompt is unfinished, then one decode step of the others."""
        decoding = [r for r in running if r.sequence.is_prefilled and r.sequence.output_tokens > 0]
        self._prefill([r for r in running if r not in decoding])
        if not decoding:
            return
        sequences = [r.sequence for r in decoding]
        batch = DraftBatch(
            [sequence.key for sequence in sequences],
            lambda i: self.runner.draft_request(sequences[i], decoding[i].num_drafts),
        )
        outputs = self.runner.decode(sequences, self.drafts.allot(batch))
        if (times := self.runner.last_step) is not None:
            self.drafts.observe_step(times)
        for request, output in zip(decoding, outputs, strict=True):
            request.logprobs += output.logprobs
            request.finish_reason = output.finish_reason
            self.drafts.observe(request.sequence.key, output.num_drafted, output.num_accepted)
            if request.finish_reason is not None:
                self.drafts.forget(request.sequence.key)

    def _prefill(self, prompts: list[_Running]) -> None:
        budget = self.limits.chunk_tokens
        chunks: list[tuple[_Running, PrefillChunk]] = []
        for request in prompts:
            left = request.sequence.num_tokens - request.sequence.num_computed
            num_tokens = min(left, budget)
            if num_tokens > 0:
                chunks.append((request, PrefillChunk(request.sequence, num_tokens)))
                budget -= num_tokens
        if not chunks:
            return
        firsts = self.runner.prefill([chunk for _, chunk in chunks])
        for (request, _), first in zip(chunks, firsts, strict=True):
            if first is not None:
                request.logprobs += [first.logprobs] if first.logprobs is not None else []
                request.finish_reason = first.finish_reason

    def _num_blocks(self, request: LocalRequest) -> int:
        tokens = len(request.token_ids) + request.stopping.max_tokens
        return self.cache.layout.blocks_for(tokens)

    def _check(self, request: LocalRequest) -> None:
        if not request.token_ids:
            raise InvalidRequest("token_ids", (), "at least one token")
        tokens = len(request.token_ids) + request.stopping.max_tokens
        room = self.limits.num_blocks * self.cache.layout.block_tokens
        limit = min(room, self.runner.model.config.max_position_embeddings)
        if tokens > limit:
            raise InvalidRequest("prompt + max_tokens", tokens, f"at most {limit} tokens")

    def _admit(self, index: int, request: LocalRequest) -> _Running | None:
        """Takes blocks for prompt and output, cached ones first; None when too few are free."""
        pool, size = self.cache.pool, self.cache.layout.block_tokens
        prefix = self.prefixes.prefix(
            request.token_ids, request.tenant_salt, request.sampling.prompt_logprobs is not None
        )
        hits = self.prefixes.look_up(prefix)
        num_new = self._num_blocks(request) - hits.num_blocks
        if num_new + hits.num_free > pool.num_free:
            return None
        shared = self.prefixes.claim(prefix)
        sequence = Sequence(
            key=request.key or RequestKey(f"local-{index}"),
            token_ids=list(request.token_ids),
            prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            block_table=shared + pool.allocate(num_new),
            num_computed=self.runner.start_behind(len(shared) * size),
            num_shared=len(shared) * size,
            grammar=request.grammar,
        )
        num_drafts = self.limits.num_drafts if request.num_drafts is None else request.num_drafts
        return _Running(index, sequence, num_drafts, prefix, sequence.num_computed)

    def _share_complete_blocks(self, running: list[_Running]) -> None:
        for request in running:
            sequence = request.sequence
            self.prefixes.index(
                request.prefix, sequence.token_ids, sequence.block_table, sequence.num_complete
            )


def _result(request: _Running) -> LocalResult:
    sequence = request.sequence
    assert request.finish_reason is not None
    return LocalResult(
        token_ids=tuple(sequence.token_ids[sequence.prompt_tokens :]),
        logprobs=tuple(request.logprobs),
        finish_reason=request.finish_reason,
        usage=Usage(
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=sequence.output_tokens,
            cached_tokens=request.cached_tokens,
            drafts=sequence.drafts,
        ),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
    )
