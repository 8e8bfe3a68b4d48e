"""Steps of the model runner: chunks, first tokens, MTP entries, hand-over, failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch

from hocket.errors import ConfigError, InternalError
from hocket.execution.drafting.speculation import MTPDraftSource, ScriptedDraftSource
from hocket.execution.model_runner import FirstToken, ModelRunner, PrefillChunk
from hocket.execution.sampling.sampler import Sampler
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs
from hocket.model.transformer import Transformer
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import FinishReason, RequestKey

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=21, top_p=0.95)


def runner_of(model: Transformer, drafts: bool = True) -> ModelRunner:
    cache = PagedCache(model.kv_layout(), 16, model.device)
    return ModelRunner(model, cache, MTPDraftSource(model, cache) if drafts else None)


def sequence_of(
    runner: ModelRunner, length: int, sampling: SamplingParams = SAMPLED, seed: int = 0
) -> RunningSequence:
    random = Random(seed)
    return RunningSequence(
        key=RequestKey(f"r{seed}"),
        token_ids=[random.randrange(120) for _ in range(length)],
        prompt_tokens=length,
        sampling=sampling,
        stopping=StoppingParams(max_tokens=100),
        block_table=runner.cache.pool.allocate(-(-(length + 100) // 64)),
    )


def prefill_whole(runner: ModelRunner, sequence: RunningSequence) -> FirstToken:
    (first,) = runner.prefill([PrefillChunk(sequence, sequence.num_tokens)])
    assert first is not None
    return first


def entries_of(runner: ModelRunner, sequence: RunningSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """The valid entries: main layers [L, c, W] and MTP [c - m, W] (see `sequence.py`)."""
    num_layers = runner.cache.layout.num_layers
    per_layer = [
        torch.cat([runner.cache.layer_view(layer)[block] for block in sequence.block_table])
        for layer in range(num_layers)
    ]
    computed = sequence.num_computed
    main = torch.stack([entries[:computed] for entries in per_layer[:-1]])
    return main, per_layer[-1][1 : computed - sequence.num_pending + 1]


def fresh_drafts(model: Transformer, sequence: RunningSequence, k: int) -> list[int]:
    """Drafts by the book, from nothing: (h_i, t_{i+1}) in slot i + 1 for the whole sequence, then
    the module on its own output, each draft in the next slot, each with its position's noise."""
    cache, table = PagedCache(model.kv_layout(), 6, "cpu"), list(range(6))
    sampler = Sampler(model.config.vocab_size, cache.device)
    tokens = sequence.token_ids
    hidden = model.forward(StepInputs.build([(tokens[:-1], 0, table)], "cpu"), cache)
    z = model.mtp_forward(StepInputs.build([(tokens[1:], 1, table)], "cpu"), hidden, cache)[-1:]
    drafts: list[int] = []
    for position in range(len(tokens), len(tokens) + k):
        draft = sampler.sample(model.mtp_logits(z), [sequence.sampling], [position]).item()
        drafts.append(int(draft))
        z = model.mtp_forward(StepInputs.build([(drafts[-1:], position, table)], "cpu"), z, cache)
    return drafts


def test_a_prompt_in_chunks_leaves_the_same_cache_and_first_token(model: Transformer) -> None:
    runner = runner_of(model)
    whole, chunked, other = (sequence_of(runner, 100, seed=seed) for seed in (0, 0, 1))
    expected = prefill_whole(runner, whole)
    assert runner.prefill([PrefillChunk(chunked, 1)]) == [None]
    assert runner.prefill([PrefillChunk(other, 70), PrefillChunk(chunked, 63)]) == [None, None]
    last, second = runner.prefill([PrefillChunk(other, 30), PrefillChunk(chunked, 36)])
    assert last is not None
    assert second is not None
    assert second.token_id == expected.token_id
    assert torch.equal(second.hidden_state, expected.hidden_state)
    for ours, theirs in zip(entries_of(runner, whole), entries_of(runner, chunked), strict=True):
        assert torch.equal(ours, theirs)
    assert chunked.num_pending == 1
    assert chunked.is_prefilled


def test_drafts_equal_those_of_a_fresh_computation_at_every_step(model: Transformer) -> None:
    """Pending hidden states, slots and recycled hidden survive acceptance of any length."""
    runner = runner_of(model)
    sequence = sequence_of(runner, 30)
    prefill_whole(runner, sequence)
    random = Random(3)
    seen: set[int] = set()
    for _ in range(12):
        drafts = runner.draft([sequence], [3])
        assert drafts == [fresh_drafts(model, sequence, 3)]
        # The target's own continuation, some of it replaced: acceptance of every length.
        right = plain_continuation(model, sequence, 3)
        keep = random.randrange(4)
        wrong = [(token + 1) % 120 for token in right]
        (output,) = runner.verify([sequence], [right[:keep] + wrong[keep:]])
        assert output.num_accepted == keep
        seen.add(keep)
    assert seen == {0, 1, 2, 3}


def plain_continuation(model: Transformer, sequence: RunningSequence, count: int) -> list[int]:
    runner = runner_of(model, drafts=False)
    again = sequence_of(runner, 1, sequence.sampling)
    again.token_ids, again.block_table = list(sequence.token_ids), runner.cache.pool.allocate(6)
    first = prefill_whole(runner, again)
    rest = [runner.decode([again], [0])[0].token_ids[0] for _ in range(count - 1)]
    return [first.token_id, *rest]


def test_drafts_and_target_meet_the_same_noise_at_every_position(model: Transformer) -> None:
    """At a huge temperature the noise alone decides, so every draft of any module is right."""
    runner = runner_of(model)
    hot = SamplingParams(temperature=1e7, seed=77, choice=2)
    sequences = [sequence_of(runner, 20 + seed, hot, seed) for seed in range(3)]
    runner.prefill([PrefillChunk(sequence, sequence.num_tokens) for sequence in sequences])
    for wanted in ([4, 4, 4], [1, 3, 0], [2, 0, 4]):
        outputs = runner.decode(sequences, wanted)
        assert [output.num_accepted for output in outputs] == wanted


def test_a_runner_without_drafts_keeps_no_hidden_states(model: Transformer) -> None:
    runner = runner_of(model, drafts=False)
    sequence = sequence_of(runner, 20)
    prefill_whole(runner, sequence)
    runner.decode([sequence], [0])
    assert sequence.waiting.num_rows == 0
    with pytest.raises(ConfigError, match="nothing drafts here"):
        runner.decode([sequence], [1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_goes_on_elsewhere_from_blocks_and_the_bundles_hidden_state(
    load_tiny: Callable[..., Transformer], dtype: str
) -> None:
    """What the hand-off does: copy blocks, first token, hidden state; the outputs are the same."""
    model = load_tiny(dtype)
    prefill, decode = runner_of(model, drafts=False), runner_of(model)
    sequence = sequence_of(prefill, 80)
    first = prefill_whole(prefill, sequence)
    data = prefill.hidden_state_bytes(first.hidden_state)
    assert len(data) == 32 * model.dtype.itemsize

    decode.cache.pool.allocate(2)  # so that block numbers differ
    moved = sequence_of(decode, 80)
    moved.token_ids.append(first.token_id)
    moved.num_computed = 80
    moved.waiting = WaitingRows(decode.load_hidden_state(data, moved.prompt_tokens))
    source, target = sequence.block_table[:2], moved.block_table[:2]
    decode.cache.storage[target] = prefill.cache.storage[source]

    stayed = runner_of(model)
    reference = sequence_of(stayed, 80)
    prefill_whole(stayed, reference)
    for _ in range(6):
        assert decode.decode([moved], [3]) == stayed.decode([reference], [3])
    assert moved.drafts == reference.drafts
    with pytest.raises(InternalError, match="bytes"):
        decode.load_hidden_state(data[:-1], moved.prompt_tokens)


def test_drafts_are_capped_by_tokens_and_blocks_that_remain(model: Transformer) -> None:
    runner = runner_of(model)
    sequence = sequence_of(runner, 60)
    sequence.block_table = sequence.block_table[:1]
    prefill_whole(runner, sequence)
    assert runner.draft_limit(sequence) == 3  # 61 tokens, slots 60..63 are free
    drafts = runner.draft([sequence], [9])
    assert len(drafts[0]) == 3
    runner.verify([sequence], drafts)
    sequence.stopping = StoppingParams(max_tokens=sequence.output_tokens + 1)
    assert runner.draft_limit(sequence) == 0
    (output,) = runner.decode([sequence], [4])
    assert (len(output.token_ids), output.num_drafted) == (1, 0)
    assert output.finish_reason is FinishReason.LENGTH


def test_a_step_that_raises_leaves_its_sequences_as_they_were_and_can_be_repeated(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, reference_runner = runner_of(model), runner_of(model)
    sequence, reference = sequence_of(runner, 40), sequence_of(reference_runner, 40)
    prefill_whole(runner, sequence)
    prefill_whole(reference_runner, reference)
    tokens, waiting = list(sequence.token_ids), sequence.waiting
    with monkeypatch.context() as patch:
        nan = torch.full((4, 120), torch.nan)
        patch.setattr(model, "logits", lambda hidden: nan[: hidden.shape[0]])
        with pytest.raises(InternalError, match="NaN"):
            runner.decode([sequence], [3])
    assert sequence.token_ids == tokens
    assert sequence.waiting is waiting
    assert sequence.num_computed == 40
    assert runner.decode([sequence], [3]) == reference_runner.decode([reference], [3])


def test_a_damaged_prompt_spoils_neither_its_company_nor_the_next_owner_of_its_blocks(
    model: Transformer,
) -> None:
    runner, reference_runner = runner_of(model), runner_of(model)
    damaged, healthy = sequence_of(runner, 40), sequence_of(runner, 40)
    prefill_whole(runner, damaged)
    prefill_whole(runner, healthy)
    reference = sequence_of(reference_runner, 40)
    prefill_whole(reference_runner, reference)
    runner.cache.storage[damaged.block_table] = 0xFF  # NaN in every dtype, as a bad hand-off leaves
    with pytest.raises(InternalError, match="NaN"):
        runner.decode([damaged, healthy], [2, 2])
    runner.cache.pool.free(damaged.block_table)
    heir = sequence_of(runner, 40)
    heir.block_table = damaged.block_table
    prefill_whole(runner, heir)
    expected = reference_runner.decode([reference], [2])
    assert runner.decode([heir], [2]) == expected
    assert runner.decode([healthy], [2]) == expected


def test_a_migrated_request_goes_on_with_the_noise_of_its_positions(model: Transformer) -> None:
    runner = runner_of(model)
    sequence = sequence_of(runner, 40)
    prefill_whole(runner, sequence)
    for _ in range(10):
        runner.decode([sequence], [2])
    replayed = sequence_of(runner, 40)
    replayed.token_ids = sequence.token_ids[:45]
    prefill_whole(runner, replayed)
    while replayed.num_tokens < sequence.num_tokens:
        runner.decode([replayed], [1])
    assert replayed.token_ids[: sequence.num_tokens] == sequence.token_ids


def test_the_first_token_ends_the_request_when_it_must(model: Transformer) -> None:
    runner = runner_of(model)
    sequences = [sequence_of(runner, 10, SamplingParams(0.0, top_logprobs=1)) for _ in range(3)]
    token = prefill_whole(runner, sequences[0]).token_id
    sequences[1].stopping = StoppingParams(max_tokens=1)
    sequences[2].stopping = StoppingParams(max_tokens=1, stop_token_ids=frozenset({token}))
    firsts = runner.prefill([PrefillChunk(sequence, 10) for sequence in sequences[1:]])
    reasons = [first.finish_reason for first in firsts if first is not None]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP]
    assert firsts[0] is not None
    assert firsts[0].logprobs is not None
    assert firsts[0].logprobs.token_id == token
    assert firsts[0].logprobs.top[0] == (token, firsts[0].logprobs.logprob)


def test_drafts_behind_the_end_of_an_output_do_not_count_as_accepted(model: Transformer) -> None:
    runner = runner_of(model)
    sequence = sequence_of(runner, 30, GREEDY)
    prefill_whole(runner, sequence)
    right = plain_continuation(model, sequence, 4)
    sequence.stopping = StoppingParams(100, frozenset({right[1]}))
    (output,) = runner.verify([sequence], [right])
    assert output.token_ids == tuple(right[: right.index(right[1]) + 1])
    assert output.finish_reason is FinishReason.STOP
    assert output.num_accepted == len(output.token_ids) < output.num_drafted
    assert sequence.num_computed == sequence.num_tokens - 1


def test_logprobs_are_given_only_where_they_were_asked_for(model: Transformer) -> None:
    runner = runner_of(model)
    silent = sequence_of(runner, 10)
    talking = sequence_of(runner, 10, SamplingParams(0.0, top_logprobs=0))
    runner.prefill([PrefillChunk(silent, 10), PrefillChunk(talking, 10)])
    quiet, loud = runner.decode([silent, talking], [1, 2])
    assert quiet.logprobs == ()
    assert [entry.token_id for entry in loud.logprobs] == list(loud.token_ids)
    assert all(entry.top == () and entry.logprob <= 0 for entry in loud.logprobs)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_pass_for_the_last_tokens_only_writes_all_entries(
    load_tiny: Callable[..., Transformer], batch_invariant: bool
) -> None:
    model = load_tiny(batch_invariant=batch_invariant)
    hidden = torch.randn(83, 32, generator=torch.Generator().manual_seed(0))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for last_only in (False, True):
        cache = PagedCache(model.kv_layout(), 4, "cpu")
        parts: list[SequenceInput] = [(list(range(80)), 1, [2, 0]), ([5, 6], 7, [1]), ([9], 3, [3])]
        z = model.mtp_forward(StepInputs.build(parts, "cpu"), hidden, cache, last_only)
        entries = cache.layer_view(model.config.num_layers)
        found.append((z if last_only else z[[79, 81, 82]], entries))
    (z_all, entries_all), (z_last, entries_last) = found
    assert torch.equal(entries_all, entries_last)
    # Fast mode may attend in another form, so that the last bits differ.
    tolerance = 0.0 if batch_invariant else 1e-4
    torch.testing.assert_close(z_last, z_all, rtol=tolerance, atol=tolerance)


def test_scripted_drafts_can_carry_the_real_cost(model: Transformer) -> None:
    runner = runner_of(model)
    sequence = sequence_of(runner, 20)
    prefill_whole(runner, sequence)
    truth: dict[RequestKey, Sequence[int]] = {sequence.key: [1] * 60}
    timed = MTPDraftSource(model, runner.cache)
    source = ScriptedDraftSource(truth, 1.0, 120, timed)
    assert source.propose([sequence], [2]) == [[1, 1]]
    assert sequence.waiting.num_rows == 0  # consumed by the real drafting
