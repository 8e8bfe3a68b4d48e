"""The model against Hugging Face transformers on random checkpoints, fp32, through the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from hocket.model.weights import load_model

VARIANTS = ["plain", "low-rank query", "groups", "yarn", "yarn without mscale", "tied"]
MODES = pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])


class Oracle(transformers.DeepseekV3ForCausalLM):
    """Knows where a three-layer checkpoint keeps its MTP tensors."""

    _keys_to_ignore_on_load_unexpected: ClassVar = [r"model\.layers\.3\..*"]


@cache
def oracle(path: Path) -> Oracle:
    return Oracle.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def oracle_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    return oracle(path)(torch.tensor([token_ids])).logits[0]


@MODES
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "sizes", [[333], [100, 5, 64, 17, 100], [200, 1, 4]], ids=["whole", "chunks", "decode"]
)
def test_logits_agree_with_transformers(
    variant: str,
    sizes: list[int],
    batch_invariant: bool,
    checkpoint_of: Callable[[str], Path],
    token_ids: list[int],
    runner: Any,
) -> None:
    path = checkpoint_of(variant)
    model = load_model(path, batch_invariant=batch_invariant)
    logits = model.logits(runner(model).in_chunks(token_ids, sizes))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle_logits(path, token_ids), atol=1e-4, rtol=0)


@MODES
@pytest.mark.parametrize("variant", ["low-rank query", "groups", "yarn", "tied"])
def test_greedy_output_equals_transformers_generate(
    variant: str,
    batch_invariant: bool,
    checkpoint_of: Callable[[str], Path],
    token_ids: list[int],
    runner: Any,
) -> None:
    path, prompt = checkpoint_of(variant), token_ids[:70]
    expected = _generated(path, tuple(prompt))
    model = load_model(path, batch_invariant=batch_invariant)
    run = runner(model)
    output = [int(model.logits(run.step(prompt)[-1:]).argmax())]
    while len(output) < 200:
        output.append(int(model.logits(run.step(output[-1:])).argmax()))
    assert output == expected


@cache
def _generated(path: Path, prompt: tuple[int, ...]) -> list[int]:
    whole = oracle(path).generate(
        torch.tensor([prompt]), max_new_tokens=200, do_sample=False, eos_token_id=None
    )
    return whole[0, len(prompt) :].tolist()


@MODES
@pytest.mark.parametrize("variant", ["low-rank query", "yarn"])
def test_mtp_module_agrees_with_transformers(
    variant: str,
    batch_invariant: bool,
    checkpoint_of: Callable[[str], Path],
    token_ids: list[int],
    runner: Any,
) -> None:
    path, length = checkpoint_of(variant), 150
    expected = _mtp_logits(path, token_ids[: length + 1])
    model = load_model(path, batch_invariant=batch_invariant)
    assert model.has_mtp
    run = runner(model)
    hidden = run.step(token_ids[:length])
    parts = [run.mtp_step(token_ids[1:101], 1, hidden[:100])]
    parts += [run.mtp_step(token_ids[i : i + 1], i, hidden[i - 1 : i]) for i in range(101, 121)]
    parts.append(run.mtp_step(token_ids[121:151], 121, hidden[120:150]))
    torch.testing.assert_close(model.mtp_logits(torch.cat(parts)), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def _mtp_logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    main = oracle(path)
    module = MtpModel.from_pretrained(main)
    ids = torch.tensor([token_ids])
    hidden = main.model(ids[:, :-1]).last_hidden_state
    z = module.forward_layer(
        0,
        hidden,
        torch.arange(1, ids.shape[1])[None],
        MtpCache(config=main.config.get_mtp_config()),
        input_ids=ids[:, 1:],
    )
    return main.lm_head(z)[0]


@pytest.mark.parametrize("variant", ["plain", "yarn"])
def test_absorbed_and_expanded_attention_agree(
    variant: str, checkpoint_of: Callable[[str], Path], token_ids: list[int], runner: Any
) -> None:
    model = load_model(checkpoint_of(variant))
    expanded = runner(model).in_chunks(token_ids, [333])
    absorbed = runner(model).in_chunks(token_ids, [16])
    torch.testing.assert_close(absorbed, expanded, atol=1e-5, rtol=1e-5)


def test_a_step_may_mix_long_chunks_and_single_tokens(
    checkpoint_of: Callable[[str], Path], token_ids: list[int], runner: Any
) -> None:
    """Fast mode takes both attention forms in one step."""
    from hocket.model.step_inputs import StepInputs

    model = load_model(checkpoint_of("plain"))
    alone = runner(model).in_chunks(token_ids, [333])
    run = runner(model)
    run.step(token_ids[:70])
    other = [1, 3, 4, 6]
    inputs = StepInputs.build(
        [
            (token_ids[70:71], 70, run.blocks),
            (token_ids[:200], 0, other),
            (token_ids[71:74], 71, run.blocks),
        ],
        "cpu",
    )
    mixed = model(inputs, run.cache)
    expected = torch.cat([alone[70:71], alone[:200], alone[71:74]])
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-4)
