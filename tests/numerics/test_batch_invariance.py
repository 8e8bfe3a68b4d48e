"""Batch-invariant mode: a token's bits do not depend on its company.

Each sequence is first computed alone, in one piece. Then all of them are computed together in
random flat batches: random chunk sizes, random order, other physical blocks, a cache full of
rubbish, and wrong drafts behind some chunks that are overwritten later. Hidden states, logits,
MTP results and cache entries have to be equal bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from hocket.kv.paged_cache import PagedCache
from hocket.model import attention_invariant, numerics
from hocket.model.model_config import ModelConfig, YarnConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.row_products import Agreement, HeadAgreement
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model

SMALL = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    experts_per_token=2,
    num_mtp_layers=1,
    max_position_embeddings=1024,
)
CONFIGS = {
    "small": SMALL,
    "wide": replace(
        SMALL,
        hidden_size=256,
        num_heads=8,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=192,
        intermediate_size=1536,
        moe_intermediate_size=192,
        experts_per_token=3,
        num_dense_layers=1,
        yarn=YarnConfig(8.0, 128, mscale=1.0, mscale_all_dim=1.0),
    ),
    "odd": replace(
        SMALL,
        vocab_size=301,
        hidden_size=72,
        num_heads=3,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=12,
        moe_intermediate_size=25,
        num_experts=6,
        num_expert_groups=3,
        expert_groups_per_token=2,
        experts_per_token=3,
    ),
}
NUM_BLOCKS = 40
LENGTHS = (1, 64, 65, 150, 330)


@dataclass
class Track:
    """One sequence: its tokens, where its blocks are, and what was computed for it so far."""

    token_ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)
    z: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Computed:
    """What must be equal: per sequence hidden states, logits, MTP results and entries."""

    tensors: list[torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(model: Transformer, cache: PagedCache, work: list[tuple[Track, int, int]]) -> None:
    """One flat step: (track, new tokens, wrong drafts behind them) each, then the MTP module."""
    chunks: list[list[int]] = []
    for track, size, num_wrong in work:
        start = track.num_computed
        wrong = [(t + 1) % 300 for t in track.token_ids[start + size :][:num_wrong]]
        chunks.append(track.token_ids[start : start + size] + wrong)
    inputs = StepInputs.build(
        [(c, t.num_computed, t.blocks) for c, (t, _, _) in zip(chunks, work, strict=True)], "cpu"
    )
    hidden = model(inputs, cache).split([len(chunk) for chunk in chunks])
    drafts: list[tuple[list[int], int, list[int]]] = []
    inputs_hidden: list[torch.Tensor] = []
    owners: list[Track] = []
    for rows, (track, size, _) in zip(hidden, work, strict=True):
        track.hidden.append(rows[:size])
        start = track.num_computed
        track.num_computed += size
        following = track.token_ids[start + 1 : start + 1 + size]
        if following:
            drafts.append((following, start + 1, track.blocks))
            inputs_hidden.append(rows[: len(following)])
            owners.append(track)
    if drafts:
        z = model.mtp_forward(StepInputs.build(drafts, "cpu"), torch.cat(inputs_hidden), cache)
        for track, rows in zip(owners, z.split([len(d[0]) for d in drafts]), strict=True):
            track.z.append(rows)


def computed(model: Transformer, cache: PagedCache, tracks: list[Track]) -> Computed:
    tensors: list[torch.Tensor] = []
    for track in tracks:
        hidden, length = torch.cat(track.hidden), len(track.token_ids)
        tensors += [hidden, model.logits(hidden)]
        if track.z:
            z = torch.cat(track.z)
            tensors += [z, model.mtp_logits(z[-1:])]
        for layer in range(cache.layout.num_layers):
            entries = cache.layer_view(layer)[track.blocks].flatten(0, 1)[:length]
            tensors.append(entries[1:] if layer == model.config.num_layers else entries)
    return Computed(tensors)


def alone(model: Transformer, prompts: list[list[int]]) -> Computed:
    tensors: list[torch.Tensor] = []
    for prompt in prompts:
        cache = PagedCache(model.kv_layout(), NUM_BLOCKS, "cpu")
        track = Track(prompt, list(range(-(-len(prompt) // 64))))
        step(model, cache, [(track, len(prompt), 0)])
        tensors += computed(model, cache, [track]).tensors
    return Computed(tensors)


def together(model: Transformer, prompts: list[list[int]], seed: int) -> Computed:
    rng = random.Random(seed)
    cache = PagedCache(model.kv_layout(), NUM_BLOCKS, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for layer in range(cache.layout.num_layers):
        view = cache.layer_view(layer)
        view.copy_(torch.randn(view.shape, generator=generator) * 3)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tracks = [Track(p, [free.pop() for _ in range(-(-len(p) // 64))]) for p in prompts]
    while unfinished := [t for t in tracks if t.num_computed < len(t.token_ids)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        longest = rng.choice([1, 5, 40, 400])
        work: list[tuple[Track, int, int]] = []
        for track in chosen:
            left = len(track.token_ids) - track.num_computed
            work.append((track, min(left, rng.randint(1, longest)), rng.choice([0, 0, 1, 4])))
        step(model, cache, work)
    return computed(model, cache, tracks)


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(300) for _ in range(length)] for length in LENGTHS]


def assert_bits_equal(actual: Computed, expected: Computed) -> None:
    assert len(actual.tensors) == len(expected.tensors)
    for i, (a, b) in enumerate(zip(actual.tensors, expected.tensors, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a != b).sum()} of {a.numel()} values differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_do_not_depend_on_company(name: str, dtype: str, tmp_path: Path) -> None:
    random_checkpoint(CONFIGS[name], tmp_path, 3, dtype)
    model = load_model(tmp_path, batch_invariant=True)
    prompts = prompts_of(1)
    expected = alone(model, prompts)
    for seed in range(2):
        assert_bits_equal(together(model, prompts, seed), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_on_neither_company_nor_the_number_of_threads(
    dtype: str, tmp_path: Path
) -> None:
    random_checkpoint(CONFIGS["wide"], tmp_path, 3, dtype)
    model = load_model(tmp_path, batch_invariant=True)
    prompts = prompts_of(1)[1:4]
    expected = alone(model, prompts)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert_bits_equal(alone(model, prompts), expected)
    torch.set_num_threads(2)
    assert_bits_equal(together(model, prompts, 0), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_last_rows_of_the_mtp_module_have_the_same_bits_alone(dtype: str, tmp_path: Path) -> None:
    random_checkpoint(CONFIGS["wide"], tmp_path, 3, dtype)
    model = load_model(tmp_path, batch_invariant=True)
    cache = PagedCache(model.kv_layout(), NUM_BLOCKS, "cpu")
    tracks = [Track(p, [3 * i, 3 * i + 1, 3 * i + 2]) for i, p in enumerate(prompts_of(2)[1:4])]
    parts = [(t.token_ids[:63], 0, t.blocks) for t in tracks]
    hidden = model(StepInputs.build(parts, "cpu"), cache)
    shifted = [(t.token_ids[1:64], 1, t.blocks) for t in tracks]
    inputs = StepInputs.build(shifted, "cpu")
    every_row = model.mtp_forward(inputs, hidden, cache)
    last_rows = model.mtp_forward(inputs, hidden, cache, last_only=True)
    assert torch.equal(last_rows, every_row[62::63])


def test_bits_do_not_depend_on_where_long_work_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_checkpoint(CONFIGS["small"], tmp_path, 3, "float32")
    model = load_model(tmp_path, batch_invariant=True)
    prompts = prompts_of(1)
    expected = alone(model, prompts)
    monkeypatch.setattr(attention_invariant, "GROUP_BYTES", 2**15)
    monkeypatch.setattr(attention_invariant, "MAX_UNIT_PAIRS", 50)
    assert_bits_equal(alone(model, prompts), expected)
    assert_bits_equal(together(model, prompts, 5), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["small", "odd"])
def test_bits_do_not_depend_on_company_where_no_kernel_lets_rows_share_a_product(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without these kernels: tiles of rows, and units of one query."""
    tiled = HeadAgreement(least_rows=None, of_tables=False)
    monkeypatch.setattr(numerics, "can_share_rows", lambda *_: False)
    monkeypatch.setattr(numerics, "share_rows", lambda *_: None)
    monkeypatch.setattr(numerics, "agreement_of", lambda _: Agreement(False, False))
    monkeypatch.setattr(numerics, "agreement_of_heads", lambda _: tiled)
    monkeypatch.setattr(attention_invariant, "least_rows", lambda *_: None)
    random_checkpoint(CONFIGS[name], tmp_path, 3, dtype)
    model = load_model(tmp_path, batch_invariant=True)
    prompts = prompts_of(1)
    assert_bits_equal(together(model, prompts, 0), alone(model, prompts))


def test_kernels_that_never_agree_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the trial can fail: here rows are added in an order that depends on their number."""

    def uneven(query: torch.Tensor, context: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if query.shape[1] % 2:
            query, context = query.flip(-1), context.flip(-1)
        return torch.baddbmm(bias, query, context.transpose(1, 2))

    monkeypatch.setattr(attention_invariant, "_scores", uneven)
    assert attention_invariant.least_rows.__wrapped__(160, 64) is None


def test_fast_mode_fails_this_check(tmp_path: Path) -> None:
    """So the check can fail: there, bits do depend on company."""
    random_checkpoint(CONFIGS["wide"], tmp_path, 3, "float32")
    model = load_model(tmp_path)
    prompts = prompts_of(1)[-3:]
    pairs = zip(together(model, prompts, 0).tensors, alone(model, prompts).tensors, strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)
