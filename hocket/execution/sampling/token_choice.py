"""From the main model's logits to the tokens that a step emits, and their logprobs.

`model_runner` gives the logits behind each newest token and draft. A request's constraints change
them (`constraints.py`), the sampler samples at every position (`sampler.py`), the right drafts are
kept (`drafting.speculation.accept`, `acceptance.py`). Logprobs are of the model's own logits.

Shape letters: T rows of a flat batch, one for each newest token and draft; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hocket.errors import InternalError
from hocket.execution.drafting.speculation import accept
from hocket.execution.sampling.acceptance import Acceptance
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence
from hocket.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a step emits for one sequence; `logprobs` is empty or one per token."""

    token_ids: list[int]
    logprobs: tuple[TokenLogprobs, ...]


class TokenChoice:
    """Chooses tokens on one device. Holds nothing of any request."""

    def __init__(self, sampler: Sampler, synthetic_acceptance: float) -> None:
        self.sampler = sampler
        self._acceptance = Acceptance(sampler, synthetic_acceptance)

    def emit(
        self, logits_TV: Tensor, sequences: Seq[Sequence], drafts: Seq[Seq[int]]
    ) -> list[Emitted]:
        """The tokens of each sequence: as many drafts as are accepted, and one more.

        `logits_TV` is float32; row j of a sequence follows its tokens and the first j of its
        drafts. Raises InternalError on NaN.
        """
        if bool(logits_TV.amax().isnan()):
            raise InternalError("the model computed NaN logits; its weights or cache are damaged")
        ends = accumulate((len(proposed) + 1 for proposed in drafts), initial=0)
        spans = [range(start, end) for start, end in pairwise(ends)]
        constrained_TV = self._constrained(logits_TV, sequences, drafts, spans)
        params = [s.sampling for s, span in zip(sequences, spans, strict=True) for _ in span]
        positions = [
            s.num_tokens + index
            for s, span in zip(sequences, spans, strict=True)
            for index in range(len(span))
        ]
        sampled = self.sampler.sample(constrained_TV, params, positions).tolist()
        emitted: list[list[int]] = []
        for sequence, proposed, span in zip(sequences, drafts, spans, strict=True):
            rows_KV = constrained_TV[span.start : span.stop - 1]
            here = sampled[span.start : span.stop]
            is_kept = self._acceptance.keeps(sequence, proposed, here, rows_KV)
            emitted.append(accept(proposed, here, is_kept))
        logprobs = self._logprobs(logits_TV, sequences, emitted, spans)
        return [Emitted(*pair) for pair in zip(emitted, logprobs, strict=True)]

    def score(self, logits_TV: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens, and of the `num_top` likeliest in the place of each."""
        tokens_T = torch.tensor(token_ids, device=logits_TV.device)
        return self.sampler.logprobs(logits_TV, tokens_T, [num_top] * len(token_ids))

    @staticmethod
    def _constrained(
        logits_TV: Tensor,
        sequences: Seq[Sequence],
        drafts: Seq[Seq[int]],
        spans: Seq[range],
    ) -> Tensor:
        """The logits to sample from. A copy where anything changes: logprobs need the others."""
        if not any(sequence.is_constrained for sequence in sequences):
            return logits_TV
        logits_TV = logits_TV.clone()
        for sequence, proposed, span in zip(sequences, drafts, spans, strict=True):
            sequence.constrain(logits_TV[span.start : span.stop], proposed)
        return logits_TV

    def _logprobs(
        self,
        logits_TV: Tensor,
        sequences: Seq[Sequence],
        emitted: Seq[list[int]],
        spans: Seq[range],
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Of each sequence's tokens, where it asks for them."""
        num_top = [sequence.sampling.top_logprobs for sequence in sequences]
        wanted = [
            (row, token, top)
            for top, tokens, span in zip(num_top, emitted, spans, strict=True)
            if top is not None
            for row, token in zip(span, tokens, strict=False)
        ]
        if not wanted:
            return [()] * len(sequences)
        rows, tokens, tops = zip(*wanted, strict=True)
        rows_N, tokens_N = (torch.tensor(ids, device=logits_TV.device) for ids in (rows, tokens))
        found = iter(self.sampler.logprobs(logits_TV[rows_N], tokens_N, tops))
        return [
            () if top is None else tuple(next(found) for _ in tokens)
            for top, tokens in zip(num_top, emitted, strict=True)
        ]
