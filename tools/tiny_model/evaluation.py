"""Measures the exported checkpoint: held-out loss, acceptance of drafts, samples of its text.

Acceptance is measured as the serving engine drafts: the MTP module starts from the main model's
hidden state, runs on its own output, draft and main model share the Gumbel noise, and a draft is
accepted when it equals the main model's own next token. First the main model writes; then the
drafts of *every* position of those texts are computed together (`TinyModel.mtp_pass`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import BEGIN, CHAT_PROMPTS, END, EncodedDocuments, rows_of
from .generation import generate, gumbel_noise, until_end
from .kernels import head_cross_entropy
from .network import TinyModel, document_ids, document_mask

NUM_DRAFTS = 4
NUM_PROMPTS = 128
NUM_POSITIONS = 192
PROMPT_TOKENS = 24
NUM_SAMPLES = 2
SEED = 20_26


@dataclass(frozen=True)
class Texts:
    """What the main model wrote: ids [B, S] and how many of each row are its prompt."""

    ids: Tensor
    prompt_tokens: list[int]

    def rows(self) -> list[list[int]]:
        """Each text with its prompt, up to and with `<|end|>`."""
        pairs = zip(self.ids, self.prompt_tokens, strict=True)
        return [until_end(row, prompt_tokens) for row, prompt_tokens in pairs]


@dataclass(frozen=True)
class Drafts:
    """Drafts for every chain start of generated texts.

    `accepted[n, b, i]`: the first n + 1 drafts of the chain at position i all equal the main
    model's tokens. `counted[n, b, i]`: that chain lies in the generated part and its draft n + 1
    is not beyond `<|end|>`.
    """

    accepted: np.ndarray
    counted: np.ndarray


@torch.no_grad()
def evaluate(
    model: TinyModel, tokenizer: Tokenizer, held_out: EncodedDocuments
) -> dict[str, object]:
    """All numbers and samples of the card, as plain values."""
    started_s = time.monotonic()
    prompts = _held_out_prompts(held_out)
    results: dict[str, object] = {
        "num_prompts": sum(map(len, prompts.values())),
        "prompt_tokens": PROMPT_TOKENS,
        "num_positions": NUM_POSITIONS,
        "held_out_text": _held_out_text(model, held_out),
    }
    samples = []
    for mode, temperature in (("greedy", 0.0), ("sampled_t1", 1.0)):
        by_kind = {}
        for kind, starts in prompts.items():
            texts = _write(model, starts, temperature)
            drafts = _draft(model, texts, temperature)
            by_kind[kind] = _acceptance(drafts) | _repetition(drafts, _repeated_places(texts))
            for prompt, row in list(zip(starts, texts.rows(), strict=True))[:NUM_SAMPLES]:
                samples.append(
                    {
                        "mode": mode,
                        "prompt": tokenizer.decode(prompt, skip_special_tokens=False),
                        "text": tokenizer.decode(row[len(prompt) :], skip_special_tokens=False),
                    }
                )
        results[mode] = by_kind
    return results | {"samples": samples, "seconds": round(time.monotonic() - started_s, 1)}


def _held_out_prompts(held_out: EncodedDocuments) -> dict[str, list[list[int]]]:
    """Starts of held-out documents, and questions about others of them."""
    rng = np.random.default_rng(SEED)
    indices = rng.permutation(len(held_out)).tolist()
    plain = [held_out.plain(index)[:PROMPT_TOKENS] for index in indices[::2]]
    chat = [
        [BEGIN, *held_out.question(index, int(rng.integers(len(CHAT_PROMPTS))))]
        for index in indices[1::2]
    ]
    return {
        "plain": [ids for ids in plain if END not in ids][: NUM_PROMPTS // 2],
        "chat": [ids for ids in chat if len(ids) < NUM_POSITIONS // 2][: NUM_PROMPTS // 2],
    }


def _write(model: TinyModel, prompts: list[list[int]], temperature: float) -> Texts:
    temperatures = torch.full((len(prompts),), temperature)
    ids = generate(model, prompts, NUM_POSITIONS, temperatures, SEED)
    return Texts(ids, [len(prompt) for prompt in prompts])


def _held_out_text(model: TinyModel, held_out: EncodedDocuments) -> dict[str, float]:
    """Losses on held-out text itself; how often draft 1 equals the main model's argmax there."""
    rows = rows_of(held_out.epoch(np.random.default_rng(1)), 256, 2)
    head = model.lm_head.weight
    sums = np.zeros(4)
    for ids in torch.from_numpy(rows).split(8):
        inputs = ids[:, :-1]
        hidden = model.hidden_states(inputs, document_mask(inputs))
        mask = document_mask(inputs[:, :-1])
        z = model.mtp_pass(hidden[:, :-1], inputs[:, 1:], mask, [])
        documents = document_ids(ids)
        same = documents[:, :-2] == documents[:, 2:]
        target = torch.where(same, ids[:, 2:], -1).flatten()
        main = head_cross_entropy(hidden[:, 1:].flatten(0, 1), head, target)
        mtp = head_cross_entropy(z.flatten(0, 1), head, target)
        equal = (z @ head.t()).argmax(-1) == (hidden[:, 1:] @ head.t()).argmax(-1)
        count = int(same.sum())
        sums += (main.item() * count, mtp.item() * count, int(equal[same].sum()), count)
    main_nats, mtp_nats, equal_rate = sums[:3] / sums[3]
    characters = sum(len(document.text) for document in held_out.documents)
    return {
        "num_targets": int(sums[3]),
        "main_loss_nats": main_nats,
        "main_bits_per_byte": main_nats / np.log(2) * held_out.num_tokens / characters,
        "mtp_loss_nats": mtp_nats,
        "first_draft_equal": equal_rate,
    }


def _draft(model: TinyModel, texts: Texts, temperature: float) -> Drafts:
    """Draft `NUM_DRAFTS` tokens from every position of generated texts."""
    ids_BS = texts.ids
    batch, length = ids_BS.shape
    starts = length - 1 - NUM_DRAFTS
    mask = document_mask(ids_BS[:, :starts])
    z = model.hidden_states(ids_BS, document_mask(ids_BS))[:, :starts]
    ends = torch.tensor([len(row) for row in texts.rows()])
    noise = None
    if temperature > 0:
        vocab = model.shape.vocab_size
        noise = torch.stack([gumbel_noise(SEED, p, batch, vocab) for p in range(length)], dim=1)

    start_I = torch.arange(starts)
    generated = start_I >= torch.tensor(texts.prompt_tokens).unsqueeze(1) - 1
    chain: list[tuple[Tensor, Tensor]] = []
    tokens = ids_BS[:, 1 : starts + 1]
    alive = torch.ones(batch, starts, dtype=torch.bool)
    accepted, counted = [], []
    for depth in range(1, NUM_DRAFTS + 1):
        z = model.mtp_pass(z, tokens, mask, chain)
        logits = z @ model.lm_head.weight.t()
        place = slice(depth + 1, depth + 1 + starts)
        if noise is not None:
            logits = logits.add_(noise[:, place], alpha=temperature)
        tokens = logits.argmax(dim=-1)
        alive = alive & (tokens == ids_BS[:, place])
        accepted.append(alive.numpy())
        counted.append((generated & (start_I + depth + 1 < ends.unsqueeze(1))).numpy())
    return Drafts(np.stack(accepted), np.stack(counted))


def _acceptance(drafts: Drafts) -> dict[str, object]:
    """Survival and conditional acceptance by position; emitted tokens per verify step by k."""
    kept = (drafts.accepted & drafts.counted).sum((1, 2))
    counted = drafts.counted.sum((1, 2))
    survival = kept / counted
    before = [(drafts.accepted[n - 1] & drafts.counted[n]).sum() for n in range(1, NUM_DRAFTS)]
    conditional = [float(survival[0]), *(kept[1:] / np.maximum(before, 1)).tolist()]
    return {
        "num_drafts": int(counted[0]),
        "survival_by_position": [round(float(value), 4) for value in survival],
        "conditional_by_position": [round(float(value), 4) for value in conditional],
        "acceptance_length_by_k": [
            round(_acceptance_length(drafts, k), 4) for k in range(1, NUM_DRAFTS + 1)
        ],
    }


def _acceptance_length(drafts: Drafts, k: int) -> float:
    """Tokens emitted per verify step with k drafts: walk each text as the engine would."""
    runs = (drafts.accepted[:k] & drafts.counted[:k]).sum(0)
    steps = tokens = 0
    for run, counted in zip(runs, drafts.counted[k - 1], strict=True):
        position = int(counted.argmax())
        while position < len(run) and counted[position]:
            steps += 1
            tokens += 1 + int(run[position])
            position += 1 + int(run[position])
    return tokens / max(steps, 1)


def _repeated_places(texts: Texts) -> np.ndarray:
    """Where a token ends an 8-gram that stood earlier in the same text, bool [B, S]."""
    repeated = np.zeros(texts.ids.shape, dtype=bool)
    for number, text in enumerate(texts.rows()):
        seen: set[tuple[int, ...]] = set()
        for end in range(7, len(text)):
            gram = tuple(text[end - 7 : end + 1])
            repeated[number, end] = gram in seen
            seen.add(gram)
    return repeated


def _repetition(drafts: Drafts, repeated_BS: np.ndarray) -> dict[str, float]:
    """Share of repeated tokens among drafted places, and acceptance of draft 1 at the others."""
    counted, accepted = drafts.counted[0], drafts.accepted[0]
    repeated = repeated_BS[:, 2 : 2 + counted.shape[1]]
    return {
        "repeated_share": round(float(repeated[counted].mean()), 4),
        "first_draft_on_new_text": round(float(accepted[counted & ~repeated].mean()), 4),
    }
