"""Choose among all tokens of a row whose likeliest ones did not decide it.

The best score among those is a bound that any other token must reach, and the lower its logit, the
rarer the noise that lifts it there: few tokens are contenders. The best contender is the sample
unless it lies outside the nucleus; then all tokens after it do too, and the next best is tried.

Contenders are looked for among the tokens near the top, when these turn out to hold the nucleus;
else the noise's hash is compared with a bound over the whole row. Either way finds the same token.
Shape letters as in `token_filters.py`; P spans of a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.execution.sampling.noise import LARGEST_NOISE, gumbel_noise, may_reach
from hocket.execution.sampling.token_filters import (
    COARSE_SPAN,
    Draws,
    LogitPyramid,
    TokenList,
    true_places,
)

# Near the top is what exceeds the largest logit of this share of the spans of 128: some 2 % of a
# vocabulary whose likely tokens are spread evenly, more than most nuclei hold.
_FAR_SHARE = 0.1
# Hashes at a time: on a CPU, temporaries of 1 MiB stay in its caches.
_HASHES_TOGETHER = 1 << 17
_HASHES_TOGETHER_ON_GPU = 1 << 24


@dataclass(frozen=True, slots=True)
class OpenDraws:
    """Draws that their likeliest tokens did not decide. None has a top-k.

    `best_R` is the best score, float32, among a draw's likeliest tokens, all of which its filters
    keep; `best_ids_R` is whose it is.
    """

    pyramid: LogitPyramid
    draws: Draws
    best_R: Tensor
    best_ids_R: Tensor

    def take(self, draws: Tensor) -> OpenDraws:
        return OpenDraws(
            self.pyramid, self.draws.take(draws), self.best_R[draws], self.best_ids_R[draws]
        )

    def choose(self) -> Tensor:
        """The sample of each draw, int64 [R]. Waits for the device a few times."""
        tokens_R = self.best_ids_R.clone()
        is_open_R = torch.ones_like(tokens_R, dtype=torch.bool)
        nucleus_R = (self.draws.top_p_R < 1.0).nonzero()[:, 0]
        if len(nucleus_R) > 0:
            tokens_R[nucleus_R], is_sample_R = self.take(nucleus_R)._choose_near_the_top()
            is_open_R[nucleus_R] = ~is_sample_R
        open_R = is_open_R.nonzero()[:, 0]
        if len(open_R) > 0:
            tokens_R[open_R] = self.take(open_R)._choose_by_hash()
        return tokens_R

    def _choose_near_the_top(self) -> tuple[Tensor, Tensor]:
        """A token per draw, and whether it is the sample, bool [R]: the nucleus was near the top.

        Every draw has a nucleus.
        """
        draws = self.draws
        coarse_RS = self.pyramid.coarse[draws.rows_R]
        rank = 1 + int(_FAR_SHARE * coarse_RS.shape[1])
        least_R = coarse_RS.kthvalue(rank, dim=-1).values
        near = self.pyramid.at_least(draws, least_R)
        # Strictly above: a token that is not listed may equal the least, once tempered.
        is_above_E = near.values_E > near.of(draws.tempered(least_R[:, None])[:, 0])
        holds_nucleus_R = _mass(draws, near, is_above_E) >= draws.top_p_R * draws.total_R
        return self._best_inside(near, holds_nucleus_R, lambda _: near), holds_nucleus_R

    def _choose_by_hash(self) -> Tensor:
        """The sample of each draw, int64 [R]: looks at all tokens that may win."""
        draws = self.draws
        peaks_RS = draws.tempered(self.pyramid.coarse[draws.rows_R])
        least_R = torch.maximum(self.best_R - LARGEST_NOISE, draws.min_p_R.log().float() - 1e-4)
        draws_P, spans_P = (peaks_RS >= least_R[:, None]).nonzero(as_tuple=True)
        best_P, peaks_P = self.best_R[draws_P].double(), peaks_RS[draws_P, spans_P].double()
        # What a span's likeliest token needs, up to the rounding of scores; the others need more.
        needed_P = best_P - peaks_P - 1e-6 * (1.0 + best_P.abs() + peaks_P.abs())
        ids_P, keys_P = spans_P * COARSE_SPAN, draws.keys_R[draws_P]

        is_cpu = peaks_RS.device.type == "cpu"
        together = (_HASHES_TOGETHER if is_cpu else _HASHES_TOGETHER_ON_GPU) // COARSE_SPAN
        found: list[tuple[Tensor, Tensor]] = []
        for first, may_PX in may_reach(keys_P, ids_P, COARSE_SPAN, needed_P, together):
            place_E = true_places(may_PX)
            span_E = first + place_E // COARSE_SPAN
            found.append((draws_P[span_E], ids_P[span_E] + place_E % COARSE_SPAN))
        draws_E, ids_E = (torch.cat(parts) for parts in zip(*found, strict=True))
        return self._best_inside(
            self.pyramid.listed(draws, draws_E, ids_E),
            draws.top_p_R < 1.0,
            lambda logits_R: self.pyramid.at_least(draws, logits_R),
        )

    def _best_inside(
        self, tokens: TokenList, is_doubtful_R: Tensor, from_logit: Callable[[Tensor], TokenList]
    ) -> Tensor:
        """The best token that the filters keep, of those listed and the best known, int64 [R].

        For `is_doubtful_R` draws it must be inside the nucleus. `from_logit(logits_R)` lists at
        least the tokens of each draw from a raw logit on.
        """
        draws = self.draws
        noise_E = gumbel_noise(tokens.of(draws.keys_R), tokens.ids_E[:, None])[:, 0]
        scores_E = tokens.values_E + noise_E
        contender_E = (scores_E >= tokens.of(self.best_R)).nonzero()[:, 0]
        tokens, scores_E = tokens.take(contender_E), scores_E[contender_E]
        scores_E.masked_fill_(tokens.weights < tokens.of(draws.min_p_R), -torch.inf)
        all_R = torch.arange(len(draws.rows_R), device=draws.rows_R.device)
        while True:
            ids_R = self._best_ids(tokens, scores_E)
            # The best known is inside, and rounding must not say otherwise.
            is_doubtful_R = is_doubtful_R & (ids_R != self.best_ids_R)
            if not bool(is_doubtful_R.any()):
                return ids_R
            best = self.pyramid.listed(draws, all_R, ids_R)
            logits_R = self.pyramid.padded[draws.rows_R, ids_R]
            # A little lower: logits that differ so little may be equal once tempered.
            least_R = logits_R - (logits_R.abs() + draws.max_R.abs()) * 2.0**-20 - 1e-30
            listed = from_logit(least_R.masked_fill_(~is_doubtful_R, torch.inf))
            mass_R = _mass(draws, listed, _are_before(listed, best))
            is_doubtful_R &= mass_R >= draws.top_p_R * draws.total_R
            is_out_E = tokens.of(is_doubtful_R) & ~_are_before(tokens, best)
            scores_E.masked_fill_(is_out_E, -torch.inf)

    def _best_ids(self, tokens: TokenList, scores_E: Tensor) -> Tensor:
        """Whose score is best of the listed and the best known, the lowest id among equals."""
        best_R = self.best_R.scatter_reduce(0, tokens.draws_E, scores_E, "amax")
        no_id = self.pyramid.vocab_size
        ids_E = tokens.ids_E.masked_fill(scores_E != tokens.of(best_R), no_id)
        ids_R = self.best_ids_R.masked_fill(self.best_R != best_R, no_id)
        return ids_R.scatter_reduce(0, tokens.draws_E, ids_E, "amin")


def _are_before(tokens: TokenList, limits: TokenList) -> Tensor:
    """Whether each token comes before its draw's limit, bool [E]: larger, or equal and lower id."""
    limit_E = tokens.of(limits.values_E)
    has_lower_id_E = tokens.ids_E < tokens.of(limits.ids_E)
    return (tokens.values_E > limit_E) | ((tokens.values_E == limit_E) & has_lower_id_E)


def _mass(draws: Draws, tokens: TokenList, is_counted_E: Tensor) -> Tensor:
    """Weight of each draw's counted tokens, float64 [R]; a GPU adds in any order."""
    weights_E = torch.where(is_counted_E, tokens.weights, 0.0)
    return torch.zeros_like(draws.total_R).index_add_(0, tokens.draws_E, weights_E)
