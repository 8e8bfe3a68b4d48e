"""Requests that did not draft for long: what is forgotten, and what drafts are made from then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.model_runner import ModelRunner, PrefillChunk
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import MOST_PENDING, NO_GAP
from hocket.execution.sequence import Sequence as Running
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.paged_cache import PagedCache
from hocket.model import transformer
from hocket.model.attention import AttentionPlan, plan_attention
from hocket.model.attention_invariant import plan_invariant_attention
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import RequestKey
from tests.execution.conftest import TINY

LENGTHS = (3, 70, 150)
SAMPLING = SamplingParams(temperature=1.0, seed=21)
ModelOf = Callable[..., Transformer]
Plan = Callable[[StepInputs, PagedCache, int], AttentionPlan]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """`model_of(num_modules, batch_invariant)`; each loaded once."""
    loaded: dict[tuple[int, bool], Transformer] = {}

    def load(num_modules: int, batch_invariant: bool) -> Transformer:
        key = (num_modules, batch_invariant)
        if key not in loaded:
            folder = tmp_path_factory.mktemp("gaps")
            config = replace(TINY, num_mtp_layers=num_modules)
            checkpoint: Path = random_checkpoint(config, folder, 2, "float32")
            loaded[key] = load_model(checkpoint, "float32", "cpu", batch_invariant)
        return loaded[key]

    return load


def started(model: Transformer) -> tuple[ModelRunner, list[Running]]:
    """Requests of different lengths, behind their prompts."""
    cache = PagedCache(model.kv_layout(), 16, "cpu")
    runner = ModelRunner(model, cache, MTPDraftSource(model, cache))
    random = Random(5)
    sequences = [
        Running(
            key=RequestKey(f"r{length}"),
            token_ids=[random.randrange(120) for _ in range(length)],
            prompt_tokens=length,
            sampling=SAMPLING,
            stopping=StoppingParams(max_tokens=100),
            block_table=cache.pool.allocate(-(-(length + 100) // 64)),
        )
        for length in LENGTHS
    ]
    runner.prefill([PrefillChunk(sequence, sequence.prompt_tokens) for sequence in sequences])
    return runner, sequences


def drafts_by_the_book(
    model: Transformer, sequence: Running, gap: tuple[int, int], k: int
) -> list[int]:
    """From nothing: the modules over the tokens before the gap, then over those behind it as over
    the start of a sequence, but attending to the former."""
    cache, table = PagedCache(model.kv_layout(), 6, "cpu"), list(range(6))
    sampler, known = Sampler(model.config.vocab_size, cache.device), list(sequence.token_ids)
    whole = model.forward(StepInputs.build([(known[:-1], 0, table)], "cpu"), cache)
    behind = max(0, gap[1] - 1)
    for begin in sorted({0, behind}):
        rows = whole[begin : gap[0] - 1] if begin == 0 and gap != NO_GAP else whole[begin:]
        # A row's token is as far ahead as the module looks; drafts follow behind the last row.
        for depth in range(k if begin == behind else len(model.mtp)):
            module = min(depth, len(model.mtp) - 1)
            if depth > module:
                rows, first = rows[-1:], len(known) - 1
            else:
                first = begin + module + 1
            tokens = known[first : first + len(rows)]
            if not tokens:
                break
            holes = [(gap[0], gap[1] + module)] if begin else []
            inputs = StepInputs.build([(tokens, first, table)], "cpu", gaps=holes)
            rows = model.mtp_forward(inputs, rows[: len(tokens)], cache, module=module)
            if begin == behind:
                logits = model.mtp_logits(rows[-1:], module)
                known.append(int(sampler.sample(logits, [sequence.sampling], [len(known)])))
    return known[len(sequence.token_ids) :]


@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_what_waits_is_bounded_and_drafts_go_on_from_it(
    model_of: ModelOf, num_modules: int
) -> None:
    model = model_of(num_modules, True)
    runner, sequences = started(model)
    complete = [sequence.num_complete for sequence in sequences]
    for _ in range(MOST_PENDING - 1):
        runner.decode(sequences, [0] * 3)
    assert all(sequence.gap == NO_GAP for sequence in sequences)
    for step in range(30):
        runner.decode(sequences, [0] * 3)
        assert all(0 < s.num_pending <= MOST_PENDING for s in sequences), step
    assert [sequence.num_complete for sequence in sequences] == complete
    for wanted in ([3, 0, 3], [4, 4, 4], [0, 1, 2]):
        expected = [
            drafts_by_the_book(model, sequence, sequence.gap, k)
            for sequence, k in zip(sequences, wanted, strict=True)
        ]
        drafts = runner.draft(sequences, wanted)
        assert drafts == expected
        runner.verify(sequences, drafts)
    # Once more: all between the first gap's start and the second one's end is given up.
    for _ in range(30):
        runner.decode(sequences, [0] * 3)
    assert [sequence.gap[0] for sequence in sequences] == complete
    assert runner.draft(sequences, [3] * 3) == [
        drafts_by_the_book(model, sequence, sequence.gap, 3) for sequence in sequences
    ]


@pytest.mark.parametrize("num_modules", [1, 3])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_what_lies_in_a_gap_is_not_looked_at(
    model_of: ModelOf, num_modules: int, batch_invariant: bool
) -> None:
    """Of long passes over what waited, and of short ones."""
    model = model_of(num_modules, batch_invariant)
    drafts: list[list[list[int]]] = []
    for is_spoiled in (False, True):
        runner, sequences = started(model)
        for _ in range(MOST_PENDING + 20):
            runner.decode(sequences, [0, 1, 0])
        assert [sequence.gap == NO_GAP for sequence in sequences] == [False, True, False]
        for sequence in sequences:
            first, end = sequence.gap
            for module in range(num_modules * is_spoiled):
                layer = runner.cache.layer_view(model.config.num_layers + module)
                for slot in range(first, end + module if end else first):
                    layer[sequence.block_table[slot // 64], slot % 64] = 1e3 * (-1) ** slot
        drafts.append([])
        for _ in range(3):
            drafts[-1] += runner.draft(sequences, [4] * 3)
            runner.decode(sequences, [0] * 3)
    assert drafts[0] == drafts[1]


def plan_from(
    first_slot: int, plan: Plan, inputs: StepInputs, cache: PagedCache, _: int
) -> AttentionPlan:
    return plan(inputs, cache, first_slot)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_gap_from_the_first_slot_on_is_a_later_first_slot(
    model_of: ModelOf, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short passes, and ones of many rows."""
    model = model_of(1, batch_invariant)
    hidden = torch.randn(120, 32, generator=torch.Generator().manual_seed(0))
    parts: list[SequenceInput] = [([7, 8, 9], 20, [0]), (list(range(90)), 20, [1, 2])]
    for part, gap in ((parts[0], (1, 20)), (parts[0], (1, 12)), (parts[1], (1, 20))):
        cache = PagedCache(model.kv_layout(), 3, "cpu")
        before: SequenceInput = (list(range(19)), 1, part[2])
        model.mtp_forward(StepInputs.build([before], "cpu"), hidden[:19], cache)
        num_rows = len(part[0])
        inputs = StepInputs.build([part], "cpu", gaps=[gap])
        z = model.mtp_forward(inputs, hidden[:num_rows], cache)
        with monkeypatch.context() as patch:
            for plan in (plan_attention, plan_invariant_attention):
                patch.setattr(transformer, plan.__name__, partial(plan_from, gap[1], plan))
            plain = StepInputs.build([part], "cpu")
            expected = model.mtp_forward(plain, hidden[:num_rows], cache)
        tolerance = 0.0 if batch_invariant else 1e-5
        torch.testing.assert_close(z, expected, rtol=tolerance, atol=tolerance)


def test_rows_are_those_that_were_added_whatever_is_forgotten() -> None:
    random = Random(1)
    steps: Sequence[torch.Tensor] = [torch.randn(9, 4) for _ in range(30)]
    rows, known = WaitingRows(), torch.zeros(0, 4)
    for step in steps:
        first = random.randrange(8)
        end = random.randint(first + 1, 9)
        rows.add(step, first, end)
        known = torch.cat([known, step[first:end]])
        if random.random() < 0.4:
            num_kept = random.randint(1, rows.num_pending)
            rows.keep_newest(num_kept)
            known = known[-num_kept:]
        assert rows.num_rows == rows.num_pending == len(known)
        assert torch.equal(rows.joined(), known)
    with_context = WaitingRows(steps[0], num_context=2)
    with_context.add(steps[1], 0, 1)
    assert (with_context.num_rows, with_context.num_pending) == (10, 8)
    known = with_context.joined()[-8:]
    with_context.keep_newest(8)
    assert with_context.num_context == 0
    assert torch.equal(with_context.joined(), known)
