"""Run steps: the scheduler's decision in, tokens out. Prefill, decode and local engines share it.

One step is one flat batch through the main model. `prefill` computes a chunk of each given prompt
and, at a prompt's end, samples the first token. `decode` drafts (`speculation.py`), verifies all
sequences' drafts at once, samples (`sampler.py`), keeps the right ones and cuts at the first token
that ends an output. A step that raises leaves every sequence as it was.

MTP entries are made from the target's hidden states only: prefill writes one for every computed
token whose successor is known; decode leaves the newest ones in `Sequence.pending_hidden` for the
next draft pass. A runner without a draft source keeps none after prefill.

Shape letters: T tokens of a flat batch, N sampled rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from hocket.errors import ConfigError, InternalError
from hocket.execution.acceptance import Acceptance
from hocket.execution.damage import refuse_nan
from hocket.execution.passes import Passes
from hocket.execution.sampler import Sampler
from hocket.execution.sequence import Sequence
from hocket.execution.speculation import DraftSource, accept, append_until_finished
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams
from hocket.types import FinishReason, TokenLogprobs

SCORED_ROWS = 64
"""Rows of a prompt whose logits are computed at a time: a vocabulary is wide."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next `num_tokens` uncomputed tokens of a sequence's prompt."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the end of a prompt yields; `hidden_state` [H] is that of the last prompt position."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    hidden_state: Tensor


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What one step emitted for one sequence; `logprobs` is empty or one per token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    num_drafted: int
    num_accepted: int


class ModelRunner:
    """Owns a model and its KV cache; advances sequences step by step."""

    def __init__(
        self,
        model: Transformer,
        cache: PagedCache,
        draft_source: DraftSource | None = None,
        passes: Passes | None = None,
        synthetic_acceptance: float = 0.0,
    ) -> None:
        """`passes` None: the model's own, in step with nobody. `synthetic_acceptance`: keep drafts
        at this rate, for speed benchmarks only; 0: off."""
        self.model = model
        self.cache = cache
        self.sampler = Sampler(model.config.vocab_size, cache.device)
        self._draft_source = draft_source
        self._passes = passes or model
        self._acceptance = Acceptance(self.sampler, synthetic_acceptance)

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> list[FirstToken | None]:
        """Compute one chunk of each sequence; None for a chunk that does not end its prompt.

        A first token is appended to its sequence, whose `pending_hidden` becomes [1, H]. Prompt
        logprobs that are asked for are left in `Sequence.prompt_logprobs`.
        """
        parts: list[SequenceInput] = []
        num_shared = [chunk.sequence.num_shared for chunk in chunks]
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            end = first + chunk.num_tokens
            assert 0 < chunk.num_tokens <= sequence.num_tokens - first, (chunk.num_tokens, first)
            assert first >= sequence.num_shared - 1, (first, sequence.num_shared)
            self._assert_capacity(sequence, min(end + 1, sequence.num_tokens))
            parts.append((sequence.token_ids[first:end], first, sequence.block_table))
        sequences = [chunk.sequence for chunk in chunks]
        hidden_TH = self._forward(parts, sequences, num_shared)
        scored = self._score_prompts(chunks, hidden_TH)
        if self.model.has_mtp:
            self._write_mtp_entries(chunks, hidden_TH)

        last_rows = torch.tensor([c.num_tokens for c in chunks]).cumsum(0).sub(1).tolist()
        ends = [
            (chunk.sequence, row)
            for chunk, row in zip(chunks, last_rows, strict=True)
            if chunk.sequence.num_computed + chunk.num_tokens == chunk.sequence.num_tokens
        ]
        first_tokens = iter(self._first_tokens(ends, hidden_TH))
        results: list[FirstToken | None] = []
        for chunk, prompt_logprobs in zip(chunks, scored, strict=True):
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            sequence.prompt_logprobs += prompt_logprobs
            is_end = sequence.num_computed == sequence.num_tokens
            results.append(_begin_output(sequence, *next(first_tokens)) if is_end else None)
        return results

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[DecodeOutput]:
        """One step: draft up to `num_drafts[i]` tokens, verify, emit 1 to `num_drafts[i]` + 1.

        Drafts are capped by `draft_limit`. Raises ConfigError when drafts are asked of a runner
        without a draft source.
        """
        waiting = [sequence.pending_hidden for sequence in sequences]
        try:
            return self.verify(sequences, self.draft(sequences, num_drafts))
        except BaseException:
            for sequence, hidden in zip(sequences, waiting, strict=True):
                sequence.pending_hidden = hidden
            raise

    def draft_limit(self, sequence: Sequence) -> int:
        """Drafts that fit: a step writes up to k + 1 slots and may emit k + 1 tokens."""
        capacity = len(sequence.block_table) * self.cache.layout.block_tokens
        limit = min(sequence.remaining_tokens - 1, capacity - sequence.num_tokens)
        return max(limit, 0)

    def count_draft_passes(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> int:
        """Passes of the MTP module that `draft` makes."""
        if self._draft_source is None:
            return 0
        return self._draft_source.count_passes(sequences, self._capped(sequences, num_drafts))

    @torch.inference_mode()
    def draft(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """The first half of `decode`: at most `num_drafts[i]` drafts for each sequence."""
        if self._draft_source is None:
            if any(num_drafts):
                raise ConfigError(
                    f"{max(num_drafts)} drafts were asked for, but nothing drafts here: the "
                    "checkpoint has no MTP module, or drafting is off; ask for 0"
                )
            return [[] for _ in sequences]
        return self._draft_source.propose(sequences, self._capped(sequences, num_drafts))

    @torch.inference_mode()
    def verify(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> list[DecodeOutput]:
        """The second half of `decode`: one main-model step over every newest token and draft."""
        parts: list[SequenceInput] = []
        params: list[SamplingParams] = []
        positions: list[int] = []
        for sequence, proposed in zip(sequences, drafts, strict=True):
            assert sequence.is_prefilled, (sequence.key, sequence.num_computed)
            assert sequence.num_computed >= sequence.num_shared, (sequence.key, sequence.num_shared)
            self._assert_capacity(sequence, sequence.num_tokens + len(proposed))
            tokens = [sequence.token_ids[-1], *proposed]
            parts.append((tokens, sequence.num_computed, sequence.block_table))
            params += [sequence.sampling] * len(tokens)
            positions += range(sequence.num_tokens, sequence.num_tokens + len(tokens))
        hidden_TH = self._forward(parts, sequences)
        raw_TV = self.model.logits(hidden_TH)
        logits_TV = self._constrained(raw_TV, sequences, drafts)
        emitted = self._accept(sequences, drafts, logits_TV, params, positions)
        starts = accumulate((len(proposed) + 1 for proposed in drafts), initial=0)
        spans = [range(i, i + len(tokens)) for i, tokens in zip(starts, emitted, strict=False)]
        logprobs = self._logprobs(raw_TV, emitted, params, spans)
        outputs: list[DecodeOutput] = []
        for i, sequence in enumerate(sequences):
            span = spans[i]
            num_emitted, reason = append_until_finished(sequence, emitted[i])
            self._commit(sequence, hidden_TH[span.start : span.start + num_emitted])
            num_accepted = min(len(span) - 1, num_emitted)
            sequence.drafts = sequence.drafts.add_step(len(drafts[i]), num_accepted, num_emitted)
            outputs.append(
                DecodeOutput(
                    token_ids=tuple(emitted[i][:num_emitted]),
                    logprobs=tuple(logprobs[row] for row in span[:num_emitted] if row in logprobs),
                    finish_reason=reason,
                    num_drafted=len(drafts[i]),
                    num_accepted=num_accepted,
                )
            )
        return outputs

    def _accept(
        self,
        sequences: Seq[Sequence],
        drafts: Seq[Seq[int]],
        logits_TV: Tensor,
        params: Seq[SamplingParams],
        positions: Seq[int],
    ) -> list[list[int]]:
        """The tokens that each sequence emits."""
        sampled = self._sample(logits_TV, params, positions).tolist()
        emitted: list[list[int]] = []
        start = 0
        for sequence, proposed in zip(sequences, drafts, strict=True):
            end = start + len(proposed) + 1
            is_kept = self._acceptance.keeps(sequence, proposed, logits_TV[start : end - 1])
            emitted.append(accept(proposed, sampled[start:end], is_kept))
            start = end
        return emitted

    def _constrained(
        self, logits_NV: Tensor, sequences: Seq[Sequence], drafts: Seq[Seq[int]]
    ) -> Tensor:
        """The logits that are sampled: row j of a sequence follows its tokens and j drafts. A copy
        where anything changes, as logprobs are of the model's own."""
        if not any(sequence.is_constrained for sequence in sequences):
            return logits_NV
        logits_NV = logits_NV.clone()
        start = 0
        for sequence, proposed in zip(sequences, drafts, strict=True):
            end = start + len(proposed) + 1
            sequence.constrain(logits_NV[start:end], proposed)
            start = end
        return logits_NV

    def hidden_state_bytes(self, hidden_H: Tensor) -> bytes:
        """A hidden state as it crosses to a decode worker: H elements of the model's dtype."""
        return hidden_H.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def load_hidden_state(self, data: bytes) -> Tensor:
        """The inverse of `hidden_state_bytes`, [H] on this runner's device.

        Raises InternalError when the length does not fit this model.
        """
        config = self.model.config
        dtype = self.model.dtype
        expected_bytes = config.hidden_size * dtype.itemsize
        if len(data) != expected_bytes:
            raise InternalError(f"a hidden state has {len(data)} bytes, expected {expected_bytes}")
        return torch.frombuffer(bytearray(data), dtype=dtype).to(self.cache.device)

    def _capped(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[int]:
        pairs = zip(sequences, num_drafts, strict=True)
        return [min(wanted, self.draft_limit(sequence)) for sequence, wanted in pairs]

    def _forward(
        self,
        parts: list[SequenceInput],
        sequences: Seq[Sequence],
        num_shared: Seq[int] | None = None,
    ) -> Tensor:
        """One main pass, [T, H]. Raises Damaged on NaN."""
        inputs = StepInputs.build(parts, self.cache.device, num_shared)
        hidden_TH = self._passes.forward(inputs, self.cache)
        refuse_nan(hidden_TH, inputs.query_lengths, sequences, self.cache)
        return hidden_TH

    def _first_tokens(
        self, ends: Seq[tuple[Sequence, int]], hidden_TH: Tensor
    ) -> list[tuple[int, TokenLogprobs | None, Tensor]]:
        """Sample behind each prompt's last row: token id, logprobs, hidden state."""
        if not ends:
            return []
        hidden_NH = hidden_TH[torch.tensor([row for _, row in ends], device=hidden_TH.device)]
        raw_NV = self.model.logits(hidden_NH)
        sequences = [sequence for sequence, _ in ends]
        params = [sequence.sampling for sequence in sequences]
        logits_NV = self._constrained(raw_NV, sequences, [()] * len(ends))
        sampled = self._sample(logits_NV, params, [s.num_tokens for s in sequences]).tolist()
        spans = [range(row, row + 1) for row in range(len(ends))]
        logprobs = self._logprobs(raw_NV, [[token] for token in sampled], params, spans)
        return [(token, logprobs.get(row), hidden_NH[row]) for row, token in enumerate(sampled)]

    def _score_prompts(
        self, chunks: Seq[PrefillChunk], hidden_TH: Tensor
    ) -> list[list[TokenLogprobs]]:
        """Logprobs of the prompt tokens behind each chunk's rows, where they are asked for."""
        scored: list[list[TokenLogprobs]] = [[] for _ in chunks]
        start = 0
        for chunk, found in zip(chunks, scored, strict=True):
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            end = min(first + chunk.num_tokens, sequence.num_client_tokens - 1)
            if (num_top := sequence.sampling.prompt_logprobs) is not None:
                for begin in range(first, end, SCORED_ROWS):
                    tokens = sequence.token_ids[begin + 1 : min(begin + SCORED_ROWS, end) + 1]
                    row = start + begin - first
                    logits_NV = self.model.logits(hidden_TH[row : row + len(tokens)])
                    tokens_N = torch.tensor(tokens, device=logits_NV.device)
                    found += self.sampler.logprobs(logits_NV, tokens_N, [num_top] * len(tokens))
            start += chunk.num_tokens
        return scored

    def _sample(
        self, logits_NV: Tensor, params: Seq[SamplingParams], positions: Seq[int]
    ) -> Tensor:
        if bool(logits_NV.amax().isnan()):
            raise InternalError("the model computed NaN logits; its weights or cache are damaged")
        return self.sampler.sample(logits_NV, params, positions)

    def _logprobs(
        self,
        logits_NV: Tensor,
        emitted: Seq[Seq[int]],
        params: Seq[SamplingParams],
        spans: Seq[range],
    ) -> dict[int, TokenLogprobs]:
        """Logprobs of the tokens emitted by the rows in `spans`, where the request asks for them,
        by row."""
        tokens = chain.from_iterable(emitted)
        rows = zip(chain.from_iterable(spans), tokens, strict=True)
        wanted = {row: token for row, token in rows if params[row].top_logprobs is not None}
        if not wanted:
            return {}
        rows_N, tokens_N = torch.tensor([*wanted.items()], device=logits_NV.device).unbind(1)
        num_top = [params[row].top_logprobs or 0 for row in wanted]
        found = self.sampler.logprobs(logits_NV[rows_N], tokens_N, num_top)
        return dict(zip(wanted, found, strict=True))

    def _commit(self, sequence: Sequence, hidden_EH: Tensor) -> None:
        """Count the slots behind the emitted tokens as computed; keep their hidden states. Those of
        a finished output, too: they say which MTP entries its blocks lack."""
        sequence.num_computed += hidden_EH.shape[0]
        if self._draft_source is None:
            sequence.pending_hidden = None
        elif sequence.pending_hidden is None:
            sequence.pending_hidden = hidden_EH
        else:
            sequence.pending_hidden = torch.cat([sequence.pending_hidden, hidden_EH])

    def _write_mtp_entries(self, chunks: Seq[PrefillChunk], hidden_TH: Tensor) -> None:
        """Make the MTP entries (h_i, t_{i+1}) -> slot i + 1 of a chunk where t_{i+1} is known."""
        parts: list[SequenceInput] = []
        hidden: list[Tensor] = []
        row = 0
        for chunk in chunks:
            sequence, first_slot = chunk.sequence, chunk.sequence.num_computed + 1
            assert first_slot >= sequence.num_shared, (first_slot, sequence.num_shared)
            tokens = sequence.token_ids[first_slot : first_slot + chunk.num_tokens]
            if tokens:
                parts.append((tokens, first_slot, sequence.block_table))
                hidden.append(hidden_TH[row : row + len(tokens)])
            row += chunk.num_tokens
        if parts:
            inputs = StepInputs.build(parts, self.cache.device)
            self._passes.mtp_forward(inputs, torch.cat(hidden), self.cache, last_only=True)

    def _assert_capacity(self, sequence: Sequence, num_slots: int) -> None:
        capacity = len(sequence.block_table) * self.cache.layout.block_tokens
        assert num_slots <= capacity, (sequence.key, num_slots, capacity)


def _begin_output(
    sequence: Sequence, token: int, logprobs: TokenLogprobs | None, hidden_H: Tensor
) -> FirstToken:
    sequence.token_ids.append(token)
    sequence.pending_hidden = hidden_H[None]
    return FirstToken(token, logprobs, sequence.finish_reason(), hidden_H)
