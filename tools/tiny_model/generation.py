"""Batched decoding with the training model: rollouts to distil on, and texts to measure drafts on.

Sampling is by addressed Gumbel noise, as in the serving engine: the noise of a token depends on
(seed, row, position, token id) alone, so that a draft and the main model can share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .corpus import END, PAD
from .network import AttendOver, TinyModel


def gumbel_noise(seed: int, position: int, rows: int, vocab: int) -> Tensor:
    """Gumbel noise [rows, vocab] for the tokens that may stand at `position`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    return -torch.empty(rows, vocab).exponential_(generator=generator).log_()


@torch.no_grad()
def generate(
    model: TinyModel, prompts: list[list[int]], num_positions: int, temperature_B: Tensor, seed: int
) -> Tensor:
    """Continue `prompts` up to `num_positions` tokens each; int64 [B, num_positions].

    A row with temperature 0 is greedy. After its `<|end|>` a row holds `<|pad|>`. Rows advance
    together from position 0 and take their prompt's tokens while those last, so prompts of any
    lengths share a batch and no padding is ever attended to.
    """
    shape, batch = model.shape, len(prompts)
    num_layers = shape.num_hidden_layers
    ids = torch.full((batch, num_positions), PAD)
    forced = torch.full((batch, num_positions), -1)
    for row, prompt in enumerate(prompts):
        forced[row, : len(prompt)] = torch.tensor(prompt[:num_positions])
    ids[:, 0] = forced[:, 0]
    sizes = (num_layers, batch, shape.num_attention_heads, num_positions)
    keys = torch.empty(*sizes, shape.qk_head_dim)
    values = torch.empty(*sizes, shape.v_head_dim)
    ended = torch.zeros(batch, dtype=torch.bool)
    rotary = model.rotary(torch.arange(num_positions))
    was_training = model.training
    model.eval()

    for position in range(num_positions - 1):
        x = model.model.embed_tokens(ids[:, position : position + 1])
        for layer, k, v in zip(model.model.layers, keys, values, strict=False):
            x = layer(x, rotary[position : position + 1], _attend_over_cache(k, v, position))
        logits = model.lm_head(model.model.norm(x[:, 0]))
        if bool((temperature_B > 0).any()):
            noise = gumbel_noise(seed, position + 1, batch, shape.vocab_size)
            logits = logits + temperature_B.unsqueeze(1) * noise
        chosen = logits.argmax(dim=-1).masked_fill(ended, PAD)
        following = forced[:, position + 1]
        ids[:, position + 1] = torch.where(following >= 0, following, chosen)
        ended |= (following < 0) & (chosen == END)
        if bool(ended.all()):
            break
    model.train(was_training)
    return ids


def _attend_over_cache(keys: Tensor, values: Tensor, position: int) -> AttendOver:
    """Put the new key and value at `position` of one layer's cache; attend to all up to there."""

    def attend_over(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        keys[:, :, position] = k[:, :, 0]
        values[:, :, position] = v[:, :, 0]
        return keys[:, :, : position + 1], values[:, :, : position + 1], None

    return attend_over


def until_end(ids: Tensor, prompt_tokens: int) -> list[int]:
    """The tokens of one generated row up to and with its `<|end|>`."""
    row = ids.tolist()
    return row[: row.index(END, prompt_tokens) + 1] if END in row[prompt_tokens:] else row
