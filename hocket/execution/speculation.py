"""Draft several tokens, keep those that the target would have said itself.

A draft source proposes k tokens per sequence; `model_runner` runs the target over [t_n, d_1..d_k]
in one flat step and samples at each of the k + 1 positions with that position's own noise. Draft
d_j is accepted when it equals the target's sample there and all before it were accepted; the
sample after the last accepted draft is emitted too. So a step emits 1 to k + 1 tokens, exactly
those that k + 1 plain steps would have emitted (docs/architecture.md, Exact output).

Shape letters: T tokens of a flat batch, S sequences, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from hocket.errors import ConfigError
from hocket.execution.damage import refuse_nan
from hocket.execution.noise import position_uniform
from hocket.execution.passes import Passes
from hocket.execution.sampler import Sampler
from hocket.execution.sequence import Sequence
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.types import FinishReason, RequestKey

MAX_PENDING = 16


def accept(drafts: Seq[int], sampled: Seq[int], is_kept: Seq[bool] = ()) -> list[int]:
    """The tokens that a step emits: the right drafts, then the target's own next sample.

    `sampled` has one entry more than `drafts`. A draft with `is_kept` is accepted though the target
    said otherwise (lossy and synthetic acceptance); none is by default.
    """
    for index, draft in enumerate(drafts):
        if draft != sampled[index] and not (is_kept and is_kept[index]):
            return [*drafts[:index], sampled[index]]
    return [*drafts, sampled[len(drafts)]]


def append_until_finished(sequence: Sequence, tokens: Seq[int]) -> tuple[int, FinishReason | None]:
    """Append tokens to the sequence one by one, each rule applied after each token.

    Stops behind the token that ends the output. Returns how many were appended, and why the output
    ended (None when it goes on).
    """
    for count, token in enumerate(tokens, start=1):
        sequence.token_ids.append(token)
        reason = sequence.finish_reason()
        if reason is not None:
            return count, reason
    return len(tokens), None


class DraftSource(Protocol):
    """Proposes what the target may say next."""

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        """`num_drafts[i]` tokens to follow `sequences[i]`; every sequence has one uncomputed token.

        May write MTP entries up to slot num_computed (they count: `pending_hidden` is consumed)
        and main or MTP slots beyond it (they don't count).
        """
        ...

    def count_passes(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> int:
        """Passes of the MTP module that `propose` makes for these."""
        ...


class MTPDraftSource:
    """Drafts with the checkpoint's own MTP module, all sequences in one flat batch per pass.

    The first pass turns `pending_hidden` into MTP entries, (h_i, t_{i+1}) -> slot i + 1; its last
    output of a sequence is the state behind draft 1. Each further pass feeds the module its own
    output and the draft just made. A sequence without drafts in this step only lets its hidden
    states wait, at most `MAX_PENDING` of them: then its entries are written all the same, so that
    memory stays bounded and drafting can start again at any step with complete MTP entries.
    """

    def __init__(self, model: Transformer, cache: PagedCache, passes: Passes | None = None) -> None:
        """`passes` None: the model's own. Raises ConfigError when the checkpoint has no MTP
        module."""
        if not model.has_mtp:
            raise ConfigError(
                "the checkpoint has no MTP module (num_nextn_predict_layers is 0 or absent), so "
                "nothing can draft; set the draft length to 0"
            )
        self._model = model
        self._passes = passes or model
        self._cache = cache
        self._sampler = Sampler(model.config.vocab_size, cache.device)

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = self._rows(sequences, num_drafts)
        if not rows:
            return drafts
        hidden_SH = self._write_pending([sequences[row] for row in rows])
        for depth in range(max(num_drafts)):
            keep = [i for i, row in enumerate(rows) if num_drafts[row] > depth]
            if len(keep) < len(rows):
                rows = [rows[i] for i in keep]
                hidden_SH = hidden_SH[torch.tensor(keep, device=hidden_SH.device)]
            if depth > 0:
                hidden_SH = self._advance([(sequences[r], drafts[r]) for r in rows], hidden_SH)
            drafting = [sequences[row] for row in rows]
            refuse_nan(hidden_SH, [1] * len(rows), drafting, self._cache)
            logits_SV = self._model.mtp_logits(hidden_SH)
            for i, row in enumerate(rows):
                sequences[row].constrain(logits_SV[i : i + 1], drafts[row], first=depth)
            tokens_S = self._sampler.sample(
                logits_SV,
                [sequences[row].sampling for row in rows],
                [sequences[row].num_tokens + depth for row in rows],
            )
            for row, token in zip(rows, tokens_S.tolist(), strict=True):
                drafts[row].append(token)
        return drafts

    def count_passes(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> int:
        return max(1, *num_drafts) if self._rows(sequences, num_drafts) else 0

    @staticmethod
    def _rows(sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[int]:
        """The sequences that draft in this step, or whose hidden states have waited enough."""
        return [
            row
            for row, (sequence, wanted) in enumerate(zip(sequences, num_drafts, strict=True))
            if wanted > 0 or sequence.num_pending >= MAX_PENDING
        ]

    def _write_pending(self, sequences: list[Sequence]) -> Tensor:
        """Write the sequences' waiting MTP entries; returns each one's last output, [S, H]."""
        parts: list[SequenceInput] = []
        hidden: list[Tensor] = []
        for sequence in sequences:
            assert sequence.pending_hidden is not None, sequence.key
            first_slot = sequence.num_computed - sequence.num_pending + 1
            assert first_slot >= sequence.num_shared, (first_slot, sequence.num_shared)
            parts.append((sequence.token_ids[first_slot:], first_slot, sequence.block_table))
            hidden.append(sequence.pending_hidden)
            sequence.pending_hidden = None
        hidden_TH = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
        inputs = StepInputs.build(parts, hidden_TH.device)
        return self._passes.mtp_forward(inputs, hidden_TH, self._cache, last_only=True)

    def _advance(self, drafting: list[tuple[Sequence, list[int]]], hidden_SH: Tensor) -> Tensor:
        """One more pass: the newest draft of each sequence at its own slot, on recycled hidden."""
        parts: list[SequenceInput] = [
            (drafts[-1:], sequence.num_tokens + len(drafts) - 1, sequence.block_table)
            for sequence, drafts in drafting
        ]
        inputs = StepInputs.build(parts, hidden_SH.device)
        return self._passes.mtp_forward(inputs, hidden_SH, self._cache)


class ScriptedDraftSource:
    """SYNTHETIC drafts of known accuracy, for tests and benchmarks; never for serving.

    Given the true outputs of a reference run, it proposes the true next token with probability
    `accuracy`, per position and by addressed noise, and a wrong one otherwise. With `timed_source`
    the real drafting runs first, and only its proposals are replaced: its cost stays honest.
    """

    def __init__(
        self,
        truth: Mapping[RequestKey, Seq[int]],
        accuracy: float,
        vocab_size: int,
        timed_source: DraftSource | None = None,
    ) -> None:
        self._truth = truth
        self._accuracy = accuracy
        self._vocab_size = vocab_size
        self._timed_source = timed_source

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        if self._timed_source is not None:
            self._timed_source.propose(sequences, num_drafts)
        else:
            for sequence in sequences:
                sequence.pending_hidden = None
        return [
            [self._draft(sequence, sequence.num_tokens + depth) for depth in range(wanted)]
            for sequence, wanted in zip(sequences, num_drafts, strict=True)
        ]

    def count_passes(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> int:
        if self._timed_source is None:
            return 0
        return self._timed_source.count_passes(sequences, num_drafts)

    def _draft(self, sequence: Sequence, position: int) -> int:
        """The true token at `position` of prompt + output, or its neighbour."""
        truth = self._truth[sequence.key]
        token = truth[position] if position < len(truth) else 0
        address = (sequence.sampling.seed, sequence.sampling.choice, position)
        is_right = position_uniform(*address) < self._accuracy
        return token if is_right else (token + 1) % self._vocab_size
