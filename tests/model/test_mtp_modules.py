"""Several MTP modules against transformers: their outputs, and the drafts of a whole run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.execution.model_runner import ModelRunner
from hocket.execution.sequence import Sequence as Running
from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig
from hocket.model.random_checkpoint import random_checkpoint
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams

VOCABULARY = 6
"""So few tokens that random modules are right now and then."""
MODES = pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
CheckpointOf = Callable[[str, int], Path]


class Oracle(transformers.DeepseekV3ForCausalLM):
    """Knows where a three-layer checkpoint keeps its MTP tensors."""

    _keys_to_ignore_on_load_unexpected: ClassVar = [
        rf"model\.layers\.{layer}\..*" for layer in (3, 4, 5)
    ]


@cache
def oracle(path: Path) -> Oracle:
    return Oracle.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def modules_of(
    tmp_path_factory: pytest.TempPathFactory, variants: dict[str, ModelConfig]
) -> CheckpointOf:
    """Variant name, number of modules → folder of its fp32 checkpoint, in several shards."""
    made: dict[tuple[str, int], Path] = {}

    def make(variant: str, num_modules: int) -> Path:
        if (variant, num_modules) not in made:
            config = replace(variants[variant], vocab_size=VOCABULARY, num_mtp_layers=num_modules)
            folder = tmp_path_factory.mktemp("modules")
            made[variant, num_modules] = random_checkpoint(
                config, folder, 8, "float32", shard_bytes=2**18
            )
        return made[variant, num_modules]

    return make


@pytest.fixture
def prompt(token_ids: list[int]) -> list[int]:
    return [token % VOCABULARY for token in token_ids[:90]]


@MODES
@pytest.mark.parametrize("variant", ["low-rank query", "yarn"])
def test_each_module_goes_on_from_the_one_before(
    variant: str, batch_invariant: bool, modules_of: CheckpointOf, prompt: list[int], runner: Any
) -> None:
    path, num_modules, length = modules_of(variant, 3), 3, 80
    expected = _module_logits(path, prompt[: length + num_modules], length)
    model = load_model(path, batch_invariant=batch_invariant)
    run = runner(model)
    run.cache.storage.view(torch.float32).fill_(9.0)  # of slots before a module's first
    rows = run.step(prompt[:length])
    for module in range(num_modules):
        tokens, slot = prompt[module + 1 : module + 1 + length], module + 1
        parts = [
            run.mtp_step(tokens[:60], slot, rows[:60], module),
            *(run.mtp_step(tokens[i : i + 1], slot + i, rows[i : i + 1], module) for i in (60, 61)),
            run.mtp_step(tokens[62:], slot + 62, rows[62:], module),
        ]
        rows = torch.cat(parts)
        logits = model.mtp_logits(rows, module)
        torch.testing.assert_close(logits, expected[module], atol=1e-4, rtol=0)


@torch.no_grad()
def _module_logits(path: Path, token_ids: list[int], length: int) -> list[torch.Tensor]:
    """Logits of each module for the first `length` rows, the tokens behind them known."""
    main = oracle(path)
    modules = MtpModel.from_pretrained(main)
    mtp_cache = MtpCache(config=main.config.get_mtp_config())
    ids = torch.tensor([token_ids])
    rows = main.model(ids[:, :length]).last_hidden_state
    logits: list[torch.Tensor] = []
    for module in range(len(modules.layers)):
        span = torch.arange(module + 1, module + 1 + length)
        rows = modules.forward_layer(module, rows, span[None], mtp_cache, input_ids=ids[:, span])
        logits.append(main.lm_head(rows)[0])
    return logits


@dataclass
class RecordedDrafts(MTPDraftSource):
    """The model's own, by the number of tokens before them."""

    model: Transformer
    cache: PagedCache
    told: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def __post_init__(self) -> None:
        super().__init__(self.model, self.cache)

    def propose(self, sequences: Sequence[Running], num_drafts: Sequence[int]) -> list[list[int]]:
        (drafts,) = proposed = super().propose(sequences, num_drafts)
        self.told[sequences[0].num_tokens] = drafts
        return proposed


@MODES
@pytest.mark.parametrize("num_modules", [1, 2, 3])
def test_drafts_of_a_run_equal_those_of_transformers(
    num_modules: int,
    batch_invariant: bool,
    modules_of: CheckpointOf,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One draft per module, greedy; what was refused is corrected before the next ones."""
    path, max_tokens = modules_of("low-rank query", num_modules), 60
    expected: dict[int, list[int]] = {}
    forward = MtpModel.forward

    def recording(self: MtpModel, **inputs: Any) -> Any:
        result = forward(self, **inputs)
        expected[inputs["full_input_ids"].shape[1]] = result[0][0].tolist()
        return result

    monkeypatch.setattr(MtpModel, "forward", recording)
    whole = oracle(path).generate(
        torch.tensor([prompt]),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        use_mtp=True,
    )

    model = load_model(path, batch_invariant=batch_invariant)
    engine = LocalEngine(model, LocalEngineLimits(num_drafts=num_modules))
    source = RecordedDrafts(model, engine.cache)
    engine.runner = ModelRunner(model, engine.cache, source)
    request = LocalRequest(
        tuple(prompt), SamplingParams(temperature=0.0), StoppingParams(max_tokens)
    )
    (result,) = engine.generate([request])
    assert list(result.token_ids) == whole[0, len(prompt) :].tolist()
    last = len(prompt) + max_tokens - num_modules  # from here on there is room for fewer
    told = {length: drafts for length, drafts in source.told.items() if length < last}
    assert told == {length: drafts for length, drafts in expected.items() if length < last}
    num_emitted = {after - before for before, after in pairwise(told)}
    assert len(num_emitted) > 1, "some steps accept nothing, and some something"
