"""The sampler as its docstring defines it: one row, everything sorted, noise for every token."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import torch

from hocket.execution.sampling.noise import gumbel_noise, keys_tensor, position_key
from hocket.request_params import SamplingParams

KINDS = ("normal", "peaky", "flat", "tied", "round", "masked", "nearly equal", "by id")


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> tuple[npt.NDArray, npt.NDArray]:
    """The tempered logits of one row, and the ids that the filters keep, likeliest first."""
    x = ((logits - logits.max()) / torch.tensor(params.temperature)).numpy()
    order = np.lexsort((np.arange(len(x)), -x))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(x[order].astype(np.float64))
    before = np.cumsum(weights) - weights
    keep = weights >= params.min_p
    if params.top_p < 1.0:
        keep &= before < params.top_p * weights.sum()
    keep[0] = True
    return x, order[keep]


def reference_sample(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.is_greedy:
        return int(np.argmax(logits.numpy()))
    x, kept = kept_tokens(logits, params)
    key = keys_tensor([position_key(params.seed, params.choice, position)], torch.device("cpu"))
    noise = gumbel_noise(key, torch.arange(len(x))[None])[0].numpy()
    kept = np.sort(kept)
    return int(kept[np.argmax(x[kept] + noise[kept])])  # the first of equals


def random_logits(random: Random, rows: int, vocab_size: int) -> torch.Tensor:
    """Rows of one of `KINDS`, float32 [rows, vocab_size]."""
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    logits = torch.randn(rows, vocab_size, generator=generator)
    kind = random.choice(KINDS)
    if kind == "flat":
        return logits * random.choice([0.0, 0.01, 0.3])
    if kind == "nearly equal":  # tempered logits are equal where these are not
        logits *= 1e-6
        logits[:, random.randrange(vocab_size)] = random.choice([2.0, 30.0])
        return logits
    logits *= random.choice([1.0, 3.0, 5.0])
    if kind == "peaky":
        peaks = torch.randint(0, vocab_size, (rows, 20), generator=generator)
        logits.scatter_add_(1, peaks, torch.rand(rows, 20, generator=generator) * 10 + 6)
    elif kind == "tied":
        logits = logits.bfloat16().float()
    elif kind == "round":
        logits = logits.round()
    elif kind == "by id":
        logits = logits.sort(dim=-1, descending=random.random() < 0.5).values
    elif kind == "masked":
        allowed = torch.rand(rows, vocab_size, generator=generator)
        limit = random.choice([0.5, 50 / vocab_size, 3 / vocab_size])
        allowed[:, random.randrange(vocab_size)] = 0.0
        logits.masked_fill_(allowed > limit, -torch.inf)
    return logits + random.choice([0.0, 0.0, 1000.0])


def random_params(random: Random, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=random.choice([0.0, 0.01, 0.5, 0.8, 1.0, 1.0, 2.0]),
        top_k=random.choice([0, 0, 0, 1, 2, 40, 64, 65, 300, 1030, vocab_size - 1, vocab_size]),
        top_p=random.choice([1.0, 1.0, 0.0001, 0.3, 0.8, 0.9, 0.95, 0.9999]),
        min_p=random.choice([0.0, 0.0, 0.0, 1e-7, 0.02, 0.2, 1.0]),
        seed=random.getrandbits(64),
        choice=random.randrange(3),
        top_logprobs=random.choice([None, 0, 1, 5]),
    )
