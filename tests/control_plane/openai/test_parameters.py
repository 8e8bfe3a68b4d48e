"""Request parameters at the HTTP door: OpenAI's and those that other servers added to them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from hocket.errors import InvalidRequest
from hocket.request_params import Grammar, GrammarKind, TypicalAcceptance
from tests.control_plane.test_choices import TEXTS, follow_scripts, scripts

TEXT = " the quick brown fox jumps over the lazy dog"
HELLO: Any = [{"role": "user", "content": "hello"}]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


async def test_penalties_bias_and_least_tokens_reach_the_workers(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        await d.client.chat.completions.create(
            model="fox",
            messages=HELLO,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            logit_bias={"9": -100, "3": 2.5},
            extra_body={
                "repetition_penalty": 1.25,
                "min_tokens": 3,
                "typical_acceptance": {"epsilon": 0.5, "delta": 0.25},
            },
        )
        request = d.behind.prefill.engine.submitted[0]
        sampling = request.sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.25)
        assert sampling.repetition_penalty == 1.25
        assert sampling.logit_bias == ((3, 2.5), (9, -100.0))
        assert sampling.acceptance == TypicalAcceptance(0.5, 0.25)
        assert request.stopping.min_tokens == 3


async def test_a_stop_string_may_stay_in_the_text(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        reply = await d.client.completions.create(
            model="fox", prompt="x", stop=" fox", extra_body={"include_stop_str_in_output": True}
        )
        assert reply.choices[0].text == " the quick brown fox"


GRAMMARS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_object"}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": False},
            }
        },
        Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
    ),
    ({"guided_json": SCHEMA}, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"guided_json": True}, Grammar(GrammarKind.JSON_SCHEMA, "true")),
    ({"guided_json": ' {"a": 1}'}, Grammar(GrammarKind.JSON_SCHEMA, ' {"a": 1}')),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    ({"guided_choice": ["yes", "né"]}, Grammar(GrammarKind.CHOICE, json.dumps(["yes", "né"]))),
    ({"guided_grammar": 'root ::= "a"'}, Grammar(GrammarKind.EBNF, 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["yes"]}}, Grammar(GrammarKind.CHOICE, '["yes"]')),
    ({"structured_outputs": {"grammar": "root ::= b"}}, Grammar(GrammarKind.EBNF, "root ::= b")),
    (
        {"structured_outputs": {"json_object": True, "regex": None}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    ),
    ({"structured_outputs": {"json_object": False, "whitespace_pattern": None}}, None),
    ({"structured_outputs": {}, "guided_regex": None, "response_format": None}, None),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_way_to_say_what_the_output_must_look_like(open_door: Any, path: str) -> None:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": HELLO}
    async with open_door() as d:
        for body, expected in GRAMMARS:
            answer = await d.post(path, **prompt, **body)
            assert answer.status == 200, (body, answer.body)
            assert d.behind.prefill.engine.submitted[-1].sampling.grammar == expected, body


async def test_openais_client_asks_for_a_schema(open_door: Any) -> None:
    async with open_door(TEXT) as d:
        await d.client.chat.completions.create(
            model="fox",
            messages=HELLO,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            },
        )
        grammar = d.behind.prefill.engine.submitted[0].sampling.grammar
        assert grammar == Grammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": "high"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 1, "03": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"3": None}}, "logit_bias"),
    ({"logit_bias": {"3": "x"}}, "logit_bias.3"),
    ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"typical_acceptance": True}, "typical_acceptance"),
    ({"typical_acceptance": {"epsilon": 2}}, "typical_acceptance.epsilon"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_json": 7}, "guided_json"),
    ({"guided_json": False}, "guided_json"),
    ({"guided_json": ""}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "\ud800"}, "guided_regex"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"guided_choice": ["a", 7]}, "guided_choice[1]"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": ["a"]}, "guided_grammar"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"structured_outputs": {"choice": ["a", "a"]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
]


async def test_bad_parameters_are_400_with_their_name(open_door: Any) -> None:
    async with open_door() as d:
        for body, param in INVALID:
            answer = await d.post(COMPLETIONS, prompt="x", **body)
            assert answer.status == 400, (body, answer.body)
            assert answer.error["param"] == param, (body, answer.error)
            assert answer.error["message"].startswith(param)
        echo = await d.post(CHAT, messages=HELLO, echo=True)
        assert (echo.status, echo.error["param"]) == (400, "echo")
        assert d.behind.prefill.engine.submitted == []


async def test_a_schema_that_is_nested_too_deeply_is_400(open_door: Any) -> None:
    async with open_door() as d:
        for depth in (*range(900, 1000, 2), 50_000):
            schema = '{"not":' * depth + "{}" + "}" * depth
            answer = await d.raw(
                f"POST {COMPLETIONS}", '{"prompt":"x","guided_json":' + schema + "}"
            )
            assert answer.status in (200, 400), (depth, answer.body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
async def test_what_workers_cannot_compile_is_400_with_the_clients_own_name(
    open_door: Any, body: dict[str, Any], param: str
) -> None:
    async with open_door() as d:
        for field in ("grammar", "grammar.regex", "grammar.choice", "grammar.json_schema"):
            error = InvalidRequest(field, "(", "a regular expression")
            d.behind.prefill.engine.fails_with = error
            is_stream = field != "grammar"
            answer = await d.post(COMPLETIONS, prompt="x", stream=is_stream, **body)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert answer.error["message"] == f"{param} is '('; it must be a regular expression."


async def test_several_choices_come_whole(open_door: Any, tokenizer: Any) -> None:
    async with open_door() as d:
        follow_scripts(d.behind, tokenizer)
        reply = await d.client.chat.completions.create(
            model="fox", messages=HELLO, n=4, max_tokens=40, seed=3
        )
        assert [c.index for c in reply.choices] == [0, 1, 2, 3]
        assert [c.message.content for c in reply.choices] == TEXTS
        assert {c.finish_reason for c in reply.choices} == {"stop"}
        num_output = sum(map(len, scripts(tokenizer).values()))
        num_prompt = len(d.behind.prefill.engine.submitted[0].token_ids)
        assert reply.usage.prompt_tokens == num_prompt
        assert reply.usage.completion_tokens == num_output
        assert reply.usage.total_tokens == num_prompt + num_output
        assert reply.hocket["seed"] == 3
        assert reply.hocket["verify_steps"] == num_output - 4


@pytest.mark.parametrize("is_chat", [False, True])
async def test_several_choices_stream_side_by_side_and_end_together(
    open_door: Any, tokenizer: Any, is_chat: bool
) -> None:
    async with open_door() as d:
        follow_scripts(d.behind, tokenizer)
        resource = d.client.chat.completions if is_chat else d.client.completions
        prompt = {"messages": HELLO} if is_chat else {"prompt": "x", "best_of": 4}
        options = {"include_usage": True}
        stream = await resource.create(
            model="fox", n=4, max_tokens=40, stream=True, stream_options=options, **prompt
        )
        *chunks, usage = [chunk async for chunk in stream]
        of: dict[int, list[Any]] = {index: [] for index in range(4)}
        for chunk in chunks:
            (choice,) = chunk.choices
            of[choice.index].append(choice)
        for index, choices in of.items():
            texts = [c.delta.content if is_chat else c.text for c in choices]
            assert "".join(text or "" for text in texts) == TEXTS[index]
            assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["stop"]
            if is_chat:
                assert [c.delta.role for c in choices] == ["assistant"] + [None] * (
                    len(choices) - 1
                )
        assert usage.choices == []
        assert usage.usage.completion_tokens == sum(map(len, scripts(tokenizer).values()))
        assert usage.usage.prompt_tokens == len(d.behind.prefill.engine.submitted[0].token_ids)
        told = [chunk for chunk in chunks if getattr(chunk, "hocket", None)]
        assert told == [chunks[-1]]


async def test_a_stream_of_several_choices_has_one_end(open_door: Any, tokenizer: Any) -> None:
    async with open_door() as d:
        follow_scripts(d.behind, tokenizer)
        answer = await d.post(COMPLETIONS, prompt="x", n=4, max_tokens=40, stream=True)
        assert answer.body.count(b"[DONE]") == 1
        assert answer.body.endswith(b"data: [DONE]\n\n")


async def test_logprobs_of_each_choice_are_its_own(open_door: Any, tokenizer: Any) -> None:
    async with open_door() as d:
        follow_scripts(d.behind, tokenizer)
        reply = await d.client.completions.create(
            model="fox", prompt="x", n=3, logprobs=1, max_tokens=40
        )
        for choice in reply.choices:
            text = choice.text + "</s>"
            logprobs = choice.logprobs
            assert "".join(logprobs.tokens) == text
            offsets = [*logprobs.text_offset[:-1], len(choice.text)]
            assert all(
                text[o:].startswith(t) for o, t in zip(offsets, logprobs.tokens, strict=True)
            )


async def test_logprobs_of_the_prompt_have_vllms_shape(open_door: Any, tokenizer: Any) -> None:
    async with open_door(TEXT) as d:
        completion = await d.post(COMPLETIONS, prompt="hello", prompt_logprobs=1, n=2)
        (ids, *_) = [r.token_ids for r in d.behind.prefill.engine.submitted]
        expected = [None] + [
            {
                str(t): {
                    "logprob": -float(i),
                    "rank": 1,
                    "decoded_token": tokenizer.decode([t], skip_special_tokens=False),
                }
            }
            for i, t in enumerate(ids[1:], 1)
        ]
        assert [c["prompt_logprobs"] for c in completion.json["choices"]] == [expected] * 2
        chat = await d.post(CHAT, messages=HELLO, prompt_logprobs=0)
        num_prompt = chat.json["usage"]["prompt_tokens"]
        assert len(chat.json["prompt_logprobs"]) == num_prompt
        assert "prompt_logprobs" not in chat.json["choices"][0]
        plain = await d.post(COMPLETIONS, prompt="hello")
        assert "prompt_logprobs" not in plain.json["choices"][0]


@pytest.mark.parametrize("is_ids", [False, True])
async def test_an_echo_repeats_the_prompt_with_its_logprobs(
    open_door: Any, tokenizer: Any, is_ids: bool
) -> None:
    ids = tokenizer.encode("hello größe").ids
    prompt: Any = ids if is_ids else "hello größe"
    async with open_door(TEXT) as d:
        plain = await d.client.completions.create(model="fox", prompt=prompt, echo=True)
        assert plain.choices[0].text == "hello größe" + TEXT
        assert plain.choices[0].logprobs is None
        assert d.behind.prefill.engine.submitted[-1].sampling.prompt_logprobs is None
        reply = await d.client.completions.create(
            model="fox", prompt=prompt, echo=True, logprobs=1, max_tokens=2, n=2
        )
        assert list(d.behind.prefill.engine.submitted[-1].token_ids) == ids
        num_prompt = len(ids)
        assert reply.usage.prompt_tokens == num_prompt
        for choice in reply.choices:
            logprobs = choice.logprobs
            assert len(logprobs.tokens) == num_prompt + 2
            assert logprobs.tokens[:2] == ["<s>", "hello"]
            assert logprobs.token_logprobs[0] is None
            assert logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1:num_prompt] == [
                -float(i) for i in range(1, num_prompt)
            ]
            assert logprobs.token_logprobs[num_prompt:] == [0.0, -1.0]
            # The start token is in no text.
            assert logprobs.text_offset[:3] == [0, 0, 5]
            assert logprobs.text_offset[num_prompt] == len("hello größe")


async def test_a_stream_echoes_the_prompt_first(open_door: Any, tokenizer: Any) -> None:
    async with open_door(TEXT) as d:
        asked = {"model": "fox", "prompt": "hello größe", "echo": True}
        stream = await d.client.completions.create(**asked, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert texts[0] == "hello größe"
        assert "".join(texts[1:]) == TEXT
        whole = await d.client.completions.create(**asked, logprobs=1, max_tokens=2, n=2)
        stream = await d.client.completions.create(
            **asked, logprobs=1, max_tokens=2, n=2, stream=True
        )
        found = [["", [], [], [], []] for _ in range(2)]
        async for chunk in stream:
            (choice,) = chunk.choices
            told = found[choice.index]
            told[0] += choice.text
            if choice.logprobs is not None:
                told[1] += choice.logprobs.tokens
                told[2] += choice.logprobs.token_logprobs
                told[3] += choice.logprobs.top_logprobs
                told[4] += choice.logprobs.text_offset
        for choice, told in zip(whole.choices, found, strict=True):
            logprobs = choice.logprobs
            assert told == [
                choice.text,
                logprobs.tokens,
                logprobs.token_logprobs,
                logprobs.top_logprobs,
                logprobs.text_offset,
            ]


async def test_an_echo_of_a_prompt_that_is_too_long_is_400(open_door: Any) -> None:
    async with open_door() as d:
        answer = await d.post(COMPLETIONS, prompt="x" * 5000, echo=True)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "prompt"


async def test_an_output_that_drafts_could_change_is_marked(open_door: Any) -> None:
    typical: Any = {"typical_acceptance": {}}
    async with open_door(TEXT) as d:
        exact = await d.client.completions.create(model="fox", prompt="x")
        assert "acceptance" not in exact.hocket
        whole = await d.client.completions.create(model="fox", prompt="x", n=2, extra_body=typical)
        assert whole.hocket["acceptance"] == "typical"
        stream = await d.client.chat.completions.create(
            model="fox", messages=HELLO, stream=True, extra_body=typical
        )
        *_, last = [chunk async for chunk in stream]
        assert last.hocket["acceptance"] == "typical"
    async with open_door(TEXT, decode={"synthetic_acceptance": 0.5}) as d:
        reply = await d.client.completions.create(model="fox", prompt="x", extra_body=typical)
        assert reply.hocket["acceptance"] == "synthetic"


async def test_drafts_of_a_model_without_heads_are_400(open_door: Any) -> None:
    async with open_door(TEXT, decode={"has_mtp": False}) as d:
        with pytest.raises(
            openai.BadRequestError, match="no multi-token prediction heads"
        ) as caught:
            await d.client.completions.create(
                model="fox", prompt="x", extra_body={"max_draft_tokens": 2}
            )
        assert caught.value.param == "max_draft_tokens"
