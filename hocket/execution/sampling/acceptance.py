"""Keeps drafts that the target would not have said: only where somebody asked for it by name.

Typical acceptance is a request's own choice, synthetic acceptance a worker's, for benchmarks of
speed: its output means nothing. Both are told in every answer (`Finish.acceptance`). By default
nothing is kept that the target does not say itself.

Shape letters: K drafts of one sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from hocket.execution.sampling.noise import position_uniform
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence


class Acceptance:
    """Which drafts are accepted, where the right ones alone are not."""

    def __init__(self, sampler: Sampler, synthetic_rate: float = 0.0) -> None:
        self._sampler = sampler
        self._synthetic_rate = synthetic_rate

    def keeps(
        self, sequence: Sequence, drafts: Seq[int], sampled: Seq[int], logits_KV: Tensor
    ) -> list[bool]:
        """For each draft whether it is kept, right or not; empty: the right ones are.

        `sampled` is what the target says at the drafts' positions, `logits_KV` what it says it by.
        """
        sampling = sequence.sampling
        if self._synthetic_rate > 0.0:
            positions = range(sequence.num_tokens, sequence.num_tokens + len(drafts))
            address = (sampling.seed, sampling.choice)
            return [position_uniform(*address, at) < self._synthetic_rate for at in positions]
        if sampling.acceptance is None or sampling.is_greedy or not drafts:
            return []
        probabilities_KV = self._sampler.probabilities(logits_KV, [sampling] * len(drafts))
        entropy_K = torch.special.entr(probabilities_KV).sum(dim=-1)
        limit_K = (sampling.acceptance.delta * (-entropy_K).exp()).clamp(
            max=sampling.acceptance.epsilon
        )
        drafts_K1 = torch.tensor(drafts, device=logits_KV.device)[:, None]
        is_typical = (probabilities_KV.gather(1, drafts_K1)[:, 0] > limit_K).tolist()
        triples = zip(is_typical, drafts, sampled, strict=False)
        return [typical or draft == token for typical, draft, token in triples]
