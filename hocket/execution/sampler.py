"""Choose tokens: logits and sampling parameters in, token ids and logprobs out.

A sample is `argmax(filtered_logits / T + noise)` with addressed noise (`noise.py`); T = 0 is a
plain argmax. Ties go to the lowest token id everywhere. Drafts and target go through the same
code, so a draft is right exactly when the target would have said the same.

Filters act in the order temperature, top-k, top-p, min-p. Each keeps a head of the tokens sorted by
(logit descending, id ascending), so together they keep the shortest of the three heads, and only
the first `CANDIDATES` tokens need sorting as long as every head ends among them. What a row gets
depends on that row alone: its path and the widths of its tensors follow from its own values.
Shape letters: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hocket.execution.noise import gumbel_noise, keys_tensor, position_key
from hocket.types import SamplingParams, TokenLogprobs

CANDIDATES = 256

_Choose = Callable[[Tensor, Sequence[SamplingParams], Sequence[int]], Tensor]


class Sampler:
    """Samples rows of logits. Holds nothing but constants of the vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._token_ids_1V = torch.arange(vocab_size, device=device)[None]

    def sample(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        """One token id per row, int64 [N], on the logits' device.

        `logits_NV` is float32; `positions[i]` is the index in prompt + output that row i's token
        will have.
        """
        groups: dict[_Choose, list[int]] = {}
        for row, row_params in enumerate(params):
            groups.setdefault(self._way_to_choose(row_params), []).append(row)
        if len(groups) == 1:
            (choose,) = groups
            return choose(logits_NV, params, positions)
        tokens_N = torch.empty(len(params), dtype=torch.int64, device=logits_NV.device)
        for choose, rows in groups.items():
            rows_N = torch.tensor(rows, device=logits_NV.device)
            tokens_N[rows_N] = choose(
                logits_NV[rows_N], [params[row] for row in rows], [positions[row] for row in rows]
            )
        return tokens_N

    def logprobs(
        self, logits_NV: Tensor, token_ids_N: Tensor, num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Logprobs of the chosen tokens and the `num_top[i]` likeliest of each row, best first.

        They are `log_softmax` of the raw float32 logits: temperature and filters do not show.
        """
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        chosen = logprobs_NV.gather(1, token_ids_N[:, None])[:, 0].tolist()
        width = max(num_top)
        top_ids: list[list[int]] = [[]] * len(num_top)
        top_values: list[list[float]] = [[]] * len(num_top)
        if width > 0:
            ids_NC = _sorted_heads(logits_NV, min(width, self.vocab_size))
            top_ids = ids_NC.tolist()
            top_values = logprobs_NV.gather(1, ids_NC).tolist()
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, logprob, ids, values, top in zip(
                token_ids_N.tolist(), chosen, top_ids, top_values, num_top, strict=True
            )
        ]

    def _way_to_choose(self, params: SamplingParams) -> _Choose:
        if params.is_greedy:
            return _choose_greedy
        if 0 < params.top_k < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
            return self._choose_filtered
        return self._choose_plain

    def _choose_plain(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        scores_NV = _tempered(logits_NV, params)
        scores_NV += gumbel_noise(self._keys(params, positions), self._token_ids_1V)
        return scores_NV.argmax(dim=-1)

    def _choose_filtered(
        self, logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        tempered_NV = _tempered(logits_NV, params)
        keys_N = self._keys(params, positions)
        width = min(CANDIDATES, self.vocab_size)
        tokens_N, is_exact_N = _choose_among_heads(tempered_NV, params, keys_N, width)
        if not bool(is_exact_N.all()):
            rows_N = (~is_exact_N).nonzero()[:, 0]
            wide_params = [params[row] for row in rows_N.tolist()]
            tokens_N[rows_N], _ = _choose_among_heads(
                tempered_NV[rows_N], wide_params, keys_N[rows_N], self.vocab_size
            )
        return tokens_N

    def _keys(self, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
        keys = [
            position_key(row.seed, row.choice, position)
            for row, position in zip(params, positions, strict=True)
        ]
        return keys_tensor(keys, self.device)


def _choose_greedy(
    logits_NV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> Tensor:
    return logits_NV.argmax(dim=-1)  # the first of equal maxima, as torch documents


def _tempered(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(logits - their maximum) / T, a new tensor: the shift keeps tiny temperatures finite."""
    temperatures_N1 = _column([row.temperature for row in params], torch.float32, logits_NV.device)
    return (logits_NV - logits_NV.amax(dim=-1, keepdim=True)) / temperatures_N1


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


def _sorted_heads(values_NV: Tensor, width: int) -> Tensor:
    """Ids of the `width` largest values of each row, int64 [N, width], ties by lowest id.

    `topk` leaves the order of ties open, so it is asked for distinct integers: the value's bits,
    made monotone, above the id's complement.
    """
    bits_NV = (values_NV + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered_NV = torch.where(bits_NV < 0, bits_NV ^ 0x7FFFFFFF, bits_NV).to(torch.int64)
    complement_V = torch.arange(values_NV.shape[1] - 1, -1, -1, device=values_NV.device)
    keys_NV = (ordered_NV << 32) | complement_V
    keys_NC = torch.topk(keys_NV, width, dim=-1).values
    return values_NV.shape[1] - 1 - (keys_NC & 0xFFFFFFFF)


def _choose_among_heads(
    tempered_NV: Tensor, params: Sequence[SamplingParams], keys_N: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Sample from the first `width` tokens of each sorted row.

    Returns token ids [N] and whether the row's filters end inside the width, bool [N].
    """
    ids_NC = _sorted_heads(tempered_NV, width)
    values_NC = tempered_NV.gather(1, ids_NC)
    keep_NC, is_exact_N = _kept_by_filters(tempered_NV, values_NC, params)
    scores_NC = values_NC + gumbel_noise(keys_N, ids_NC)
    scores_NC = scores_NC.masked_fill(~keep_NC, -torch.inf)
    is_best_NC = scores_NC == scores_NC.amax(dim=-1, keepdim=True)
    return ids_NC.masked_fill(~is_best_NC, tempered_NV.shape[1]).amin(dim=-1), is_exact_N


def _kept_by_filters(
    tempered_NV: Tensor, values_NC: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Which of a row's first C sorted tokens its filters keep, bool [N, C]; whether that is all
    they keep, bool [N]."""
    device, vocab_size, width = values_NC.device, tempered_NV.shape[1], values_NC.shape[1]
    top_k_N1 = _column(
        [min(row.top_k or vocab_size, vocab_size) for row in params], torch.int64, device
    )
    top_p_N1 = _column([row.top_p for row in params], torch.float64, device)
    min_p_N1 = _column([row.min_p for row in params], torch.float64, device)
    weights_NC = values_NC.to(torch.float64).exp()  # relative to the likeliest token's
    cumulative_NC = weights_NC.cumsum(dim=-1)

    # The nucleus is a share of what top-k left: the first k candidates, or the whole row. With
    # more than C but not all left, C candidates can't tell.
    head_total_N1 = cumulative_NC.gather(1, (top_k_N1 - 1).clamp(max=width - 1))
    likeliest_N1 = torch.softmax(tempered_NV, dim=-1).amax(dim=-1, keepdim=True)
    total_N1 = torch.where(top_k_N1 <= width, head_total_N1, 1.0 / likeliest_N1.double())
    rank_C = torch.arange(width, device=device)
    in_nucleus_NC = (cumulative_NC - weights_NC < top_p_N1 * total_N1) | (top_p_N1 >= 1.0)

    keep_NC = (rank_C < top_k_N1) & in_nucleus_NC & (weights_NC >= min_p_N1)
    keep_NC[:, 0] = True
    is_total_known_N1 = (top_k_N1 <= width) | (top_k_N1 == vocab_size) | (top_p_N1 >= 1.0)
    ends_inside_N1 = (top_k_N1 <= width) | (~keep_NC[:, -1:] & is_total_known_N1)
    return keep_NC, ends_inside_N1[:, 0] | (width == vocab_size)
