"""What a request does to its logits before they are sampled: penalties, bias, masks.

For the position after a prefix of the output, in this order (the formulas are vLLM's and
Hugging Face's):

    repetition penalty r     l / r where l > 0, else l * r; tokens of prompt and output prefix
    frequency, presence      l - frequency * n - presence; tokens that the output prefix has n > 0
                             times
    logit bias               l + bias
    grammar                  -inf for tokens that cannot follow
    min_tokens               -inf for stop tokens while the output has fewer tokens, unless nothing
                             else can follow: a grammar may be at its end

Temperature, filters and noise are the sampler's. All of it is a function of the prefix alone, so a
draft and its verification meet the same logits, and after a hand-off, a preemption or a migration
the state is made again from the tokens that are there. What is accepted moves it on for good;
drafts only for as long as they are looked at.

Shape letters: R rows, one for each of several prefixes that grow by one draft; V vocabulary, U
tokens that penalties touch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from hocket.execution.grammars.states import CompiledGrammar, GrammarState, apply_masks
from hocket.request_params import SamplingParams, StoppingParams


class Constraints:
    """The constraints of one sequence, at the end of its committed tokens."""

    def __init__(
        self,
        sampling: SamplingParams,
        stopping: StoppingParams,
        prompt: Seq[int],
        grammar: CompiledGrammar | None,
        device: torch.device,
    ) -> None:
        """`prompt` is what the client sent: tokens put out by an earlier attempt are output.
        `stopping.min_tokens` counts from the first output."""
        self._num_output = 0
        self._min_tokens = stopping.min_tokens
        stop_ids = sorted(stopping.stop_token_ids)  # perhaps none: torch must not guess the type
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self._penalties = Penalties(sampling, prompt) if sampling.has_penalties else None
        self._bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = (torch.tensor(ids, device=device), torch.tensor(values, device=device))
        self._grammar = None if grammar is None else GrammarState(grammar)

    @staticmethod
    def are_needed(sampling: SamplingParams, stopping: StoppingParams) -> bool:
        """Whether a request has any."""
        return bool(
            sampling.has_penalties
            or sampling.logit_bias
            or sampling.grammar is not None
            or stopping.min_tokens > 0
        )

    @property
    def num_output(self) -> int:
        """Output tokens committed so far."""
        return self._num_output

    def commit(self, token_ids: Seq[int]) -> None:
        """These tokens follow for good.

        Raises InternalError when the grammar does not take them: they were not sampled under it.
        """
        self._num_output += len(token_ids)
        if self._penalties is not None:
            self._penalties.commit(token_ids)
        if self._grammar is not None:
            self._grammar.commit(token_ids)

    def apply(self, logits_RV: Tensor, drafts: Seq[int] = (), first: int = 0) -> None:
        """Changes float32 logits in place: row i follows the committed tokens and the first
        `first + i` of `drafts`.

        A row behind a draft that the grammar refuses is left without its mask: that draft cannot
        be accepted, so nothing is taken from the row.
        """
        if self._penalties is not None:
            self._penalties.apply(logits_RV, drafts, first)
        if self._bias is not None:
            ids, values = self._bias
            logits_RV[:, ids] += values
        if self._grammar is not None:
            apply_masks(self._grammar, logits_RV, drafts, first)
        num_early = min(self._min_tokens - self._num_output - first, logits_RV.shape[0])
        if num_early > 0:
            early_RV = logits_RV[:num_early]
            held_RV = early_RV.index_fill(1, self._stop_ids, -torch.inf)
            can_go_on_R1 = held_RV.amax(dim=1, keepdim=True) != -torch.inf
            logits_RV[:num_early] = torch.where(can_go_on_R1, held_RV, early_RV)


class Penalties:
    """Which tokens are in prompt and output, and how often in the output."""

    def __init__(self, sampling: SamplingParams, prompt: Seq[int]) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        # The other two look at the output only.
        counted = dict.fromkeys(prompt, 0) if self._repetition != 1.0 else {}
        self._columns = {token: column for column, token in enumerate(counted)}
        self._counts = [0] * len(counted)
        self._num_prompt = len(counted)

    def commit(self, token_ids: Seq[int]) -> None:
        for token in token_ids:
            column = self._columns.setdefault(token, len(self._counts))
            if column == len(self._counts):
                self._counts.append(0)
            self._counts[column] += 1

    def apply(self, logits_RV: Tensor, drafts: Seq[int], first: int) -> None:
        """See `Constraints.apply`."""
        num_rows = logits_RV.shape[0]
        columns = dict(self._columns)
        for draft in drafts:
            columns.setdefault(draft, len(columns))
        if not columns:
            return
        counts_RU = np.zeros((num_rows, len(columns)), dtype=np.float32)
        counts_RU[:, : len(self._counts)] = self._counts
        for index, draft in enumerate(drafts):
            counts_RU[max(0, index + 1 - first) :, columns[draft]] += 1

        ids_U = torch.tensor(list(columns), device=logits_RV.device)
        counts = torch.from_numpy(counts_RU).to(logits_RV.device)
        is_put_out = counts > 0
        values_RU = logits_RV[:, ids_U]
        if self._repetition != 1.0:
            is_seen = is_put_out.clone()
            is_seen[:, : self._num_prompt] = True
            penalised = torch.where(
                values_RU > 0, values_RU / self._repetition, values_RU * self._repetition
            )
            values_RU = torch.where(is_seen, penalised, values_RU)
        values_RU -= self._frequency * counts + self._presence * is_put_out
        logits_RV[:, ids_U] = values_RU
