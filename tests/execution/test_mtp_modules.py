"""Checkpoints with several MTP modules: drafts, entries and outputs, whatever came before.

The vocabulary is tiny, so that random modules are right now and then: steps end at every draft.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from hocket.clock import ManualClock
from hocket.config import DecodeSettings, ModelSettings, WorkerSettings
from hocket.errors import ConfigError
from hocket.execution.drafting.setup import set_up_drafts
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.drafting.step_measurements import measure_step_costs
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest, LocalResult
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.model_setup import set_up_model
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence as Running
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import PrefixCache
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import RequestKey, Role
from tests.execution.conftest import TINY

VOCABULARY = 5
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=4, top_logprobs=1)
ModelOf = Callable[..., Transformer]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """`model_of(num_modules, batch_invariant=True)`; each loaded once. Every module has a head of
    its own."""
    loaded: dict[tuple[int, bool], Transformer] = {}

    def load(num_modules: int, batch_invariant: bool = True) -> Transformer:
        key = (num_modules, batch_invariant)
        if key not in loaded:
            config = replace(TINY, vocab_size=VOCABULARY, num_mtp_layers=num_modules)
            folder = random_checkpoint(config, tmp_path_factory.mktemp("modules"), 2, "float32")
            tensors = load_file(folder / "model.safetensors")
            for layer in range(config.num_layers, config.num_layers + num_modules):
                head = tensors["lm_head.weight"]
                own_head = head + 0.5 * head.roll(layer - 1, 0)
                tensors[f"model.layers.{layer}.shared_head.head.weight"] = own_head
            save_file(tensors, folder / "model.safetensors")
            loaded[key] = load_model(folder, "float32", "cpu", batch_invariant)
        return loaded[key]

    return load


def tokens_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCABULARY) for _ in range(length)]


def from_nothing(
    model: Transformer, token_ids: Sequence[int], num_drafts: int, sampling: SamplingParams
) -> tuple[list[int], PagedCache]:
    """What the modules draft behind these tokens, and the cache with what they are made from: the
    whole prefix in one pass per module, as the paper writes it."""
    cache, table = PagedCache(model.kv_layout(), 8, "cpu"), list(range(8))
    known, sampler = list(token_ids), Sampler(VOCABULARY, cache.device)
    rows = model.forward(StepInputs.build([(known[:-1], 0, table)], "cpu"), cache)
    for depth in range(num_drafts):
        module = min(depth, len(model.mtp) - 1)
        if depth > module:
            rows, first_slot = rows[-1:], len(known) - 1
        else:
            first_slot = module + 1
        inputs = StepInputs.build([(known[first_slot:], first_slot, table)], "cpu")
        rows = model.mtp_forward(inputs, rows, cache, module=module)
        logits = model.mtp_logits(rows[-1:], module)
        known.append(int(sampler.sample(logits, [sampling], [len(known)])))
    return known[len(token_ids) :], cache


@dataclass
class CheckedDrafts(MTPDraftSource):
    """Compares every draft with what comes of the prefix alone."""

    model: Transformer
    cache: PagedCache

    def __post_init__(self) -> None:
        super().__init__(self.model, self.cache)

    def propose(self, sequences: Sequence[Running], num_drafts: Sequence[int]) -> list[list[int]]:
        counted = len(self.pass_rows(sequences, num_drafts))
        passes = self._passes = CountedPasses(self.model)
        proposed = super().propose(sequences, num_drafts)
        expected = [min(i, len(self.model.mtp) - 1) for i in range(counted)]
        # A later module has nothing to do while there are fewer tokens than it looks ahead.
        is_short = counted and min(sequence.num_tokens for sequence in sequences) <= 3
        assert passes.modules == expected[: len(passes.modules) if is_short else None]
        for sequence, drafts, wanted in zip(sequences, proposed, num_drafts, strict=True):
            plain, _ = from_nothing(self.model, sequence.token_ids, wanted, sequence.sampling)
            assert drafts == plain, (sequence.num_tokens, wanted)
        return proposed


@dataclass
class CountedPasses:
    """The model's own, and which module each was of."""

    model: Transformer
    modules: list[int] = field(default_factory=list[int])

    def forward(self, inputs: StepInputs, cache: PagedCache) -> torch.Tensor:
        return self.model.forward(inputs, cache)

    def mtp_forward(
        self,
        inputs: StepInputs,
        hidden_TH: torch.Tensor,
        cache: PagedCache,
        last_only: bool = False,
        module: int = 0,
    ) -> torch.Tensor:
        self.modules.append(module)
        return self.model.mtp_forward(inputs, hidden_TH, cache, last_only, module)


def engine_of(model: Transformer, k: int, *, prefix_cache: bool = False) -> LocalEngine:
    """An engine whose every draft is checked."""
    limits = LocalEngineLimits(
        num_blocks=48, num_drafts=k, chunk_tokens=48, max_batch=4, prefix_cache=prefix_cache
    )
    engine = LocalEngine(model, limits)
    if k:
        source = CheckedDrafts(model, engine.cache)
        engine.runner = ModelRunner(model, engine.cache, source)
    return engine


def requests_of(sampling: SamplingParams, k: int | None = None) -> list[LocalRequest]:
    """Prompts shorter than a module looks ahead, of a block and about, and of several chunks."""
    lengths = (1, 2, 3, 40, 64, 65, 130)
    return [
        LocalRequest(
            tuple(tokens_of(length, seed=length)),
            replace(sampling, seed=length),
            StoppingParams(20),
            num_drafts=None if k is None else (k + i) % (k + 1),
        )
        for i, length in enumerate(lengths)
    ]


def outputs(results: Sequence[LocalResult]) -> list[tuple[object, ...]]:
    return [(r.token_ids, r.logprobs, r.finish_reason) for r in results]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("num_modules", [2, 3])
def test_drafts_come_of_the_prefix_alone_and_change_no_output(
    model_of: ModelOf, num_modules: int, k: int, sampling: SamplingParams
) -> None:
    """In company, where each wants its own number of drafts, and alone."""
    model = model_of(num_modules)
    plain = engine_of(model, 0).generate(requests_of(sampling))
    together = engine_of(model, k).generate(requests_of(sampling, k))
    alone = [engine_of(model, k).generate([r])[0] for r in requests_of(sampling)[::3]]
    assert outputs(together) == outputs(plain)
    assert outputs(alone) == outputs(plain[::3])
    accepted = [r.usage.drafts.accepted_by_position for r in (*together, *alone)]
    if sampling is SAMPLED:  # then steps end behind right drafts of the second module, too
        assert any(len(counts) > 1 and counts[1] for counts in accepted) == (k > 1)
    assert any(r.usage.drafts.accepted_tokens < r.usage.drafts.drafted_tokens for r in alone)


@pytest.mark.parametrize("num_modules", [2, 3])
def test_a_prefix_hit_computes_a_token_for_each_module_again(
    model_of: ModelOf, num_modules: int
) -> None:
    model = model_of(num_modules)
    engine = engine_of(model, 3, prefix_cache=True)
    prompt = tokens_of(128, seed=1)
    cached: list[int] = []
    for prompt_of_turn in (prompt, prompt, [*prompt, *tokens_of(9, seed=2)]):
        request = LocalRequest(tuple(prompt_of_turn), SAMPLED, StoppingParams(70))
        (result,) = engine.generate([request])
        assert outputs([result]) == outputs(engine_of(model, 0).generate([request]))
        cached.append(result.usage.cached_tokens)
    assert cached == [0, 128 - num_modules, 128 - num_modules]


class Worker:
    """A runner with blocks to share; its drafts are checked."""

    def __init__(self, model: Transformer, drafts: bool = True) -> None:
        self.model = model
        self.cache = PagedCache(model.kv_layout(), 24, model.device)
        source = CheckedDrafts(model, self.cache) if drafts and model.is_batch_invariant else None
        if drafts and source is None:
            source = MTPDraftSource(model, self.cache)
        self.runner = ModelRunner(model, self.cache, source)
        self.prefixes = PrefixCache(self.cache.pool, "", 64)

    def sequence(self, prompt: Sequence[int], max_tokens: int = 60) -> Running:
        shared = self.prefixes.claim(self.prefixes.prefix(prompt, b""))
        num_new = -(-(len(prompt) + 60) // 64) - len(shared)
        return Running(
            key=RequestKey("r"),
            token_ids=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SAMPLED,
            stopping=StoppingParams(max_tokens),
            block_table=shared + self.cache.pool.allocate(num_new),
            num_computed=self.runner.start_behind(len(shared) * 64),
            num_shared=len(shared) * 64,
        )

    def share(self, sequence: Running) -> None:
        prefix = self.prefixes.prefix(sequence.token_ids, b"")
        tokens, blocks = sequence.token_ids, sequence.block_table
        self.prefixes.index(prefix, tokens, blocks, sequence.num_complete)

    def step(self, sequence: Running, chunk_tokens: int, k: int) -> None:
        if sequence.output_tokens:
            self.runner.decode([sequence], [k])
        else:
            left = sequence.num_tokens - sequence.num_computed
            self.runner.prefill([PrefillChunk(sequence, min(chunk_tokens, left))])


def entries(cache: PagedCache, sequence: Running, layer: int) -> torch.Tensor:
    view = cache.layer_view(layer)
    return torch.cat([view[block] for block in sequence.block_table])


def assert_complete(worker: Worker, sequence: Running) -> None:
    """All slots that count as complete hold what the whole prefix, computed at once, gives."""
    model, end = worker.model, sequence.num_complete
    assert end <= sequence.num_computed
    _, plain = from_nothing(model, sequence.token_ids, len(model.mtp), SAMPLED)
    for layer in range(plain.layout.num_layers):
        first = max(0, layer - model.config.num_layers + 1)  # of module j: slot j
        actual = entries(worker.cache, sequence, layer)[first:end]
        expected = plain.layer_view(layer).flatten(0, 1)[first:end]
        assert torch.equal(actual, expected), layer


@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize("num_modules", [2, 3])
def test_complete_slots_hold_every_modules_entries_at_every_step(
    model_of: ModelOf, num_modules: int, length: int
) -> None:
    """Chunks, steps with no, fewer, and more drafts than modules, in any order."""
    worker, random = Worker(model_of(num_modules)), Random(length)
    sequence = worker.sequence(tokens_of(length, seed=3))
    lags: set[int] = set()
    while sequence.output_tokens < 50:
        worker.step(sequence, random.choice([1, 2, 30]), random.choice([0, 0, 1, 2, 4]))
        assert_complete(worker, sequence)
        lags.add(sequence.num_computed - sequence.num_complete)
    assert 0 in lags
    assert max(lags) > 1


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("size", [1, 2, 17, 200])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_shared_blocks_keep_every_byte(
    model_of: ModelOf, batch_invariant: bool, size: int, k: int
) -> None:
    """Those found, and those of the sequence's own that others may read since."""
    worker = Worker(model_of(3, batch_invariant))
    prompt = tokens_of(128)
    writer = worker.sequence(prompt)
    worker.step(writer, 128, 0)
    worker.share(writer)
    shared = writer.block_table[:2]
    hits = [worker.sequence(prompt), worker.sequence([*prompt, *tokens_of(50, seed=1)])]
    before = worker.cache.storage[shared].clone()
    for hit in hits:
        assert hit.block_table[:2] == shared
        assert hit.num_computed == 125
        published, frozen = 0, torch.empty(0)
        while hit.output_tokens < 30:
            worker.step(hit, size, k)
            if published:
                assert torch.equal(worker.cache.storage[published], frozen)
            elif hit.num_complete >= 192:
                published = hit.block_table[2]
                frozen = worker.cache.storage[published].clone()
            if batch_invariant and k:
                assert_complete(worker, hit)
        assert bool(published) == (hit is hits[1] and k > 0)
    assert torch.equal(worker.cache.storage[shared], before)


@pytest.mark.parametrize("length", [1, 2, 80, 128])
@pytest.mark.parametrize("num_modules", [2, 3])
def test_a_hand_off_carries_a_hidden_state_for_each_module(
    model_of: ModelOf, num_modules: int, length: int
) -> None:
    """From then on both draft and accept alike; the prompt's last chunk has one token."""
    model = model_of(num_modules)
    prefill, decode, stayed = Worker(model, drafts=False), Worker(model), Worker(model)
    source = prefill.sequence(tokens_of(length))
    while source.num_tokens - source.num_computed > 1:
        prefill.step(source, source.num_tokens - source.num_computed - 1, 0)
    (first,) = prefill.runner.prefill([PrefillChunk(source, 1)])
    assert first is not None
    data = prefill.runner.hidden_state_bytes(first.hidden_state)
    assert len(data) == min(num_modules, length) * TINY.hidden_size * 4

    decode.cache.pool.allocate(3)
    moved = decode.sequence(tokens_of(length))
    moved.token_ids.append(first.token_id)
    moved.num_computed = length
    hidden_RH = decode.runner.load_hidden_state(data, length)
    moved.waiting = WaitingRows(hidden_RH, num_context=len(hidden_RH) - 1)
    num_blocks = decode.cache.layout.blocks_for(length)
    target, taken = moved.block_table[:num_blocks], source.block_table[:num_blocks]
    decode.cache.storage[target] = prefill.cache.storage[taken]

    reference = stayed.sequence(tokens_of(length))
    stayed.step(reference, length, 0)
    for k in (3, 1, 2, 4, 3, 3):
        outputs = [w.runner.decode([s], [k]) for w, s in ((decode, moved), (stayed, reference))]
        assert outputs[0] == outputs[1]
    assert moved.drafts == reference.drafts


def test_a_step_that_fails_leaves_the_rows_as_they_were(model_of: ModelOf) -> None:
    worker = Worker(model_of(2))
    sequence = worker.sequence(tokens_of(1))
    worker.step(sequence, 1, 0)
    before = sequence.waiting, sequence.gap, sequence.num_complete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.runner, "verify", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            worker.runner.decode([sequence], [3])
    assert (sequence.waiting, sequence.gap, sequence.num_complete) == before
    worker.step(sequence, 0, 3)
    assert_complete(worker, sequence)


def test_step_costs_are_those_of_one_pass_whatever_the_number_of_modules(model_of: ModelOf) -> None:
    worker = Worker(model_of(3, batch_invariant=False))
    costs = measure_step_costs(worker.runner, 4, 2, ManualClock())
    assert worker.cache.pool.num_free == 24
    assert worker.runner.last_step is not None
    assert worker.runner.last_step.draft_rows == [12, 12, 12]
    draft_s, verify_s = (dict(curve.points()) for curve in (costs.draft, costs.verify))
    assert all(seconds > 0 for seconds in (*draft_s.values(), *verify_s.values()))


@pytest.mark.parametrize(("draft_tokens", "num_told"), [(-1, 1), (0, 0)])
def test_without_mtp_heads_a_worker_says_once_that_it_does_not_draft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, draft_tokens: int, num_told: int
) -> None:
    settings = worker_of(tmp_path, draft_tokens)
    with caplog.at_level(logging.INFO):
        setup = set_up_model(settings)
        set_up_drafts(settings, setup)
    assert setup.max_draft_tokens == 0
    assert [r.levelname for r in caplog.records if "MTP" in r.getMessage()] == ["INFO"] * num_told


def test_drafts_that_are_demanded_of_a_checkpoint_without_mtp_heads_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"decode\.draft_tokens is 2, .* no MTP module"):
        set_up_model(worker_of(tmp_path, 2))


def test_synthetic_acceptance_of_a_checkpoint_without_modules_is_refused(tmp_path: Path) -> None:
    settings = worker_of(tmp_path, -1)
    settings = replace(settings, pool=replace(settings.pool, synthetic_acceptance=0.7))
    with pytest.raises(ConfigError, match=r"synthetic_acceptance is 0\.7, .* no MTP module"):
        set_up_model(settings)


def worker_of(tmp_path: Path, draft_tokens: int) -> WorkerSettings:
    """A decode worker of a checkpoint without heads."""
    path = random_checkpoint(replace(TINY, num_mtp_layers=0), tmp_path / "plain", 2, "float32")
    pool = DecodeSettings(draft_tokens=draft_tokens, num_blocks=4)
    return WorkerSettings(Role.DECODE, "decode-0", 1, ModelSettings(str(path), device="cpu"), pool)
