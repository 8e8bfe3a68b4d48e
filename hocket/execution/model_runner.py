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

import torch
from torch import Tensor

from hocket.errors import ConfigError, InternalError
from hocket.execution.damage import refuse_nan
from hocket.execution.passes import Passes
from hocket.execution.sampler import Sampler
from hocket.execution.sequence import Sequence
from hocket.execution.speculation import DraftSource, append_until_finished, count_accepted
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.types import FinishReason, SamplingParams, TokenLogprobs


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
    ) -> None:
        """`passes` None: the model's own, in step with nobody."""
        self.model = model
        self.cache = cache
        self.sampler = Sampler(model.config.vocab_size, cache.device)
        self._draft_source = draft_source
        self._passes = passes or model

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> list[FirstToken | None]:
        """Compute one chunk of each sequence; None for a chunk that does not end its prompt.

        A first token is appended to its sequence, whose `pending_hidden` becomes [1, H].
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
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
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
        logits_TV = self.model.logits(hidden_TH)
        sampled_T = self._sample(logits_TV, params, positions)
        sampled = sampled_T.tolist()

        spans: list[range] = []
        accepted: list[int] = []
        start = 0
        for proposed in drafts:
            end = start + len(proposed) + 1
            accepted.append(count_accepted(proposed, sampled[start:end]))
            spans.append(range(start, start + accepted[-1] + 1))
            start = end
        logprobs = self._logprobs(logits_TV, sampled_T, params, spans)
        outputs: list[DecodeOutput] = []
        for i, sequence in enumerate(sequences):
            span = spans[i]
            tokens = sampled[span.start : span.stop]
            num_emitted, reason = append_until_finished(sequence, tokens)
            self._commit(sequence, hidden_TH[span.start : span.start + num_emitted])
            num_accepted = min(accepted[i], num_emitted)
            sequence.drafts = sequence.drafts.add_step(len(drafts[i]), num_accepted, num_emitted)
            outputs.append(
                DecodeOutput(
                    token_ids=tuple(tokens[:num_emitted]),
                    logprobs=tuple(logprobs[row] for row in span[:num_emitted] if row in logprobs),
                    finish_reason=reason,
                    num_drafted=len(drafts[i]),
                    num_accepted=num_accepted,
                )
            )
        return outputs

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
        logits_NV = self.model.logits(hidden_NH)
        params = [sequence.sampling for sequence, _ in ends]
        positions = [sequence.num_tokens for sequence, _ in ends]
        sampled_N = self._sample(logits_NV, params, positions)
        spans = [range(row, row + 1) for row in range(len(ends))]
        logprobs = self._logprobs(logits_NV, sampled_N, params, spans)
        return [
            (token, logprobs.get(row), hidden_NH[row])
            for row, token in enumerate(sampled_N.tolist())
        ]

    def _sample(
        self, logits_NV: Tensor, params: Seq[SamplingParams], positions: Seq[int]
    ) -> Tensor:
        if bool(logits_NV.amax().isnan()):
            raise InternalError("the model computed NaN logits; its weights or cache are damaged")
        return self.sampler.sample(logits_NV, params, positions)

    def _logprobs(
        self, logits_NV: Tensor, sampled_N: Tensor, params: Seq[SamplingParams], spans: Seq[range]
    ) -> dict[int, TokenLogprobs]:
        """Logprobs of those rows in `spans` whose request asks for them, by row."""
        num_top = {row: params[row].top_logprobs for span in spans for row in span}
        wanted = {row: top for row, top in num_top.items() if top is not None}
        if not wanted:
            return {}
        rows_N = torch.tensor(list(wanted), device=logits_NV.device)
        found = self.sampler.logprobs(logits_NV[rows_N], sampled_N[rows_N], list(wanted.values()))
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
