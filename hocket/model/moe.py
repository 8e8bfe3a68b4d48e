"""Mixture of experts: router, routed experts, shared experts (DeepSeek-V3, arXiv 2412.19437).

The router runs in fp32. It chooses by score plus a learned correction bias, inside the best
groups of experts, and weighs by the score alone. Rows travel to experts and back through a
`TokenDispatcher`.

Shape letters: T tokens, H hidden size, E experts, G expert groups, K experts per token, I expert
width, R rows given to the experts here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.model.layers import GatedMLP
from hocket.model.model_config import ModelConfig
from hocket.model.numerics import Numerics
from hocket.parallel.expert_dispatch import ExpertRows, TokenDispatcher


class Router:
    """Chooses experts with grouped top-k of sigmoid scores. Weights are fp32."""

    def __init__(
        self, config: ModelConfig, weight_EH: torch.Tensor, bias_E: torch.Tensor, numerics: Numerics
    ) -> None:
        self._config = config
        self._numerics = numerics
        self.weight_EH = weight_EH
        self.bias_E = bias_E

    def __call__(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights fp32 [T, K] and experts int64 [T, K], best first."""
        config = self._config
        logits_TE = self._numerics.linear(x_TH.float(), self.weight_EH)
        scores_TE = self._numerics.sigmoid(logits_TE)
        choice_TE = scores_TE + self.bias_E
        if config.expert_groups_per_token < config.num_expert_groups:
            choice_TE = self._keep_best_groups(choice_TE)
        experts_TK = choice_TE.topk(config.experts_per_token, dim=-1).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        if config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        if config.routed_scaling_factor != 1.0:
            weights_TK = weights_TK * config.routed_scaling_factor
        return weights_TK, experts_TK

    def _keep_best_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        """A group's score is the sum of its two best experts; the rest becomes -inf."""
        grouped = choice_TE.unflatten(-1, (self._config.num_expert_groups, -1))
        group_scores_TG = grouped.topk(2, dim=-1).values.sum(-1)
        best = group_scores_TG.topk(self._config.expert_groups_per_token, dim=-1).indices
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True)
class Expert:
    """One expert's matrices: gate_up [2I, H], down [H, I], ready for `Numerics.linear`."""

    gate_up: torch.Tensor
    down: torch.Tensor


class Experts:
    """The routed experts of this rank."""

    def __init__(self, experts: list[Expert], numerics: Numerics) -> None:
        self._experts = experts
        self._numerics = numerics

    def __call__(self, rows: ExpertRows) -> torch.Tensor:
        """Each segment's rows through its expert, [R, H]."""
        numerics, hidden = self._numerics, rows.hidden_RH
        experts = [self._experts[expert] for expert, _, _ in rows.segments]
        sizes = [stop - start for _, start, stop in rows.segments]
        gated = numerics.gated(
            torch.cat(
                [
                    numerics.linear(part, expert.gate_up)
                    for part, expert in zip(hidden.split(sizes), experts, strict=True)
                ]
            )
        )
        return torch.cat(
            [
                numerics.linear(part, expert.down)
                for part, expert in zip(gated.split(sizes), experts, strict=True)
            ]
        )


class MoE:
    """Routed experts plus shared experts that every token takes."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedMLP | None,
        dispatcher: TokenDispatcher,
        numerics: Numerics,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self._dispatcher = dispatcher
        self._row_tile = numerics.row_tile

    def __call__(self, x_TH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[T, H]; rows from `num_tokens` on are padding and skip the routed experts."""
        weights_TK, experts_TK = self.router(x_TH)
        weights_TK, experts_TK = weights_TK[:num_tokens], experts_TK[:num_tokens]
        rows = self._dispatcher.dispatch(x_TH, experts_TK, self._row_tile)
        routed_TH = self._dispatcher.combine(self.experts(rows), rows, weights_TK)
        out_TH = torch.zeros_like(x_TH) if self.shared is None else self.shared(x_TH)
        out_TH[:num_tokens].add_(routed_TH)
        return out_TH
