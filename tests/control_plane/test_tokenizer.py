"""Prompts to tokens, compared with what transformers makes of the same folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, processors

from control_plane.tokenizer import LONG_PROMPT_CHARACTERS, ModelTokenizer
from control_plane.validation import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from hocket.errors import CheckpointError, InvalidRequest

CHAT = (
    ChatMessage("system", "be brief\n"),
    ChatMessage("user", "hello <b>world</b> & 世界"),
    ChatMessage("assistant", "yes"),
    ChatMessage("user", "and </s> then?"),
)
TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "controls": "{%- for m in messages -%}\n  {%- if m.role == 'system' %}{% continue %}"
    "{% endif %}\n    {{ m | tojson }}{{ eos_token }}\n{% endfor %}"
    "{% if tools is none %}none{% endif %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}{% endgeneration %}{% else %}{{ m.content | upper }}{% endif %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ messages[1:] | length }}{{ messages[-1]['content'].split('?')[0] }}",
}


def variant(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of the tokenizer's folder with other entries in tokenizer_config.json."""
    shutil.copytree(folder, target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("in_own_file", [False, True])
async def test_a_chat_becomes_what_transformers_makes_of_it(
    tokenizer_folder: Path, tmp_path: Path, name: str, in_own_file: bool
) -> None:
    template = TEMPLATES[name]
    config = {} if in_own_file else {"chat_template": template}
    folder = variant(tokenizer_folder, tmp_path / "model", **config)
    if in_own_file:
        (folder / "chat_template.jinja").write_text(template)
    ours = ModelTokenizer(folder)
    oracle = transformers_tokenizer(folder)
    messages = [{"role": m.role, "content": m.content} for m in CHAT]
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(CHAT) == expected
    ids = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(await ours.tokenize(ChatPrompt(CHAT))) == ids["input_ids"]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
async def test_text_gets_the_special_tokens_that_transformers_gives_it(
    tokenizer_folder: Path, tmp_path: Path, adds_bos: bool, add_bos_token: bool | None
) -> None:
    config = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    folder = variant(tokenizer_folder, tmp_path / "model", **config)
    if not adds_bos:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.ByteLevel(trim_offsets=False)
        backend.save(str(folder / "tokenizer.json"))
    expected = transformers_tokenizer(folder)("hello <s> world").input_ids
    assert list(await ModelTokenizer(folder).tokenize(TextPrompt("hello <s> world"))) == expected


async def test_a_long_prompt_gives_the_same_tokens_as_a_short_one(tokenizer_folder: Path) -> None:
    tokenizer = ModelTokenizer(tokenizer_folder)
    word = "hello "
    times = 2 * LONG_PROMPT_CHARACTERS // len(word)
    short = await tokenizer.tokenize(TextPrompt(word * 2))
    long = await tokenizer.tokenize(TextPrompt(word * times))
    assert long == tuple(tokenizer.backend.encode(word * times).ids)
    assert long[: len(short) - 1] == short[:-1]
    assert await tokenizer.tokenize(TokenPrompt((5, 6))) == (5, 6)


async def test_a_chat_that_the_template_refuses_is_the_clients_error(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    tokenizer = ModelTokenizer(variant(tokenizer_folder, tmp_path / "a", chat_template=refusing))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        tokenizer.render_chat(CHAT)
    without = ModelTokenizer(variant(tokenizer_folder, tmp_path / "b", chat_template=None))
    assert not without.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        without.render_chat(CHAT)


async def test_a_template_cannot_reach_python(tokenizer_folder: Path, tmp_path: Path) -> None:
    escaping = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = ModelTokenizer(
        variant(tokenizer_folder, tmp_path / "model", chat_template=escaping)
    )
    with pytest.raises(InvalidRequest, match="unsafe"):
        tokenizer.render_chat(CHAT)


def test_the_end_tokens_come_from_the_first_file_that_names_them(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = variant(tokenizer_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert ModelTokenizer(folder).end_token_ids == {1, 7}
    (folder / "generation_config.json").unlink()
    assert ModelTokenizer(folder).end_token_ids == {1}
    (folder / "config.json").write_text("{}")
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.end_token_ids == {1}
    assert tokenizer.vocabulary_size == tokenizer.backend.get_vocab_size()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        ModelTokenizer(tmp_path)


def test_a_broken_file_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = variant(tokenizer_folder, tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        ModelTokenizer(folder)
    broken = variant(tokenizer_folder, tmp_path / "other", chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="chat template"):
        ModelTokenizer(broken)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        ModelTokenizer(folder)


@pytest.mark.parametrize(
    "text", ["a", "hello world " * 60, "é→世👧" * 90, "\0\x7f" * 50, " " * 300, "the fox" * 500]
)
async def test_no_text_that_fits_is_refused_for_its_length(
    tokenizer_folder: Path, text: str
) -> None:
    tokenizer = ModelTokenizer(tokenizer_folder)
    token_ids = await tokenizer.tokenize(TextPrompt(text))
    assert await tokenizer.tokenize(TextPrompt(text), len(token_ids)) == token_ids


async def test_a_text_that_surely_does_not_fit_is_refused_without_being_tokenised(
    tokenizer_folder: Path,
) -> None:
    tokenizer = ModelTokenizer(tokenizer_folder)
    tokenizer.backend = None  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"3145728 characters.*at most 4095 tokens"):
        await tokenizer.tokenize(TextPrompt("7" * (3 << 20)), 4095)


async def test_a_normalizer_may_shorten_any_text(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Strip()
    backend.save(str(folder / "tokenizer.json"))
    assert len(await ModelTokenizer(folder).tokenize(TextPrompt("a" + " " * 10_000), 5)) <= 5


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_json_file_that_is_no_object_is_named(
    tokenizer_folder: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder, folder)
    (folder / name).write_text("[1, 2]")
    with pytest.raises(CheckpointError, match=f"{name} is not a JSON object"):
        ModelTokenizer(folder)
