"""Batch-invariant mode, whole requests: 500 say in random company what they say alone.

Alone is one request at a time, no drafts, no prefix cache, its prompt in one chunk. The company is
the wildest scheduler there could be: who is admitted, whose prompt advances by how much, who
decodes with how many drafts, and who has to give way is random at every step; the drafts are the
model's own in some steps and mostly right in others; prompts begin alike and their blocks are
shared. Tokens, and logprobs where they are asked for, have to be equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch

from hocket.config import ModelSettings
from hocket.execution.drafting.speculation import MTPDraftSource, ScriptedDraftSource
from hocket.execution.local_engine import LocalRequest
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.kv.paged_cache import PagedCache
from hocket.kv.prefix_cache import Prefix, PrefixCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.types import FinishReason, RequestKey, TokenLogprobs
from tests.execution.random_requests import random_request, random_tokens
from tests.execution.toy_grammars import GRAMMARS, under

TINY = ModelConfig(
    vocab_size=60,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    experts_per_token=2,
    num_dense_layers=1,
    num_mtp_layers=1,
)
NUM_BLOCKS = 24
MAX_DRAFTS = 3
MOST_TOKENS = 12


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Said:
    """What a request has put out so far."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish_reason: FinishReason | None = None

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish_reason: FinishReason | None,
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.finish_reason = finish_reason


def sequence_of(
    runner: ModelRunner, request: LocalRequest, said: Said, blocks: list[int], num_hits: int
) -> RunningSequence:
    """What was said before is the end of the prompt, as after a migration."""
    assert request.key is not None
    token_ids = [*request.token_ids, *said.token_ids]
    return RunningSequence(
        key=request.key,
        token_ids=token_ids,
        prompt_tokens=len(token_ids),
        sampling=request.sampling,
        stopping=request.stopping.after(len(said.token_ids)),
        block_table=blocks,
        num_computed=runner.start_behind(num_hits * 64),
        num_shared=num_hits * 64,
        num_generated=len(said.token_ids),
        grammar=request.grammar,
    )


def blocks_of(request: LocalRequest) -> int:
    return -(-(len(request.token_ids) + request.stopping.max_tokens) // 64)


def said_alone(model: Transformer, requests: Sequence[LocalRequest]) -> list[Said]:
    cache = PagedCache(model.kv_layout(), 4, "cpu")
    runner = ModelRunner(model, cache)
    all_said: list[Said] = []
    for request in requests:
        said = Said()
        blocks = cache.pool.allocate(blocks_of(request))
        sequence = sequence_of(runner, request, said, blocks, 0)
        (first,) = runner.prefill([PrefillChunk(sequence, sequence.num_tokens)])
        assert first is not None
        told = [] if first.logprobs is None else [first.logprobs]
        said.add([first.token_id], told, first.finish_reason)
        while said.finish_reason is None:
            (step,) = runner.decode([sequence], [0])
            said.add(step.token_ids, step.logprobs, step.finish_reason)
        said.prompt_logprobs = sequence.prompt_logprobs
        cache.pool.free(blocks)
        all_said.append(said)
    return all_said


@dataclass
class Running:
    request: LocalRequest
    said: Said
    sequence: RunningSequence
    prefix: Prefix


class Company:
    """Runs requests together, each step as chance will have it."""

    def __init__(
        self, model: Transformer, truth: dict[RequestKey, Sequence[int]], random: Random
    ) -> None:
        self.cache = PagedCache(model.kv_layout(), NUM_BLOCKS, "cpu")
        own = MTPDraftSource(model, self.cache)
        # Draws the same passes; its proposals are mostly right, so that any number is accepted.
        scripted = ScriptedDraftSource(truth, 0.7, model.config.vocab_size, timed_source=own)
        self.runners = [ModelRunner(model, self.cache, source) for source in (own, scripted)]
        self.prefixes = PrefixCache(self.cache.pool, "", 64)
        self.random = random
        self.running: list[Running] = []
        self.num_preempted = self.num_hits = self.num_accepted = 0
        self.batch_sizes: set[int] = set()

    def run(self, requests: Sequence[LocalRequest]) -> list[Said]:
        all_said = [Said() for _ in requests]
        waiting = list(zip(requests, all_said, strict=True))
        while waiting or self.running:
            for _ in range(self.random.randrange(4)):
                if waiting and not self._admit(*waiting[0]):
                    break
                waiting = waiting[1:]
            if self.random.random() < 0.05 and self.running:
                waiting.insert(0, self._give_way(self.random.choice(self.running)))
            self._prefill()
            self._decode()
            for one in [one for one in self.running if one.said.finish_reason is not None]:
                self._leave(one)
        return all_said

    def _admit(self, request: LocalRequest, said: Said) -> bool:
        is_fresh = request.sampling.prompt_logprobs is not None
        token_ids = [*request.token_ids, *said.token_ids]
        prefix = self.prefixes.prefix(token_ids, request.tenant_salt, is_fresh)
        hits = self.prefixes.look_up(prefix)
        num_new = blocks_of(request) - hits.num_blocks
        if num_new + hits.num_free > self.cache.pool.num_free:
            return False
        blocks = self.prefixes.claim(prefix) + self.cache.pool.allocate(num_new)
        sequence = sequence_of(self.runners[0], request, said, blocks, hits.num_blocks)
        self.num_hits += hits.num_blocks
        self.running.append(Running(request, said, sequence, prefix))
        return True

    def _give_way(self, one: Running) -> tuple[LocalRequest, Said]:
        self._leave(one)
        self.num_preempted += 1
        return one.request, one.said

    def _leave(self, one: Running) -> None:
        one.said.prompt_logprobs = one.sequence.prompt_logprobs
        self.running.remove(one)
        self.cache.pool.free(one.sequence.block_table)

    def _some(self, several: list[Running]) -> list[Running]:
        return self.random.sample(several, self.random.randint(0, len(several)))

    def _prefill(self) -> None:
        """A chunk of any size of some prompts that are not whole yet."""
        some = self._some([one for one in self.running if one.sequence.output_tokens == 0])
        chunks: list[PrefillChunk] = []
        for one in some:
            left = one.sequence.num_tokens - one.sequence.num_computed
            size = self.random.choice([left, self.random.randint(1, left)])
            chunks.append(PrefillChunk(one.sequence, size))
        if not chunks:
            return
        for one, first in zip(some, self.runners[0].prefill(chunks), strict=True):
            self._share(one)
            if first is not None:
                told = [] if first.logprobs is None else [first.logprobs]
                one.said.add([first.token_id], told, first.finish_reason)

    def _decode(self) -> None:
        """One step of some of the others, each with as many drafts as it happens to get."""
        ready = [one for one in self.running if one.sequence.output_tokens > 0]
        some = self._some([one for one in ready if one.said.finish_reason is None])
        if not some:
            return
        self.batch_sizes.add(len(some))
        num_drafts = [self.random.randint(0, MAX_DRAFTS) for _ in some]
        runner = self.random.choice(self.runners)
        steps = runner.decode([one.sequence for one in some], num_drafts)
        for one, step in zip(some, steps, strict=True):
            self._share(one)
            self.num_accepted += step.num_accepted
            one.said.add(step.token_ids, step.logprobs, step.finish_reason)

    def _share(self, one: Running) -> None:
        sequence = one.sequence
        self.prefixes.index(
            one.prefix, sequence.token_ids, sequence.block_table, sequence.num_complete
        )


def requests_of(count: int, vocab_size: int, seed: int) -> list[LocalRequest]:
    """Half of the prompts begin with a piece of one of four stems, for two tenants; one output in
    six is under a grammar."""
    random = Random(seed)
    stems = [random_tokens(random, vocab_size, 128) for _ in range(4)]
    requests: list[LocalRequest] = []
    for i in range(count):
        request = random_request(random, vocab_size, MOST_TOKENS)
        if random.random() < 1 / 6:
            request = under(random.choice(GRAMMARS), request, vocab_size)
        stem = random.choice(stems)[: random.choice([0, 0, 0, 64, 100, 128])]
        requests.append(
            replace(
                request,
                token_ids=(*stem, *request.token_ids[: random.choice([1, 8, 30])]),
                key=RequestKey(str(i)),
                tenant_salt=random.choice([b"", b"other"]),
            )
        )
    return requests


def assert_company_changes_nothing(model: Transformer, count: int, seed: int) -> None:
    requests = requests_of(count, model.config.vocab_size, seed)
    alone = said_alone(model, requests)
    truth: dict[RequestKey, Sequence[int]] = {}
    for request, said in zip(requests, alone, strict=True):
        assert request.key is not None
        truth[request.key] = (*request.token_ids, *said.token_ids)
    company = Company(model, truth, Random(seed))
    together = company.run(requests)
    different = [i for i in range(count) if together[i] != alone[i]]
    num_grammars = sum(request.grammar is not None for request in requests)
    num_tokens = sum(len(said.token_ids) for said in alone)
    print(
        f"{count} requests ({num_grammars} with a grammar), {num_tokens} tokens, "
        f"{len(different)} differ; in company up to "
        f"{max(company.batch_sizes)} a step, {company.num_accepted} drafts accepted, "
        f"{company.num_hits} blocks found, {company.num_preempted} gave way"
    )
    assert not different
    assert company.cache.pool.num_free == NUM_BLOCKS
    assert company.num_accepted > num_tokens / 10
    assert company.num_hits > count / 20
    assert company.num_preempted > count / 50
    assert max(company.batch_sizes) >= 6


@pytest.mark.parametrize(("dtype", "num_modules"), [("float32", 2), ("bfloat16", 1)])
def test_d9_500_random_requests_say_the_same_alone_and_in_random_company(
    tmp_path: Path, dtype: str, num_modules: int
) -> None:
    config = replace(TINY, num_mtp_layers=num_modules)
    folder = random_checkpoint(config, tmp_path, 3, dtype)
    assert_company_changes_nothing(load_model(folder, batch_invariant=True), 500, seed=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_d9_so_do_some_of_the_embedded_model(dtype: str) -> None:
    model = load_model(ModelSettings().checkpoint(), dtype, "cpu", batch_invariant=True)
    assert_company_changes_nothing(model, 40, seed=2)
