"""What a client may ask for, value by value, without a server."""

from __future__ import annotations

import math
from typing import Any

import pytest

from control_plane.model_limits import ModelLimits
from control_plane.param_checks import MAX_GRAMMAR_BYTES
from control_plane.validation import ValidRequest, check_lengths, validate
from hocket.errors import InvalidRequest
from hocket.request_params import Grammar, GrammarKind, TypicalAcceptance
from hocket.rpc import generation_pb2 as generation

LIMITS = ModelLimits("fox", 512, 256, 200, 99)


def valid(limits: ModelLimits = LIMITS, **fields: Any) -> ValidRequest:
    return validate(generation.GenerateRequest(text="x", **fields), limits)


def choices(*strings: str) -> dict[str, Any]:
    return {"choice": {"strings": strings}}


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 65}, "n", "65"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21"),
    ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty", "0.0"),
    ({"sampling": {"repetition_penalty": 0.001}}, "sampling.repetition_penalty", "0.001"),
    ({"sampling": {"repetition_penalty": 2.1}}, "sampling.repetition_penalty", "2.1"),
    ({"sampling": {"frequency_penalty": -2.1}}, "sampling.frequency_penalty", "-2.1"),
    ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty", "2.5"),
    ({"sampling": {"logit_bias": {512: 1}}}, "sampling.logit_bias", "'of token 512'"),
    ({"sampling": {"logit_bias": {7: 100.5}}}, "sampling.logit_bias[7]", "100.5"),
    ({"sampling": {"logit_bias": {7: -101}}}, "sampling.logit_bias[7]", "-101.0"),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias", "'1025"),
    ({"grammar": {}}, "grammar", "missing"),
    ({"grammar": {"regex": ""}}, "grammar.regex", "'0 bytes'"),
    ({"grammar": {"ebnf": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}}, "grammar.ebnf", "'65538 bytes'"),
    ({"grammar": {"json_schema": "x" * (MAX_GRAMMAR_BYTES + 1)}}, "grammar.json_schema", "'65537"),
    ({"grammar": choices()}, "grammar.choice.strings", "'0 strings'"),
    ({"grammar": choices("a", "")}, "grammar.choice.strings[1]", "''"),
    ({"grammar": choices("a", "b", "a")}, "grammar.choice.strings[2]", "'a'"),
    ({"grammar": choices(*map(str, range(1025)))}, "grammar.choice.strings", "'1025 strings'"),
    ({"grammar": choices("a" * (MAX_GRAMMAR_BYTES - 8), "b")}, "grammar.choice", "'65537 bytes'"),
    ({"grammar": {"regex": "a"}, "stopping": {"min_tokens": 1}}, "stopping.min_tokens", "1"),
    ({"grammar": {"regex": "a"}, "stopping": {"ignore_eos": True}}, "stopping.ignore_eos", "True"),
    ({"typical_acceptance": {"epsilon": 0}}, "typical_acceptance.epsilon", "0.0"),
    ({"typical_acceptance": {"delta": 1.1}}, "typical_acceptance.delta", "1.1"),
]  # fmt: skip
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
           "presence_penalty")  # fmt: skip
INVALID += [({"sampling": {name: math.nan}}, f"sampling.{name}", "nan") for name in NUMBERS]
INVALID += [
    ({"sampling": {"logit_bias": {7: math.nan}}}, "sampling.logit_bias[7]", "nan"),
    ({"typical_acceptance": {"epsilon": math.nan}}, "typical_acceptance.epsilon", "nan"),
    ({"typical_acceptance": {"delta": math.nan}}, "typical_acceptance.delta", "nan"),
    ({"sampling": {"frequency_penalty": math.inf}}, "sampling.frequency_penalty", "inf"),
]


@pytest.mark.parametrize(("fields", "field", "value"), INVALID)
def test_a_wrong_value_is_named_with_its_field_and_limit(
    fields: dict[str, Any], field: str, value: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        valid(**fields)
    assert caught.value.field == field
    assert caught.value.metadata["value"].startswith(value), caught.value.metadata
    assert caught.value.metadata["limit"]


def test_the_ends_of_each_range_are_taken() -> None:
    request = valid(
        n=64,
        prompt_logprobs=20,
        sampling={
            "repetition_penalty": 2,
            "frequency_penalty": -2,
            "presence_penalty": 2,
            "logit_bias": {511: -100, 3: 100} | dict.fromkeys(range(4, 500), 0.5),
        },
        typical_acceptance={"epsilon": 1, "delta": 1},
        grammar=choices("a" * (MAX_GRAMMAR_BYTES - 9), "b"),
    )
    sampling = request.sampling
    assert (request.num_choices, sampling.prompt_logprobs) == (64, 20)
    assert sampling.repetition_penalty == 2
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (-2, 2)
    assert (sampling.logit_bias[0], sampling.logit_bias[-1]) == ((3, 100.0), (511, -100.0))
    assert sampling.acceptance == TypicalAcceptance(1.0, 1.0)


def test_what_is_not_said_changes_nothing() -> None:
    request = valid()
    sampling = request.sampling
    assert (request.num_choices, request.min_tokens, request.include_stop) == (1, 0, False)
    assert not sampling.has_penalties
    assert (sampling.logit_bias, sampling.grammar, sampling.acceptance) == ((), None, None)
    assert sampling.prompt_logprobs is None
    assert valid(prompt_logprobs=0).sampling.prompt_logprobs == 0


def test_typical_acceptance_has_the_papers_defaults() -> None:
    assert valid(typical_acceptance={}).sampling.acceptance == TypicalAcceptance(0.3, 0.09)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
def test_a_grammar_goes_to_the_workers_as_it_was_written(kind: str) -> None:
    request = valid(grammar={kind: " whatever: {"})
    assert request.sampling.grammar == Grammar(GrammarKind(kind), " whatever: {")


def test_drafts_are_not_asked_of_a_model_that_has_no_heads_for_them() -> None:
    plain = ModelLimits("fox", 512, 256, 200, 99, has_mtp=False)
    with pytest.raises(InvalidRequest, match="no multi-token prediction heads") as caught:
        valid(plain, max_draft_tokens=1)
    assert caught.value.field == "max_draft_tokens"
    assert valid(plain, max_draft_tokens=0).max_draft_tokens == 0
    assert valid(plain).max_draft_tokens is None
    assert valid(max_draft_tokens=1).max_draft_tokens == 1


@pytest.mark.parametrize(("max_tokens", "most"), [(5, 5), (None, 99)])
def test_an_output_must_have_room_for_its_least_tokens(max_tokens: int | None, most: int) -> None:
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    assert check_lengths(9, valid(stopping={"min_tokens": most, **limit}), LIMITS) == most
    with pytest.raises(InvalidRequest, match=f"at most {most}, the most tokens") as caught:
        check_lengths(9, valid(stopping={"min_tokens": most + 1, **limit}), LIMITS)
    assert caught.value.field == "stopping.min_tokens"
