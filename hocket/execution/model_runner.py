"""Run steps: the scheduler's decision in, tokens out. Prefill, decode and local engines share it.

One step is one flat batch through the main model. `prefill` computes a chunk of each given prompt
and, at a prompt's end, samples the first token. `decode` drafts (`drafting/`), verifies all
sequences' drafts at once, chooses tokens (`sampling/token_choice.py`) and cuts at the first one
that ends an output. A step that raises leaves every sequence as it was.

MTP entries that count are made from the target's hidden states only (`drafting/mtp_entries.py`):
prefill makes those of every slot whose token is known; decode leaves the newest states in
`Sequence.waiting` for the next draft pass. A runner without a draft source keeps none after
prefill.

Shape letters: T tokens of a flat batch, N sampled rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from hocket.errors import ConfigError, InternalError
from hocket.execution.damage import refuse_nan
from hocket.execution.drafting.mtp_entries import HiddenRows, run_module
from hocket.execution.drafting.speculation import DraftSource, append_until_finished
from hocket.execution.passes import Passes
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sampling.token_choice import TokenChoice
from hocket.execution.sequence import Sequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.scheduling.draft_controller import DraftRequest
from hocket.scheduling.step_costs import StepTimes
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
    """What the end of a prompt yields; `hidden_state` [R, H] is that of the last prompt positions,
    which drafting starts from: one row for each MTP module, at least one."""

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
    """Owns a model and its KV cache; advances sequences step by step.

    `last_step` is None after a decode step that failed.
    """

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
        sampler = Sampler(model.config.vocab_size, cache.device)
        self.choice = TokenChoice(sampler, synthetic_acceptance)
        self._draft_source = draft_source
        self._passes = passes or model
        self.last_step: StepTimes | None = None
        self._num_rows = max(1, model.config.num_mtp_layers)

    def start_behind(self, num_shared: int) -> int:
        """Where a prompt starts whose first `num_shared` slots are in the cache: the last ones are
        computed again, for the hidden states that drafting starts from."""
        return max(0, num_shared - self._num_rows)

    @torch.inference_mode()
    def prefill(self, chunks: Seq[PrefillChunk]) -> list[FirstToken | None]:
        """Compute one chunk of each sequence; None for a chunk that does not end its prompt.

        A first token is appended to its sequence, of which one row then waits. Prompt logprobs
        that are asked for are left in `Sequence.prompt_logprobs`.
        """
        parts: list[SequenceInput] = []
        num_shared = [chunk.sequence.num_shared for chunk in chunks]
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            end = first + chunk.num_tokens
            assert 0 < chunk.num_tokens <= sequence.num_tokens - first, (chunk.num_tokens, first)
            assert first >= self.start_behind(sequence.num_shared), (first, sequence.num_shared)
            self._assert_capacity(sequence, min(end + 1, sequence.num_tokens))
            parts.append((sequence.token_ids[first:end], first, sequence.block_table))
        sequences = [chunk.sequence for chunk in chunks]
        hidden_TH = self._forward(parts, sequences, num_shared)
        scored = self._score_prompts(chunks, hidden_TH)
        rows = self._hidden_rows(chunks, hidden_TH)
        hidden = [one.hidden_RH for one in rows]
        self._write_mtp_entries(rows)

        last_rows = torch.tensor([c.num_tokens for c in chunks]).cumsum(0).sub(1).tolist()
        ends = [
            (chunk.sequence, row)
            for chunk, row in zip(chunks, last_rows, strict=True)
            if chunk.sequence.num_computed + chunk.num_tokens == chunk.sequence.num_tokens
        ]
        first_tokens = iter(self._first_tokens(ends, hidden_TH))
        results: list[FirstToken | None] = []
        for chunk, prompt_logprobs, hidden_RH in zip(chunks, scored, hidden, strict=True):
            sequence = chunk.sequence
            sequence.num_computed += chunk.num_tokens
            sequence.prompt_logprobs += prompt_logprobs
            is_end = sequence.num_computed == sequence.num_tokens
            sequence.keep_hidden(hidden_RH, self._num_rows - 1, num_pending=int(is_end))
            results.append(_begin_output(sequence, *next(first_tokens)) if is_end else None)
        return results

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[DecodeOutput]:
        """One step: draft up to `num_drafts[i]` tokens, verify, emit 1 to `num_drafts[i]` + 1.

        Drafts are capped by `draft_limit`. Raises ConfigError when drafts are asked of a runner
        without a draft source.
        """
        self.last_step = None
        before = [(sequence.waiting, sequence.gap) for sequence in sequences]
        try:
            source, draft_rows = self._draft_source, []
            if source is not None and any(num_drafts):
                num_drafts = self._capped(sequences, num_drafts)
                draft_rows = source.pass_rows(sequences, num_drafts)
            started = perf_counter()
            drafts = self.draft(sequences, num_drafts)
            drafted = perf_counter()
            outputs = self.verify(sequences, drafts)
            verified = perf_counter()
            num_rows = sum(map(len, drafts)) + len(drafts)
            draft_s, verify_s = drafted - started, verified - drafted
            self.last_step = StepTimes(draft_rows, draft_s, num_rows, verify_s, len(sequences))
            return outputs
        except BaseException:
            for sequence, rows in zip(sequences, before, strict=True):
                sequence.waiting, sequence.gap = rows
            raise

    def draft_limit(self, sequence: Sequence) -> int:
        """Drafts that fit: a step writes up to k + 1 slots and may emit k + 1 tokens."""
        capacity = len(sequence.block_table) * self.cache.layout.block_tokens
        limit = min(sequence.remaining_tokens - 1, capacity - sequence.num_tokens)
        return max(limit, 0)

    def draft_request(self, sequence: Sequence, max_drafts: int) -> DraftRequest:
        """The sequence as the draft controller sees it."""
        cap = min(max_drafts, self.draft_limit(sequence))
        return DraftRequest(cap, sequence.waiting.num_rows, sequence.sampling.is_greedy)

    @torch.inference_mode()
    def draft(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """The first half of `decode`: at most `num_drafts[i]` drafts for each sequence."""
        if not any(num_drafts):
            return [[] for _ in sequences]
        if self._draft_source is None:
            raise ConfigError(
                f"{max(num_drafts)} drafts were asked for, but nothing drafts here: the "
                "checkpoint has no MTP module, or drafting is off; ask for 0"
            )
        return self._draft_source.propose(sequences, self._capped(sequences, num_drafts))

    @torch.inference_mode()
    def verify(self, sequences: Seq[Sequence], drafts: Seq[Seq[int]]) -> list[DecodeOutput]:
        """The second half of `decode`: one main-model step over every newest token and draft."""
        parts: list[SequenceInput] = []
        for sequence, proposed in zip(sequences, drafts, strict=True):
            assert sequence.is_prefilled, (sequence.key, sequence.num_computed)
            assert sequence.num_computed >= sequence.num_shared, (sequence.key, sequence.num_shared)
            self._assert_capacity(sequence, sequence.num_tokens + len(proposed))
            tokens = [sequence.token_ids[-1], *proposed]
            parts.append((tokens, sequence.num_computed, sequence.block_table))
        hidden_TH = self._forward(parts, sequences)
        emitted = self.choice.emit(self.model.logits(hidden_TH), sequences, drafts)
        outputs: list[DecodeOutput] = []
        start = 0
        for sequence, proposed, new in zip(sequences, drafts, emitted, strict=True):
            num_emitted, reason = append_until_finished(sequence, new.token_ids)
            sequence.num_computed += num_emitted
            if self._draft_source is not None:
                # Of a finished output, too: they say which MTP entries its blocks lack.
                sequence.add_hidden(hidden_TH, start, start + num_emitted)
            elif sequence.waiting.num_rows:
                sequence.waiting = WaitingRows()
            num_accepted = min(len(new.token_ids) - 1, num_emitted)
            sequence.drafts = sequence.drafts.add_step(len(proposed), num_accepted, num_emitted)
            outputs.append(
                DecodeOutput(
                    token_ids=tuple(new.token_ids[:num_emitted]),
                    logprobs=new.logprobs[:num_emitted],
                    finish_reason=reason,
                    num_drafted=len(proposed),
                    num_accepted=num_accepted,
                )
            )
            start += len(proposed) + 1
        return outputs

    def hidden_state_bytes(self, hidden_RH: Tensor) -> bytes:
        """A hidden state as it crosses to a decode worker: R * H elements of the model's dtype."""
        return hidden_RH.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def load_hidden_state(self, data: bytes, prompt_tokens: int) -> Tensor:
        """The inverse of `hidden_state_bytes` for a prompt of this length, [R, H] on this runner's
        device.

        Raises InternalError when the length does not fit this model.
        """
        dtype, width = self.model.dtype, self.model.config.hidden_size
        expected_bytes = min(self._num_rows, prompt_tokens) * width * dtype.itemsize
        if len(data) != expected_bytes:
            raise InternalError(f"a hidden state has {len(data)} bytes, expected {expected_bytes}")
        values = torch.frombuffer(bytearray(data), dtype=dtype).to(self.cache.device)
        return values.view(-1, width)

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
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Sample behind each prompt's last row: token id, logprobs."""
        if not ends:
            return []
        rows_N = torch.tensor([row for _, row in ends], device=hidden_TH.device)
        logits_NV = self.model.logits(hidden_TH[rows_N])
        emitted = self.choice.emit(logits_NV, [sequence for sequence, _ in ends], [()] * len(ends))
        return [(new.token_ids[0], next(iter(new.logprobs), None)) for new in emitted]

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
                    found += self.choice.score(logits_NV, tokens, num_top)
            start += chunk.num_tokens
        return scored

    def _hidden_rows(self, chunks: Seq[PrefillChunk], hidden_TH: Tensor) -> list[HiddenRows]:
        """The rows of each chunk, behind those that its sequence kept."""
        rows: list[HiddenRows] = []
        start = 0
        for chunk in chunks:
            sequence, first = chunk.sequence, chunk.sequence.num_computed
            hidden_RH = hidden_TH[start : start + chunk.num_tokens]
            first_row = first - sequence.waiting.num_rows
            if first_row < first:
                hidden_RH = torch.cat([sequence.waiting.joined(), hidden_RH])
            first_slot, last_slot = max(first + 1, sequence.num_shared), first + chunk.num_tokens
            rows.append(HiddenRows(sequence, first_row, first_slot, last_slot, hidden_RH))
            start += chunk.num_tokens
        return rows

    def _write_mtp_entries(self, rows: Seq[HiddenRows]) -> None:
        """Make the MTP entries of the slots behind the chunks' rows whose tokens are known."""
        num_modules = self.model.config.num_mtp_layers
        for module in range(num_modules):
            rows = [one for one in rows if one.has_new_slots and one.has_tokens(module)]
            if rows:
                run_module(module, rows, self._passes, self.cache, module == num_modules - 1)

    def _assert_capacity(self, sequence: Sequence, num_slots: int) -> None:
        capacity = len(sequence.block_table) * self.cache.layout.block_tokens
        assert num_slots <= capacity, (sequence.key, num_slots, capacity)


def _begin_output(sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> FirstToken:
    sequence.token_ids.append(token)
    return FirstToken(token, logprobs, sequence.finish_reason(), sequence.waiting.joined())
