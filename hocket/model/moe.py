"""Mixture of experts: router, routed experts, shared experts (DeepSeek-V3, arXiv 2412.19437).

The router runs in fp32. It chooses by score plus a learned correction bias, inside the best
groups of experts, and weighs by the score alone. Rows travel to experts and back through a
`TokenDispatcher`.

Shape letters: T tokens, H hidden size, E experts, G expert groups, K experts per token, I expert
width, R rows given to the experts here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hocket.model.layers import GatedMLP
from hocket.model.model_config import ModelConfig
from hocket.model.numerics import Numerics, Weight
from hocket.model.row_tables import RowTable
from hocket.parallel.expert_dispatch import ExpertRows, TokenDispatcher


class Router:
    """Chooses experts with grouped top-k of sigmoid scores. Weights are fp32."""

    def __init__(
        self, config: ModelConfig, weight_EH: Weight, bias_E: torch.Tensor, numerics: Numerics
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
            weights_TK.div_(weights_TK.sum(-1, keepdim=True).add_(1e-20))
        if config.routed_scaling_factor != 1.0:
            weights_TK.mul_(config.routed_scaling_factor)
        return weights_TK, experts_TK

    def no_choice(self, device: torch.device) -> torch.Tensor:
        """The experts of no token at all, int64 [0, K]."""
        return torch.empty(0, self._config.experts_per_token, dtype=torch.int64, device=device)

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

    gate_up: Weight
    down: Weight


class Experts:
    """The routed experts of this rank, by number."""

    def __init__(self, experts: Mapping[int, Expert], numerics: Numerics) -> None:
        self._experts = experts
        self._numerics = numerics

    def __call__(self, rows: ExpertRows) -> torch.Tensor:
        """Each segment's rows through its expert, [R, H]."""
        numerics, hidden = self._numerics, rows.hidden_RH
        if not rows.segments:
            return hidden
        experts = [self._experts[expert] for expert, _, _ in rows.segments]
        sizes = [stop - start for _, start, stop in rows.segments]
        gate_up = numerics.linear_each(hidden, sizes, [expert.gate_up for expert in experts])
        downs = [expert.down for expert in experts]
        return numerics.linear_each(numerics.gated(gate_up), sizes, downs)


class ExpertTables:
    """The experts of one rank as two tables, for steps of few rows per expert.

    The shared experts, cut to the width of a routed one, follow the routed ones: a step of very
    few tokens takes them along as experts that everyone chooses with weight 1.
    """

    MAX_ROWS_PER_EXPERT = 5
    """With more rows per expert on average, real products pay."""
    MAX_TOKENS_WITH_SHARED = 2
    MAX_UNSORTED_TOKENS = 4

    def __init__(
        self,
        experts: list[tuple[torch.Tensor, torch.Tensor]],
        num_shared: int,
        num_chosen: int,
        numerics: Numerics,
    ) -> None:
        """`experts` is (gate_up [2I, H], down [H, I]) of each, the last `num_shared` shared."""
        num_routed = len(experts) - num_shared
        self.max_tokens = self.MAX_ROWS_PER_EXPERT * num_routed // num_chosen
        # A sum over parts of a wider expert has other bits than the whole.
        self.takes_shared = num_shared == 1 or (num_shared > 0 and not numerics.is_batch_invariant)
        max_products = self.max_tokens * num_chosen + self.MAX_TOKENS_WITH_SHARED * num_shared
        gate_ups, downs = zip(*experts, strict=True)
        self._gate_up = RowTable([numerics.as_multiplied(w) for w in gate_ups], max_products)
        self._down = RowTable([numerics.as_multiplied(w) for w in downs], max_products)
        shape = (self.MAX_TOKENS_WITH_SHARED, num_shared)
        self._shared_TS = torch.arange(num_routed, len(experts)).expand(shape).contiguous()
        self._ones_TS = torch.ones(shape)
        self._numerics = numerics

    def with_shared(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        """What `__call__` gives, and the shared experts' part added, [T, H]."""
        num_tokens, num_chosen = experts_TK.shape
        experts_TK = torch.cat([experts_TK, self._shared_TS[:num_tokens]], -1)
        if self._numerics.is_batch_invariant:
            # Added like a shared expert that was computed elsewhere.
            result_TKH = self._each(x_TH, experts_TK).view(num_tokens, num_chosen + 1, -1)
            routed_TH = _weighted(result_TKH[:, :num_chosen].float(), weights_TK)
            return result_TKH[:, num_chosen].add_(routed_TH)
        weights_TK = torch.cat([weights_TK, self._ones_TS[:num_tokens]], -1)
        return self(x_TH, weights_TK, experts_TK)

    def __call__(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        """sum over k of weight * expert(x), [T, H]; fp32 in batch-invariant mode."""
        num_tokens, num_chosen = experts_TK.shape
        if num_tokens > self.MAX_UNSORTED_TOKENS:
            return self._sorted(x_TH, weights_TK, experts_TK)
        if self._numerics.is_batch_invariant:
            result_TKH = self._each(x_TH, experts_TK).view(num_tokens, num_chosen, -1)
            return _weighted(result_TKH.float(), weights_TK)
        gated_TKI = self._gated(x_TH, experts_TK).view(num_tokens, num_chosen, -1)
        return self._down.sums(gated_TKI.mul_(weights_TK[..., None]), experts_TK)

    def _gated(self, x_TH: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Row by row in order of (token, k), [T * K, I]."""
        x_TKH = x_TH[:, None].expand(-1, experts_TK.shape[1], -1)
        x_R1H = x_TKH.reshape(-1, 1, x_TH.shape[1])
        return self._numerics.gated(self._gate_up.sums(x_R1H, experts_TK.view(-1, 1)))

    def _each(self, x_TH: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        """Every chosen expert's own result, [T * K, H]."""
        gated_R1I = self._gated(x_TH, experts_TK)[:, None]
        return self._down.sums(gated_R1I, experts_TK.view(-1, 1))

    def _sorted(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        """Rows sorted by expert: one reads its matrices from memory, the next from the cache."""
        experts_R, order_R = experts_TK.view(-1).sort()
        tokens_R = order_R.div(experts_TK.shape[1], rounding_mode="floor")
        x_R1H = x_TH.index_select(0, tokens_R)[:, None]
        gated_RI = self._numerics.gated(self._gate_up.sums(x_R1H, experts_R[:, None]))
        result_RH = self._down.sums(gated_RI[:, None], experts_R[:, None])
        result_TKH = torch.empty_like(result_RH, dtype=torch.float32)
        result_TKH.index_copy_(0, order_R, result_RH.float())
        routed_TH = _weighted(result_TKH.view(*experts_TK.shape, -1), weights_TK)
        return routed_TH if self._numerics.is_batch_invariant else routed_TH.to(x_TH.dtype)


def _weighted(result_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """sum over k of weight * result, fp32 [T, H], as a dispatcher combines."""
    return torch.bmm(weights_TK[:, None], result_TKH)[:, 0]


class MoE:
    """Routed experts plus shared experts that every token takes."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedMLP | None,
        dispatcher: TokenDispatcher,
        numerics: Numerics,
        tables: ExpertTables | None = None,
    ) -> None:
        """`tables` holds the same experts once more; only for a rank that owns them all."""
        self.router = router
        self.experts = experts
        self.shared = shared
        self.tables = tables
        self._dispatcher = dispatcher
        self._row_tile = numerics.row_tile

    def __call__(self, x_TH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[T, H]; rows from `num_tokens` on are padding and skip the routed experts."""
        weights_TK, experts_TK = self.router(x_TH)
        if self.tables is not None and num_tokens <= self.tables.max_tokens:
            return self._by_tables(self.tables, x_TH, weights_TK, experts_TK)
        weights_TK, experts_TK = weights_TK[:num_tokens], experts_TK[:num_tokens]
        rows = self._dispatcher.dispatch(x_TH, experts_TK, self._row_tile)
        routed_TH = self._dispatcher.combine(self.experts(rows), rows, weights_TK)
        out_TH = torch.zeros_like(x_TH) if self.shared is None else self.shared(x_TH)
        out_TH[:num_tokens].add_(routed_TH)
        return out_TH

    def take_part(self, nothing_0H: torch.Tensor) -> None:
        """This rank's share of a pass in which it has no tokens: others' rows for its experts."""
        experts_0K = self.router.no_choice(nothing_0H.device)
        rows = self._dispatcher.dispatch(nothing_0H, experts_0K, self._row_tile)
        self._dispatcher.combine(self.experts(rows), rows, experts_0K.float())

    def _by_tables(
        self,
        tables: ExpertTables,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
    ) -> torch.Tensor:
        if self.shared is None:
            return tables(x_TH, weights_TK, experts_TK).to(x_TH.dtype)
        if tables.takes_shared and x_TH.shape[0] <= tables.MAX_TOKENS_WITH_SHARED:
            return tables.with_shared(x_TH, weights_TK, experts_TK)
        return self.shared(x_TH).add_(tables(x_TH, weights_TK, experts_TK))
