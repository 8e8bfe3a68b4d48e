"""Which tokens a row's filters keep, found without sorting the vocabulary.

Filters act in the order temperature, top-k, top-p, min-p. Each keeps a head of the tokens sorted by
(tempered logit descending, id ascending), so together they keep the shortest of the three heads,
and a head is all that needs sorting. `LogitPyramid` finds it: the first C tokens lie in the first C
spans of the vocabulary, when these are sorted by (largest logit descending, place ascending). What
comes out is what sorting everything says, ties included. `sampler.py` chooses among these tokens.

Shape letters: N rows, R of them that are drawn for, V vocabulary, S spans, X tokens of a span, C
candidates, E entries of a list of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

SMALL_VOCABULARY = 8192  # looked at as a whole
_FINE_BITS = 5
FINE_SPAN = 1 << _FINE_BITS
COARSE_SPAN = 128
_ROWS_TOGETHER = 2  # on a CPU: a MiB, which stays in its caches
_LARGEST_ID = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draws:
    """R rows to draw a token for: which rows of the pyramid (ascending), and what is asked of them.

    `total_R` is the weight of the whole row, relative to its likeliest token, where the nucleus is
    a share of the whole row; NaN elsewhere. Weights and shares are float64.
    """

    rows_R: Tensor
    max_R: Tensor
    temperature_R: Tensor
    keys_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    min_p_R: Tensor
    total_R: Tensor

    def take(self, draws: Tensor) -> Draws:
        return Draws(*(getattr(self, field.name)[draws] for field in fields(self)))

    def tempered(self, logits_RC: Tensor) -> Tensor:
        """(logits - their maximum) / T: the shift keeps tiny temperatures finite."""
        return (logits_RC - self.max_R[:, None]).div_(self.temperature_R[:, None])


@dataclass(frozen=True)
class TokenList:
    """Tokens of several draws in no order: the draw, the id, the tempered logit of each."""

    draws_E: Tensor
    ids_E: Tensor
    values_E: Tensor

    def of(self, column_R: Tensor) -> Tensor:
        """What each token's draw has in a column (faster than `column_R[draws_E]`)."""
        return column_R.index_select(0, self.draws_E)

    def take(self, entries: Tensor) -> TokenList:
        return TokenList(self.draws_E[entries], self.ids_E[entries], self.values_E[entries])

    @cached_property
    def weights(self) -> Tensor:
        """Relative to the likeliest token's, float64 [E]."""
        return self.values_E.to(torch.float64).exp_()


class LogitPyramid:
    """Rows of logits [N, V], float32, under the largest of every 32 and of every 128 of them."""

    def __init__(self, logits_NV: Tensor) -> None:
        self.logits_NV = logits_NV
        self.vocab_size = logits_NV.shape[1]
        self._is_flat = self.vocab_size <= SMALL_VOCABULARY

    @cached_property
    def padded(self) -> Tensor:
        """The logits, contiguous, with -inf up to a whole number of 128."""
        padding = -self.vocab_size % COARSE_SPAN
        if padding > 0:
            return torch.nn.functional.pad(self.logits_NV, (0, padding), value=-torch.inf)
        return self.logits_NV.contiguous()

    @cached_property
    def fine(self) -> Tensor:
        """The largest of each span of 32, [N, S]."""
        return self.padded.unflatten(1, (-1, FINE_SPAN)).amax(dim=-1)

    @cached_property
    def coarse(self) -> Tensor:
        """The largest of each span of 128, [N, S / 4]."""
        return self.fine.unflatten(1, (-1, COARSE_SPAN // FINE_SPAN)).amax(dim=-1)

    @cached_property
    def largest(self) -> Tensor:
        """The largest of each row, [N]."""
        return (self.logits_NV if self._is_flat else self.coarse).amax(dim=-1)

    def argmax(self, rows_R: Tensor) -> Tensor:
        """The likeliest token of each row, int64 [R]; the first of equals, as torch documents."""
        if self._is_flat:
            return rows_of(self.logits_NV, rows_R).argmax(dim=-1)
        spans_R = rows_of(self.coarse, rows_R).argmax(dim=-1)
        logits_RX = self.padded.unflatten(1, (-1, COARSE_SPAN))[rows_R, spans_R]
        return spans_R * COARSE_SPAN + logits_RX.argmax(dim=-1)

    def heads(
        self, rows_R: Tensor, shift_R: Tensor, scale_R: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """The first `width` tokens of each row by ((logit - shift) / scale descending, id
        ascending): their ids, int64 [R, C], and those values.

        A row that is shorter comes whole, with ids from `vocab_size` on, -inf, as last.
        """

        def first(ids_RC: Tensor, logits_RC: Tensor) -> tuple[Tensor, Tensor]:
            values_RC = (logits_RC - shift_R[:, None]).div_(scale_R[:, None])
            return _sorted_heads(ids_RC, values_RC, width)

        levels = (self.padded,) if self._is_flat else (self.coarse, self.fine, self.padded)
        num_spans = levels[0].shape[1]
        spans_1S = torch.arange(num_spans, device=rows_R.device)[None]
        ids_RC, values_RC = first(spans_1S, rows_of(levels[0], rows_R))
        for finer_NS in levels[1:]:
            size = finer_NS.shape[1] // num_spans
            source_RC = rows_R[:, None] * num_spans + ids_RC
            logits_RC = finer_NS.view(-1, size).index_select(0, source_RC.flatten())
            ids_RCX = ids_RC[:, :, None] * size + torch.arange(size, device=rows_R.device)
            ids_RC, values_RC = first(ids_RCX.flatten(1), logits_RC.view(len(rows_R), -1))
            num_spans = finer_NS.shape[1]
        return ids_RC, values_RC

    def totals(self, rows_R: Tensor, max_R: Tensor, temperature_R: Tensor) -> Tensor:
        """Weight of whole rows relative to their likeliest token, float64 [R]."""
        columns = rows_of(self.padded, rows_R), max_R[:, None], temperature_R[:, None]
        together = _ROWS_TOGETHER if rows_R.device.type == "cpu" else len(rows_R)
        parts: list[Tensor] = []
        for logits, maximum, temperature in zip(*(c.split(together) for c in columns), strict=True):
            # Where it underflows, exp takes a thousand times as long on a CPU.
            values = (logits - maximum).div_(temperature).clamp_(min=-87.0)
            parts.append(values.exp_().unflatten(1, (-1, COARSE_SPAN)).sum(dim=-1))
        return torch.cat(parts).double().cumsum(dim=-1)[:, -1]  # of one order, whatever the batch

    def at_least(self, draws: Draws, logits_R: Tensor) -> TokenList:
        """All tokens of each draw's row whose logit is at least the draw's in `logits_R`."""
        fine_RS = rows_of(self.fine, draws.rows_R)
        draws_P, spans_P = (fine_RS >= logits_R[:, None]).nonzero(as_tuple=True)
        source_P = draws.rows_R.index_select(0, draws_P) * fine_RS.shape[1] + spans_P
        logits_PX = self.padded.view(-1, FINE_SPAN).index_select(0, source_P)
        # Into int8: a comparison that writes bool takes more than twice as long on a CPU.
        is_listed_PX = torch.empty_like(logits_PX, dtype=torch.int8)
        least_P1 = logits_R.index_select(0, draws_P)[:, None]
        place_E = true_places(torch.ge(logits_PX, least_P1, out=is_listed_PX))
        span_E = place_E >> _FINE_BITS
        draws_E = draws_P.index_select(0, span_E)
        ids_E = (spans_P.index_select(0, span_E) << _FINE_BITS) | (place_E & (FINE_SPAN - 1))
        return _token_list(draws, draws_E, ids_E, logits_PX.flatten().index_select(0, place_E))

    def listed(self, draws: Draws, draws_E: Tensor, ids_E: Tensor) -> TokenList:
        """Tokens of the draws' rows by id."""
        return _token_list(draws, draws_E, ids_E, self.padded[draws.rows_R[draws_E], ids_E])


def true_places(mask: Tensor) -> Tensor:
    """Flat places of the ones among zeros, ascending, int64. The mask is bool or int8, and its last
    dimension a multiple of 8.

    Faster than `nonzero` when they are few: most groups of eight are dismissed as one integer.
    """
    words_W = mask.view(torch.int64).flatten()
    used_W = words_W.nonzero()[:, 0]
    flat_E = words_W.index_select(0, used_W).view(torch.int8).nonzero()[:, 0]
    return (used_W.index_select(0, flat_E >> 3) << 3) | (flat_E & 7)


def kept_by_filters(values_RC: Tensor, draws: Draws, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Which of a row's first C tokens its filters keep, bool [R, C]; whether that is all they keep,
    bool [R]. A `top_k` other than the whole vocabulary must not exceed C."""
    width = values_RC.shape[1]
    top_k_R1, top_p_R1 = draws.top_k_R[:, None], draws.top_p_R[:, None]
    weights_RC = values_RC.to(torch.float64).exp()  # relative to the likeliest token's
    cumulative_RC = weights_RC.cumsum(dim=-1)

    # The nucleus is a share of what top-k left.
    has_top_k_R1 = top_k_R1 < vocab_size
    head_total_R1 = cumulative_RC.gather(1, (top_k_R1 - 1).clamp(max=width - 1))
    total_R1 = torch.where(has_top_k_R1, head_total_R1, draws.total_R[:, None])
    in_nucleus_RC = (cumulative_RC - weights_RC < top_p_R1 * total_R1) | (top_p_R1 >= 1.0)

    rank_C = torch.arange(width, device=values_RC.device)
    keep_RC = (rank_C < top_k_R1) & in_nucleus_RC & (weights_RC >= draws.min_p_R[:, None])
    keep_RC[:, 0] = True
    return keep_RC, (has_top_k_R1 | ~keep_RC[:, -1:])[:, 0] | (width >= vocab_size)


def rows_of(tensor: Tensor, rows_R: Tensor) -> Tensor:
    """`tensor[rows_R]`, without a copy when that is all rows (they ascend)."""
    return tensor if len(rows_R) == len(tensor) else tensor[rows_R]


def _token_list(draws: Draws, draws_E: Tensor, ids_E: Tensor, logits_E: Tensor) -> TokenList:
    shifted_E = logits_E - draws.max_R.index_select(0, draws_E)
    return TokenList(draws_E, ids_E, shifted_E.div_(draws.temperature_R.index_select(0, draws_E)))


def _sorted_heads(ids_RC: Tensor, values_RC: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` by (value descending, id ascending); ids are distinct, `[1, C]` is enough.

    `topk` leaves the order of ties open, so it is asked for distinct integers: the value's bits,
    made monotone, above the id's complement.
    """
    bits_RC = (values_RC + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered_RC = (bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF)).to(torch.int64)
    keys_RC = (ordered_RC << 32) | (_LARGEST_ID - ids_RC)
    top = torch.topk(keys_RC, min(width, keys_RC.shape[1]), dim=-1)
    return _LARGEST_ID - (top.values & _LARGEST_ID), values_RC.gather(1, top.indices)
