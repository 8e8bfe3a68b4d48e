"""Batch-invariant mode: a prefix hit changes no bit of what follows, drafts included.

Requests run through an engine without a prefix cache, then through one whose cache was filled by
other requests (by prompts and by outputs, with drafts or without). Tokens, logprobs, acceptance,
and the hidden states of main model and MTP module have to be equal bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from hocket.config import ModelSettings
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.execution.model_runner import ModelRunner
from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig, YarnConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_experts=8,
    experts_per_token=2,
    num_dense_layers=1,
    num_mtp_layers=1,
    max_position_embeddings=1024,
    yarn=YarnConfig(8.0, 128, mscale=1.0, mscale_all_dim=1.0),
)
GREEDY = SamplingParams(temperature=0.0, top_logprobs=3)
SAMPLED = SamplingParams(temperature=1.0, seed=5, top_p=0.95, top_logprobs=0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Transformer]:
    """`model_of(dtype, batch_invariant)`."""

    def load(dtype: str, batch_invariant: bool) -> Transformer:
        folder = random_checkpoint(CONFIG, tmp_path_factory.mktemp("model"), 3, dtype)
        return load_model(folder, batch_invariant=batch_invariant)

    return load


@dataclass
class RecordedPasses:
    """The model's passes; keeps what they computed last at each slot. For one request at a time."""

    model: Transformer
    hidden: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    z: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        hidden_TH = self.model.forward(inputs, cache)
        self.hidden.update(zip(inputs.positions.tolist(), hidden_TH, strict=True))
        return hidden_TH

    def mtp_forward(
        self,
        inputs: StepInputs,
        hidden_TH: torch.Tensor,
        cache: PagedCache,
        last_only: bool = False,
        module: int = 0,
    ) -> torch.Tensor:
        z_TH = self.model.mtp_forward(inputs, hidden_TH, cache, last_only, module)
        last = inputs.last_tokens() if last_only else inputs
        self.z.update(zip(last.positions.tolist(), z_TH, strict=True))
        return z_TH


def engine_of(model: Transformer, k: int, chunk_tokens: int, prefix_cache: bool) -> LocalEngine:
    limits = LocalEngineLimits(
        num_blocks=40, num_drafts=k, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache
    )
    return LocalEngine(model, limits)


def record(engine: LocalEngine, k: int) -> RecordedPasses:
    model = engine.runner.model
    passes = RecordedPasses(model)
    source = MTPDraftSource(model, engine.cache, passes) if k else None
    engine.runner = ModelRunner(model, engine.cache, source, passes)
    return passes


def tokens_of(length: int, seed: int, vocab_size: int = 300) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def request_of(
    token_ids: Sequence[int], sampling: SamplingParams = SAMPLED, max_tokens: int = 24
) -> LocalRequest:
    return LocalRequest(tuple(token_ids), sampling, StoppingParams(max_tokens))


def outputs(results: Sequence[LocalResult]) -> list[tuple[object, ...]]:
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in results]


def conversation(model: Transformer) -> tuple[LocalRequest, LocalRequest, LocalRequest]:
    """A request, a repetition of its prompt (two blocks, all cached), and a next turn that goes on
    from its output (three blocks cached). The output ends a little behind a block: the MTP entries
    of its last tokens are never written."""
    vocab_size = model.config.vocab_size
    first = request_of(tokens_of(128, 1, vocab_size), GREEDY, max_tokens=70)
    (result,) = engine_of(model, 0, 512, prefix_cache=False).generate([first])
    next_turn = (*first.token_ids, *result.token_ids, *tokens_of(30, 2, vocab_size))
    return first, request_of(first.token_ids), request_of(next_turn)


def assert_hits_change_nothing(
    model: Transformer,
    k: int,
    chunk_tokens: int,
    spoil: Callable[[PagedCache], None] = lambda _: None,
) -> None:
    first, *following = conversation(model)
    engine = engine_of(model, k, chunk_tokens, prefix_cache=True)
    engine.generate([first])
    spoil(engine.cache)
    for request, cached_tokens in zip(following, (127, 191), strict=True):
        plain_engine = engine_of(model, k, chunk_tokens, prefix_cache=False)
        plain, hit = record(plain_engine, k), record(engine, k)
        expected, actual = plain_engine.generate([request]), engine.generate([request])
        assert actual[0].usage.cached_tokens == cached_tokens
        assert outputs(actual) == outputs(expected), "tokens or logprobs differ"
        assert actual[0].usage.drafts == expected[0].usage.drafts, "acceptance differs"
        last = len(request.token_ids) + len(actual[0].token_ids) - 2
        assert set(range(cached_tokens, last + 1)) <= set(hit.hidden)
        assert not set(range(cached_tokens)) & set(hit.hidden)
        for slot, hidden_H in hit.hidden.items():
            assert torch.equal(hidden_H, plain.hidden[slot]), f"hidden state of slot {slot}"
        # Without drafts nobody writes, or needs, the MTP entries of an output.
        slots = hit.z.keys() & plain.z.keys() if k else set()
        assert len(slots) > 8 or not k
        for slot in slots:
            assert torch.equal(hit.z[slot], plain.z[slot]), f"MTP result of slot {slot}"


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 512])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_changes_no_bit_whatever_the_chunks(
    model_of: Callable[[str, bool], Transformer], dtype: str, k: int, chunk_tokens: int
) -> None:
    assert_hits_change_nothing(model_of(dtype, True), k, chunk_tokens)


@pytest.mark.parametrize("k", [0, 3])
def test_a_hit_changes_no_bit_of_the_embedded_model(k: int) -> None:
    model = load_model(ModelSettings().checkpoint(), batch_invariant=True)
    assert_hits_change_nothing(model, k, 512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_in_company_change_nothing(
    model_of: Callable[[str, bool], Transformer], dtype: str
) -> None:
    """Shared stems of every length, some cached and some just being computed, in one batch."""
    model = model_of(dtype, True)
    rng = random.Random(7)
    stems = [tokens_of(200, seed) for seed in range(3)]
    requests = [
        request_of(
            (
                *rng.choice(stems)[: rng.choice([64, 100, 128, 192])],
                *tokens_of(rng.randrange(3), i),
            ),
            rng.choice([GREEDY, SAMPLED]),
        )
        for i in range(24)
    ]
    expected = engine_of(model, 3, 512, prefix_cache=False).generate(requests)
    engine = engine_of(model, 3, 100, prefix_cache=True)
    actual = [r for i in range(0, 24, 6) for r in engine.generate(requests[i : i + 6])]
    assert outputs(actual) == outputs(expected)
    assert [r.usage.drafts for r in actual] == [r.usage.drafts for r in expected]
    assert sum(result.usage.cached_tokens > 0 for result in actual) >= 12


def test_fast_mode_fails_this_check(model_of: Callable[[str, bool], Transformer]) -> None:
    """So the check can fail: there, a hit has other company, and bits depend on that."""
    with pytest.raises(AssertionError, match=r"logprobs differ|hidden state"):
        assert_hits_change_nothing(model_of("float32", False), 3, 512)


def test_lost_mtp_entries_fail_this_check(model_of: Callable[[str, bool], Transformer]) -> None:
    """So the check sees the MTP layer's part of a block, too."""

    def lose_mtp_entries(cache: PagedCache) -> None:
        cache.layer_view(CONFIG.num_layers).zero_()

    with pytest.raises(AssertionError, match="acceptance differs"):
        assert_hits_change_nothing(model_of("float32", True), 3, 512, lose_mtp_entries)
