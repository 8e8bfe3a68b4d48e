"""Choose tokens: logits and sampling parameters in, token ids and logprobs out.

A sample is `argmax(filtered_logits / T + noise)` with addressed noise (`noise.py`); T = 0 is a
plain argmax. Ties go to the lowest token id everywhere. Drafts and target go through the same
code, so a draft is right exactly when the target would have said the same.

Most rows are decided by their 32 likeliest tokens: the filters (`token_filters.py`) end among
them, or no noise can lift another token above the best of them. For the rest the best score among
them says what noise another token needs (`beyond_heads.py`). All ways choose the same token, so
what a row gets depends on that row alone.
Shape letters: N rows, R of them, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hocket.execution.sampling.beyond_heads import OpenDraws
from hocket.execution.sampling.noise import LARGEST_NOISE, gumbel_noise, keys_tensor, position_key
from hocket.execution.sampling.token_filters import (
    SMALL_VOCABULARY,
    Draws,
    LogitPyramid,
    kept_by_filters,
    rows_of,
)
from hocket.request_params import SamplingParams
from hocket.types import TokenLogprobs

# Tokens sorted at first: the least that holds a row's top-k; beyond, the row is sorted.
HEAD_WIDTHS = (32, 64, 256, 1024)
# Where looking at more costs less than finding out who needs it: small vocabularies, and GPUs, for
# which a host would have to wait.
LEAST_DIRECT_WIDTH = 256

_Choose = Callable[[LogitPyramid, Tensor, Sequence[SamplingParams], Sequence[int]], Tensor]


class Sampler:
    """Samples rows of logits. Holds nothing but constants of the vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._token_ids_1V = torch.arange(vocab_size, device=device)[None]
        self._is_direct = device.type != "cpu" or vocab_size <= SMALL_VOCABULARY
        least_width = LEAST_DIRECT_WIDTH if self._is_direct else 0
        self._by_head_width = {
            width: partial(self._choose_among_heads, width)
            for width in (*HEAD_WIDTHS, vocab_size)
            if width >= least_width or width == vocab_size
        }

    def sample(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        """One token id per row, int64 [N], on the logits' device.

        `logits_NV` is float32; `positions[i]` is the index in prompt + output that row i's token
        will have. A row with a NaN, or without a finite logit, gets some valid id.
        """
        groups: dict[_Choose, list[int]] = {}
        for row, row_params in enumerate(params):
            groups.setdefault(self._way_to_choose(row_params), []).append(row)
        pyramid = LogitPyramid(logits_NV)
        tokens_N = torch.empty(len(params), dtype=torch.int64, device=logits_NV.device)
        for choose, rows in groups.items():
            rows_R = torch.tensor(rows, device=logits_NV.device)
            tokens_N[rows_R] = choose(
                pyramid, rows_R, [params[row] for row in rows], [positions[row] for row in rows]
            )
        return tokens_N

    def probabilities(self, logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """What `sample` draws from, temperature and filters applied, float64 [N, V].

        No temperature may be 0.
        """
        pyramid = LogitPyramid(logits_NV)
        rows_N = torch.arange(len(params), device=logits_NV.device)
        draws = self._draws(pyramid, rows_N, params, keys_R=torch.zeros_like(rows_N))
        weights_NV = draws.tempered(logits_NV).double().exp_()
        if any(self._is_filtered(row) for row in params):
            least_width = max(self._top_k(row) for row in params)
            for width in (max(HEAD_WIDTHS[-1], least_width), self.vocab_size):
                ids_NC, values_NC = pyramid.heads(rows_N, draws.max_R, draws.temperature_R, width)
                keep_NC, is_all_N = kept_by_filters(values_NC, draws, self.vocab_size)
                if bool(is_all_N.all()):
                    break
            kept_NV = torch.zeros_like(pyramid.padded, dtype=torch.bool)
            kept_NV.scatter_(1, ids_NC, keep_NC)
            weights_NV *= kept_NV[:, : self.vocab_size]
        return weights_NV / weights_NV.sum(dim=-1, keepdim=True)

    def logprobs(
        self, logits_NV: Tensor, token_ids_N: Tensor, num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Logprobs of the chosen tokens and the `num_top[i]` likeliest of each row, best first.

        They are `log_softmax` of the raw float32 logits: temperature and filters do not show.
        """
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        chosen = logprobs_NV.gather(1, token_ids_N[:, None])[:, 0].tolist()
        width = min(max(num_top), self.vocab_size)
        top_ids: list[list[int]] = [[]] * len(num_top)
        top_values: list[list[float]] = [[]] * len(num_top)
        if width > 0:
            rows_N = torch.arange(len(num_top), device=logits_NV.device)
            zero_N = torch.zeros(len(num_top), device=logits_NV.device)
            ids_NC, _ = LogitPyramid(logits_NV).heads(rows_N, zero_N, zero_N + 1.0, width)
            ids_NC.clamp_(max=self.vocab_size - 1)  # for rows of NaN
            top_ids = ids_NC.tolist()
            top_values = logprobs_NV.gather(1, ids_NC).tolist()
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, logprob, ids, values, top in zip(
                token_ids_N.tolist(), chosen, top_ids, top_values, num_top, strict=True
            )
        ]

    def _top_k(self, params: SamplingParams) -> int:
        """0 where it keeps all."""
        return params.top_k if params.top_k < self.vocab_size else 0

    def _is_filtered(self, params: SamplingParams) -> bool:
        return self._top_k(params) > 0 or params.top_p < 1.0 or params.min_p > 0.0

    def _way_to_choose(self, params: SamplingParams) -> _Choose:
        if params.is_greedy:
            return _choose_likeliest
        if self._is_direct and not self._is_filtered(params):
            return self._choose_with_all_noise
        top_k = self._top_k(params)
        return next(choose for width, choose in self._by_head_width.items() if top_k <= width)

    def _choose_with_all_noise(
        self,
        pyramid: LogitPyramid,
        rows_R: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> Tensor:
        logits_RV = rows_of(pyramid.logits_NV, rows_R)
        scores_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
        scores_RV /= _column([row.temperature for row in params], torch.float32, rows_R)[:, None]
        scores_RV += gumbel_noise(self._keys(params, positions), self._token_ids_1V)
        return scores_RV.argmax(dim=-1)

    def _choose_among_heads(
        self,
        width: int,
        pyramid: LogitPyramid,
        rows_R: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
    ) -> Tensor:
        draws = self._draws(pyramid, rows_R, params, self._keys(params, positions))
        ids_RC, values_RC = pyramid.heads(rows_R, draws.max_R, draws.temperature_R, width)
        keep_RC, is_all_R = kept_by_filters(values_RC, draws, self.vocab_size)
        scores_RC = values_RC + gumbel_noise(draws.keys_R, ids_RC)
        scores_RC.masked_fill_(~keep_RC, -torch.inf)
        best_R = scores_RC.amax(dim=-1)
        is_best_RC = scores_RC == best_R[:, None]
        # In a row of NaN none is best; the clamp makes an id of that.
        tokens_R = ids_RC.masked_fill(~is_best_RC, self.vocab_size).amin(dim=-1)
        tokens_R.clamp_(max=self.vocab_size - 1)

        may_another_win_R = values_RC[:, -1] + LARGEST_NOISE >= best_R
        open_R = (~is_all_R & may_another_win_R).nonzero()[:, 0]
        if len(open_R) > 0:
            tokens_R[open_R] = OpenDraws(pyramid, draws, best_R, tokens_R).take(open_R).choose()
        return tokens_R

    def _draws(
        self,
        pyramid: LogitPyramid,
        rows_R: Tensor,
        params: Sequence[SamplingParams],
        keys_R: Tensor,
    ) -> Draws:
        max_R = rows_of(pyramid.largest, rows_R)
        temperature_R = _column([row.temperature for row in params], torch.float32, rows_R)
        top_k = [self._top_k(row) or self.vocab_size for row in params]
        total_R = torch.full_like(max_R, torch.nan, dtype=torch.float64)
        measured = [i for i, row in enumerate(params) if row.top_p < 1.0 and not self._top_k(row)]
        if measured:
            at_R = torch.tensor(measured, device=rows_R.device)
            total_R[at_R] = pyramid.totals(rows_R[at_R], max_R[at_R], temperature_R[at_R])
        return Draws(
            rows_R,
            max_R,
            temperature_R,
            keys_R,
            top_k_R=_column(top_k, torch.int64, rows_R),
            top_p_R=_column([row.top_p for row in params], torch.float64, rows_R),
            min_p_R=_column([row.min_p for row in params], torch.float64, rows_R),
            total_R=total_R,
        )

    def _keys(self, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
        keys = [
            position_key(row.seed, row.choice, position)
            for row, position in zip(params, positions, strict=True)
        ]
        return keys_tensor(keys, self.device)


def _choose_likeliest(
    pyramid: LogitPyramid,
    rows_R: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
) -> Tensor:
    return pyramid.argmax(rows_R)


def _column(values: Sequence[float], dtype: torch.dtype, beside: Tensor) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=beside.device)
