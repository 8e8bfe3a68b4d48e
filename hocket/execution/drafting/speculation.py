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
from hocket.execution.drafting.mtp_entries import HiddenRows, run_module
from hocket.execution.passes import Passes
from hocket.execution.sampling.noise import position_uniform
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.types import FinishReason, RequestKey


def accept(drafts: Seq[int], sampled: Seq[int], is_kept: Seq[bool] = ()) -> list[int]:
    """The tokens that a step emits: the right drafts, then the target's own next sample.

    `sampled` has one entry more than `drafts`. Where `is_kept` is given, it says which drafts are
    accepted, whatever the target said (lossy and synthetic acceptance).
    """
    for index, draft in enumerate(drafts):
        if not (is_kept[index] if is_kept else draft == sampled[index]):
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

        May write MTP entries up to slot num_computed (they count: the rows that wait are
        consumed) and main or MTP slots beyond it (they don't count).
        """
        ...

    def pass_rows(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[int]:
        """Rows of each pass of an MTP module that `propose` makes for these."""
        ...


class MTPDraftSource:
    """Drafts with the checkpoint's own MTP modules, all sequences in one flat batch per pass.

    The first pass turns the rows that wait into MTP entries, (h_i, t_{i+1}) -> slot i + 1; its last
    output of a sequence is the state behind draft 1. With several modules the next passes take the
    rows on through these, the drafts just made at their end. Each further pass feeds the last
    module its own output and the newest draft.

    The entries count, and the hidden states are done with, once they have been through all modules:
    they go through all in each step that drafts, however few drafts the sequence gets. Those of a
    sequence without drafts in this step wait; `Sequence.add_hidden` bounds how many.
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
        self._num_modules = model.config.num_mtp_layers

    def propose(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = self._rows(sequences, num_drafts, drafts)
        before = [(one.sequence, one.hidden_RH) for one in rows]
        num_passes = len(self.pass_rows(sequences, num_drafts))
        last_module = self._num_modules - 1
        drafting, hidden_SH = rows, torch.empty(0)
        for depth in range(num_passes):
            if depth <= last_module:
                rows = drafting = [one for one in rows if one.has_tokens(depth)]
                if rows:
                    is_last = depth == last_module
                    hidden_SH = run_module(depth, rows, self._passes, self._cache, is_last)
            keep = [i for i, one in enumerate(drafting) if one.num_drafts > depth]
            if not keep:
                continue
            if len(keep) < len(drafting):
                drafting = [drafting[i] for i in keep]
                hidden_SH = hidden_SH[torch.tensor(keep, device=hidden_SH.device)]
            if depth > last_module:
                hidden_SH = self._advance(drafting, hidden_SH)
            self._draft(drafting, hidden_SH, min(depth, last_module))
        for sequence, hidden_RH in before:
            sequence.keep_hidden(hidden_RH, self._num_modules - 1)
        return drafts

    def pass_rows(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[int]:
        pairs = zip(sequences, num_drafts, strict=True)
        waiting = sum(s.waiting.num_rows for s, wanted in pairs if wanted > 0)
        if not waiting:
            return []
        later = range(self._num_modules, max(num_drafts))
        through_modules = [waiting] * self._num_modules
        return through_modules + [sum(wanted > depth for wanted in num_drafts) for depth in later]

    @staticmethod
    def _rows(
        sequences: Seq[Sequence], num_drafts: Seq[int], drafts: Seq[list[int]]
    ) -> list[HiddenRows]:
        """Those of the sequences that draft in this step."""
        rows: list[HiddenRows] = []
        for sequence, wanted, proposed in zip(sequences, num_drafts, drafts, strict=True):
            if wanted > 0:
                hidden_RH, last_slot = sequence.waiting.joined(), sequence.num_computed
                first_slot = last_slot - sequence.num_pending + 1
                assert first_slot >= sequence.num_shared, (first_slot, sequence.num_shared)
                first_row = last_slot - hidden_RH.shape[0]
                span = (first_row, first_slot, last_slot)
                rows.append(HiddenRows(sequence, *span, hidden_RH, proposed, wanted))
        return rows

    def _draft(self, drafting: Seq[HiddenRows], hidden_SH: Tensor, module: int) -> None:
        """Samples the next draft of each sequence from what the module made of its last row."""
        sequences = [one.sequence for one in drafting]
        refuse_nan(hidden_SH, [1] * len(drafting), sequences, self._cache)
        logits_SV = self._model.mtp_logits(hidden_SH, module)
        for i, one in enumerate(drafting):
            if one.sequence.is_constrained:
                one.sequence.constrain(logits_SV[i : i + 1], one.drafts, first=len(one.drafts))
        params = [sequence.sampling for sequence in sequences]
        positions = [one.sequence.num_tokens + len(one.drafts) for one in drafting]
        tokens_S = self._sampler.sample(logits_SV, params, positions)
        for one, token in zip(drafting, tokens_S.tolist(), strict=True):
            one.drafts.append(token)

    def _advance(self, drafting: Seq[HiddenRows], hidden_SH: Tensor) -> Tensor:
        """One more pass of the last module: each sequence's newest draft at its own slot, on
        recycled hidden."""
        parts: list[SequenceInput] = [
            (one.drafts[-1:], one.last_slot + len(one.drafts), one.sequence.block_table)
            for one in drafting
        ]
        module = self._num_modules - 1
        gaps = [one.sequence.gap_of(module) for one in drafting]
        inputs = StepInputs.build(parts, hidden_SH.device, gaps=gaps)
        return self._passes.mtp_forward(inputs, hidden_SH, self._cache, module=module)


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
                sequence.waiting = WaitingRows()
        return [
            [self._draft(sequence, sequence.num_tokens + depth) for depth in range(wanted)]
            for sequence, wanted in zip(sequences, num_drafts, strict=True)
        ]

    def pass_rows(self, sequences: Seq[Sequence], num_drafts: Seq[int]) -> list[int]:
        if self._timed_source is None:
            return []
        return self._timed_source.pass_rows(sequences, num_drafts)

    def _draft(self, sequence: Sequence, position: int) -> int:
        """The true token at `position` of prompt + output, or its neighbour."""
        truth = self._truth[sequence.key]
        token = truth[position] if position < len(truth) else 0
        address = (sequence.sampling.seed, sequence.sampling.choice, position)
        is_right = position_uniform(*address) < self._accuracy
        return token if is_right else (token + 1) % self._vocab_size
