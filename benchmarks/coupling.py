"""The chance that a draft is right, from the two distributions it depends on. NumPy only.

p is what the target samples from at a position, q what the draft is sampled from, both after
temperature and filters. `docs/coupled-sampling.md` says where the formulas come from.
Shape letters: N positions, V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]


def filtered(logits_NV: NDArray[np.float32], temperature: float, top_p: float) -> Probabilities:
    """What the sampler samples from, [N, V]: temperature, then top-p, ties by lowest id."""
    highest_N1 = logits_NV.max(axis=1, keepdims=True)
    tempered_NV = (logits_NV - highest_N1) / np.float32(temperature)
    weights_NV = np.exp(tempered_NV.astype(np.float64))
    if top_p < 1.0:
        order_NV = np.argsort(-tempered_NV, axis=1, kind="stable")
        sorted_NV = np.take_along_axis(weights_NV, order_NV, axis=1)
        before_NV = sorted_NV.cumsum(axis=1) - sorted_NV
        keep_NV = before_NV < top_p * sorted_NV.sum(axis=1, keepdims=True)
        keep_NV[:, 0] = True
        np.put_along_axis(weights_NV, order_NV, np.where(keep_NV, sorted_NV, 0.0), axis=1)
    return weights_NV / weights_NV.sum(axis=1, keepdims=True)


def optimum(p_NV: Probabilities, q_NV: Probabilities) -> Probabilities:
    """1 - D, [N], D the total variation between p and q: no way to draft and verify is right more
    often; rejection sampling of a sampled draft is as often (arXiv 2211.17192, section 3.2)."""
    return np.minimum(p_NV, q_NV).sum(axis=1)


def lower_bound(p_NV: Probabilities, q_NV: Probabilities) -> Probabilities:
    """(1 - D) / (1 + D), [N]: shared noise is right at least so often (arXiv 2408.07978)."""
    overlap_N = optimum(p_NV, q_NV)
    return overlap_N / (2.0 - overlap_N)


def argmax_acceptance(p_NV: Probabilities, q_NV: Probabilities) -> Probabilities:
    """[N]: the draft is q's likeliest token, the target samples."""
    return np.take_along_axis(p_NV, q_NV.argmax(axis=1)[:, None], axis=1)[:, 0]


def coupled_acceptance(p_NV: Probabilities, q_NV: Probabilities) -> Probabilities:
    """[N]: draft and target are sampled with the same Gumbel noise,

        sum over x of 1 / (sum over y of max(p_y / p_x, q_y / q_x)).

    With the tokens sorted by p / q, the first ratio is the larger one for all y up to x, the second
    for all behind it, so two running sums replace the inner sum.
    """
    ratio_NV = np.divide(p_NV, q_NV, out=np.full_like(p_NV, np.inf), where=q_NV > 0.0)
    order_NV = np.argsort(-ratio_NV, axis=1)
    p_NV = np.take_along_axis(p_NV, order_NV, axis=1)
    q_NV = np.take_along_axis(q_NV, order_NV, axis=1)
    head_NV = p_NV.cumsum(axis=1)
    tail_NV = q_NV[:, ::-1].cumsum(axis=1)[:, ::-1] - q_NV
    product_NV = p_NV * q_NV
    scale_NV = head_NV * q_NV + tail_NV * p_NV
    return np.divide(product_NV, scale_NV, out=np.zeros_like(p_NV), where=product_NV > 0.0).sum(
        axis=1
    )


def simulate(
    p_NV: Probabilities, q_NV: Probabilities, num_draws: int, random: np.random.Generator
) -> int:
    """How often both choose alike, with `num_draws` rows of fresh Gumbel noise a position."""
    with np.errstate(divide="ignore"):
        log_p_NV, log_q_NV = np.log(p_NV), np.log(q_NV)
    num_equal = 0
    for _ in range(num_draws):
        noise_NV = random.gumbel(size=p_NV.shape)
        chosen_N = (log_p_NV + noise_NV).argmax(axis=1)
        num_equal += int((chosen_N == (log_q_NV + noise_NV).argmax(axis=1)).sum())
    return num_equal
