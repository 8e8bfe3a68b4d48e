"""The prefix cache under the runner: hits skip what is cached, and never write what is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch

from hocket.errors import InternalError
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.execution.model_runner import FirstToken, ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence as Running
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import PrefixCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import RequestKey

SAMPLED = SamplingParams(temperature=1.0, seed=21, top_p=0.95, top_logprobs=2)


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(120) for _ in range(length))


def request_of(
    token_ids: Sequence[int], max_tokens: int = 8, tenant_salt: bytes = b""
) -> LocalRequest:
    stopping = StoppingParams(max_tokens)
    return LocalRequest(tuple(token_ids), SAMPLED, stopping, tenant_salt=tenant_salt)


class Counted:
    """An engine with a prefix cache that tells how many prompt tokens it computed."""

    def __init__(self, model: Transformer, k: int = 0, num_blocks: int = 32, **limits: int) -> None:
        self.engine = LocalEngine(
            model,
            LocalEngineLimits(num_blocks=num_blocks, num_drafts=k, prefix_cache=True, **limits),
        )
        self.num_computed = 0
        prefill = self.engine.runner.prefill

        def counting(chunks: Sequence[PrefillChunk]) -> list[FirstToken | None]:
            self.num_computed += sum(chunk.num_tokens for chunk in chunks)
            return prefill(chunks)

        self.engine.runner.prefill = counting  # type: ignore[method-assign]

    def generate(self, requests: Sequence[LocalRequest]) -> list[LocalResult]:
        """Also checks that usage tells exactly what was not computed."""
        self.num_computed = 0
        results = self.engine.generate(requests)
        usages = [result.usage for result in results]
        num_missing = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
        assert self.num_computed == num_missing
        return results


def without_cache(model: Transformer, requests: Sequence[LocalRequest]) -> list[LocalResult]:
    return LocalEngine(model, LocalEngineLimits(num_blocks=64)).generate(requests)


def outputs(results: Sequence[LocalResult]) -> list[tuple[object, ...]]:
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in results]


@pytest.mark.parametrize(
    ("length", "cached_tokens"),
    [(1, 0), (63, 0), (64, 63), (65, 63), (127, 63), (128, 127), (150, 127)],
)
def test_a_repeated_prompt_computes_only_what_lies_behind_its_full_blocks(
    model: Transformer, length: int, cached_tokens: int
) -> None:
    """A prompt that is cached whole still computes its last token: the next one comes of it."""
    counted = Counted(model)
    (first,) = counted.generate([request_of(tokens_of(length))])
    (second,) = counted.generate([request_of(tokens_of(length))])
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, cached_tokens)
    assert outputs([first]) == outputs([second])
    assert counted.engine.cache.pool.num_free == 32


@pytest.mark.parametrize("k", [0, 3])
def test_the_next_turn_of_a_conversation_finds_prompt_and_output(
    model: Transformer, k: int
) -> None:
    counted = Counted(model, k)
    prompt = tokens_of(100)
    for turn in range(3):
        request = request_of(prompt, max_tokens=70)
        (result,) = counted.generate([request])
        assert outputs([result]) == outputs(without_cache(model, [request]))
        prompt = (*prompt, *result.token_ids, *tokens_of(20, seed=turn))
        # All of it was computed but the output's last token, so all full blocks before are found.
        found = (len(request.token_ids) - 20 - 1) // 64 * 64
        assert result.usage.cached_tokens == (found - 1 if turn else 0)


def test_requests_that_compute_the_same_prompt_at_once_share_it_afterwards(
    model: Transformer,
) -> None:
    counted = Counted(model, chunk_tokens=64)
    twins = [request_of(tokens_of(200), max_tokens=n) for n in (4, 9, 20)]
    results = counted.generate(twins)
    assert outputs(results) == outputs(without_cache(model, twins))
    pool = counted.engine.cache.pool
    assert (pool.num_free, pool.num_cached) == (32, 3)  # each prefix once, whoever came first
    assert [r.usage.cached_tokens for r in counted.generate(twins)] == [191, 191, 191]


def test_a_tight_pool_evicts_and_still_answers_alike(model: Transformer) -> None:
    random = Random(4)
    stems = [tokens_of(150, seed) for seed in range(4)]
    requests = [
        request_of((*random.choice(stems)[: random.choice([64, 128, 150])], *tokens_of(9, seed=i)))
        for i in range(40)
    ]
    counted = Counted(model, k=2, num_blocks=7, max_batch=3)
    results = [r for i in range(0, 40, 8) for r in counted.generate(requests[i : i + 8])]
    assert outputs(results) == outputs(without_cache(model, requests))
    assert sum(result.usage.cached_tokens > 0 for result in results) > 5
    assert counted.engine.cache.pool.num_free == 7


def test_c13_another_tenant_finds_nothing(model: Transformer) -> None:
    counted = Counted(model)
    prompt = tokens_of(130)
    for salt, cached_tokens in ((b"", 0), (b"a", 0), (b"b", 0), (b"a", 127), (b"", 127)):
        (result,) = counted.generate([request_of(prompt, tenant_salt=salt)])
        assert result.usage.cached_tokens == cached_tokens, salt


class Pair:
    """A runner whose cache holds a prompt's full blocks, and sequences that hit them."""

    def __init__(self, model: Transformer, prompt: Sequence[int]) -> None:
        cache = PagedCache(model.kv_layout(), 24, model.device)
        self.runner = ModelRunner(model, cache, MTPDraftSource(model, cache))
        self.cache = cache
        self.prefixes = PrefixCache(cache.pool, "", 64)
        self.writer = self.sequence(prompt)
        self.runner.prefill([PrefillChunk(self.writer, len(prompt))])
        self.share(self.writer)

    def share(self, sequence: Running) -> None:
        prefix = self.prefixes.prefix(sequence.token_ids, b"")
        tokens, blocks = sequence.token_ids, sequence.block_table
        self.prefixes.index(prefix, tokens, blocks, sequence.num_complete)

    def sequence(self, prompt: Sequence[int], has_protection: bool = True) -> Running:
        shared = self.prefixes.claim(self.prefixes.prefix(prompt, b""))
        num_shared = len(shared) * 64
        num_new = -(-(len(prompt) + 40) // 64) - len(shared)
        return Running(
            key=RequestKey("r"),
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SAMPLED,
            stopping=StoppingParams(40),
            block_table=shared + self.cache.pool.allocate(num_new),
            num_computed=max(0, num_shared - 1),
            num_shared=num_shared if has_protection else 0,
        )

    def run(self, sequence: Running, sizes: Sequence[int], k: int) -> None:
        """Prefill in chunks, the last size repeated, then some steps with drafts."""
        left = list(sizes)
        while not sequence.output_tokens:
            size = left.pop(0) if len(left) > 1 else left[0]
            size = min(size, sequence.num_tokens - sequence.num_computed)
            self.runner.prefill([PrefillChunk(sequence, size)])
        while sequence.output_tokens < 30:
            self.runner.decode([sequence], [k])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("size", [1, 16, 17, 200])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_shared_blocks_keep_every_byte(
    load_tiny: Callable[..., Transformer], batch_invariant: bool, size: int, k: int
) -> None:
    """In fast mode up to 16 queries attend in one form and more in the other."""
    prompt = tokens_of(128)
    pair = Pair(load_tiny(batch_invariant=batch_invariant), prompt)
    blocks = pair.writer.block_table[:2]
    before = pair.cache.storage[blocks].clone()
    hits = [pair.sequence(prompt), pair.sequence((*prompt, *tokens_of(50, seed=1)))]
    for hit in hits:
        assert hit.block_table[:2] == blocks
        pair.run(hit, [size], k)
    assert torch.equal(pair.cache.storage[blocks], before)


def test_without_protection_a_hit_would_rewrite_what_it_shares(
    load_tiny: Callable[..., Transformer],
) -> None:
    """So the check above can fail: in fast mode the token computed again has other bits."""
    prompt = tokens_of(128)
    pair = Pair(load_tiny(batch_invariant=False), prompt)
    blocks = pair.writer.block_table[:2]
    before = pair.cache.storage[blocks].clone()
    pair.run(pair.sequence(prompt, has_protection=False), [200], 0)
    assert not torch.equal(pair.cache.storage[blocks], before)


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("is_mtp", [True, False])
def test_a_pass_writes_its_own_slots_and_for_shared_ones_the_scratch_row(
    load_tiny: Callable[..., Transformer], batch_invariant: bool, num_tokens: int, is_mtp: bool
) -> None:
    """Two sequences in one pass, of which one starts inside of a shared block."""
    model = load_tiny(batch_invariant=batch_invariant)
    cache = PagedCache(model.kv_layout(), 5, "cpu")
    cache.storage.random_(0, 60)  # no NaN in fp32
    before = cache.storage.clone()
    parts: list[SequenceInput] = [
        (list(range(num_tokens)), 63, [3, 1]),
        (list(range(num_tokens)), 70, [0, 4]),
    ]
    inputs = StepInputs.build(parts, "cpu", [64, 0])
    if is_mtp:
        model.mtp_forward(inputs, torch.randn(2 * num_tokens, 32), cache)
    else:
        model.forward(inputs, cache)
    written = (cache.storage != before).view(5, cache.layout.num_layers, 64, -1).any(-1)
    layers = [2] if is_mtp else [0, 1]
    expected = torch.zeros_like(written)
    expected[1, layers, : num_tokens - 1] = True
    expected[4, layers, 6 : 6 + num_tokens] = True
    assert torch.equal(written, expected)
    for layer in layers:
        assert cache.layer_rows(layer)[cache.scratch_row].count_nonzero() > 0


def entries(cache: PagedCache, sequence: Running, layer: int, end: int) -> torch.Tensor:
    view = cache.layer_view(layer)
    return torch.cat([view[block] for block in sequence.block_table])[:end]


def by_the_book(model: Transformer, token_ids: Sequence[int]) -> list[torch.Tensor]:
    """Entries of every layer for these tokens, computed from nothing in two passes."""
    cache, table = PagedCache(model.kv_layout(), 8, "cpu"), list(range(8))
    hidden = model.forward(StepInputs.build([(token_ids, 0, table)], "cpu"), cache)
    shifted = StepInputs.build([(token_ids[1:], 1, table)], "cpu")
    model.mtp_forward(shifted, hidden[:-1], cache)
    return [cache.layer_view(i).flatten(0, 1) for i in range(cache.layout.num_layers)]


@pytest.mark.parametrize("stop_after", [9, 10, 11, 12, 100])
def test_complete_slots_hold_what_a_block_is_shared_for_at_every_step_and_behind_the_last(
    model: Transformer, stop_after: int
) -> None:
    """Chunks, steps with and without drafts, an output that is cut inside of an accepted run."""
    pair = Pair(model, tokens_of(70, seed=9))
    sequence = pair.sequence(tokens_of(100))
    sequence.stopping = StoppingParams(stop_after)
    random = Random(stop_after)
    lags: set[int] = set()
    while sequence.output_tokens < min(stop_after, 30):
        left = sequence.num_tokens - sequence.num_computed
        if not sequence.output_tokens:
            size = min(left, random.choice([1, 30, 64]))
            pair.runner.prefill([PrefillChunk(sequence, size)])
        else:
            pair.runner.decode([sequence], [random.choice([0, 0, 3])])
        end = sequence.num_complete
        assert end <= sequence.num_computed
        lags.add(sequence.num_computed - end)
        for layer, expected in enumerate(by_the_book(model, sequence.token_ids)):
            first = int(layer == model.config.num_layers)  # MTP entries start at slot 1
            actual = entries(pair.cache, sequence, layer, end)
            assert torch.equal(actual[first:], expected[first:end])
    assert 0 in lags
    assert max(lags) >= 1  # so `num_computed` would have been too much


@pytest.mark.parametrize("mtp", [True, False])
def test_a_worker_that_never_drafts_shares_all_that_it_computed(
    load_tiny: Callable[..., Transformer], mtp: bool
) -> None:
    model = load_tiny(mtp=mtp)
    cache = PagedCache(model.kv_layout(), 4, "cpu")
    runner = ModelRunner(model, cache)
    sequence = Running(
        key=RequestKey("r"),
        token_ids=list(tokens_of(60)),
        prompt_tokens=60,
        sampling=SAMPLED,
        stopping=StoppingParams(40),
        block_table=cache.pool.allocate(2),
    )
    runner.prefill([PrefillChunk(sequence, 60)])
    for _ in range(5):
        runner.decode([sequence], [0])
        assert sequence.num_complete == sequence.num_computed


def test_a_prompt_never_starts_before_the_last_slot_that_it_shares(model: Transformer) -> None:
    sequence = Running(
        RequestKey("r"), [1] * 80, 80, SAMPLED, StoppingParams(1), [0, 1], 62, num_shared=64
    )
    with pytest.raises(AssertionError, match=r"\(62, 64\)"):
        Pair(model, tokens_of(64)).runner.prefill([PrefillChunk(sequence, 10)])


def test_damage_in_a_shared_block_is_served_to_nobody_and_gone_with_its_last_holder(
    model: Transformer,
) -> None:
    prompt = tokens_of(128)
    pair = Pair(model, prompt)
    pool = pair.cache.pool
    pool.free(pair.writer.block_table)
    one, other = pair.sequence(prompt), pair.sequence((*prompt, *tokens_of(9, seed=2)))
    block = one.block_table[0]
    pair.cache.storage[block] = 0xFF  # NaN in every dtype, as a bad hand-off leaves
    with pytest.raises(InternalError, match="NaN"):
        pair.runner.prefill([PrefillChunk(one, 1)])
    assert not pool.is_indexed(block)
    pool.free(one.block_table)
    # The other one was not in that step. It must not go on with zeros in silence.
    with pytest.raises(InternalError, match="NaN"):
        pair.runner.prefill([PrefillChunk(other, 10)])
    pool.free(other.block_table)
    assert pair.cache.storage[block].count_nonzero() == 0
    assert pool.num_free == 24

    heir = pair.sequence(prompt)
    assert heir.num_shared == 0
    (first,) = pair.runner.prefill([PrefillChunk(heir, 128)])
    assert first is not None
    assert first.token_id == pair.writer.token_ids[-1]
