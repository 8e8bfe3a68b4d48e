"""xgrammar over other vocabularies than the embedded model's; compiled grammars carried over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from hocket.errors import CheckpointError
from hocket.execution.grammars.library import GrammarLibrary
from hocket.execution.grammars.states import GrammarState
from hocket.request_params import Grammar, GrammarKind
from tests.execution.grammar_texts import (
    ALL,
    END,
    FOLDER,
    TOKENIZER,
    VOCAB_SIZE,
    compiled,
    library,
    mask,
    outputs,
)

ANY_TEXT = Grammar(GrammarKind.REGEX, r"[\s\S]*")


@pytest.fixture
def added(tmp_path: Path) -> Path:
    """The embedded model's tokenizer with five more tokens; only the first is called special."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens(["[MASK]"])
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False)
            for text in ("<|late|>", "<\uff5cUser\uff5c>", "<think>", "né ")
        ]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_role_markers_and_padding_are_never_allowed_and_other_added_tokens_are_text(
    added: Path,
) -> None:
    grammar = GrammarLibrary(str(added), VOCAB_SIZE + 37, [END], 1).compile(ANY_TEXT)
    ids = range(VOCAB_SIZE, VOCAB_SIZE + 37)
    allowed = set(mask(GrammarState(grammar)).tolist())
    assert [token for token in ids if token in allowed] == [VOCAB_SIZE + 3, VOCAB_SIZE + 4]
    assert len(allowed) > 3000

    spelled = GrammarLibrary(str(added), VOCAB_SIZE + 37, [END], 1).compile(
        Grammar(GrammarKind.REGEX, "<think>né x")
    )
    x = TOKENIZER.token_to_id("x")
    assert GrammarState(spelled).seek([VOCAB_SIZE + 3, VOCAB_SIZE + 4, x, END])


def test_a_model_may_have_fewer_tokens_than_its_tokenizer(added: Path) -> None:
    small = GrammarLibrary(str(added), 3000, [END], 1).compile(ANY_TEXT)
    allowed = mask(GrammarState(small))
    np.testing.assert_array_equal(
        allowed, [t for t in mask(GrammarState(compiled(ANY_TEXT))) if t < 3000]
    )


def test_every_end_token_of_the_model_ends_an_output() -> None:
    two = GrammarLibrary(str(FOLDER), VOCAB_SIZE, [END, 5], 1)
    a = TOKENIZER.token_to_id("a")
    grammar = two.compile(Grammar(GrammarKind.REGEX, "a"))
    assert mask(GrammarState(grammar, [a])).tolist() == [END, 5]
    assert GrammarState(grammar, [a, 5]).is_over


def test_without_end_tokens_the_tokenizer_names_its_own(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for named in ("<|end|>", {"content": "<|end|>"}):
        config.write_text(json.dumps({"eos_token": named}))
        grammar = GrammarLibrary(str(tmp_path), VOCAB_SIZE, [], 1).compile(ANY_TEXT)
        assert grammar.stop_token_ids == {END}
    config.write_text("{}")
    with pytest.raises(CheckpointError, match="names an end token"):
        GrammarLibrary(str(tmp_path), VOCAB_SIZE, [], 1)


def test_a_folder_without_a_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        GrammarLibrary(str(tmp_path), VOCAB_SIZE, [END], 1)


@pytest.mark.parametrize("grammar", ALL, ids=lambda g: g.kind.value)
def test_a_grammar_compiled_elsewhere_is_the_same(grammar: Grammar) -> None:
    loaded = library().load(grammar, compiled(grammar).handle.serialize_json())
    for tokens in outputs(compiled(grammar), 4, 2, most_tokens=60):
        state, other = GrammarState(compiled(grammar)), GrammarState(loaded)
        for token in tokens:
            np.testing.assert_array_equal(mask(state), mask(other))
            state.commit([token])
            other.commit([token])
        assert other.is_over
