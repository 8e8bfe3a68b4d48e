"""Grammars over the embedded model's vocabulary, and random outputs under them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

import hocket
from hocket.execution.grammars.library import GrammarLibrary
from hocket.execution.grammars.states import (
    CompiledGrammar,
    GrammarState,
    allowed_tokens,
    empty_masks,
)
from hocket.request_params import Grammar, GrammarKind

FOLDER = Path(hocket.__file__).parent / "checkpoints" / "hocket-tiny"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
VOCAB_SIZE = 4096
END = 1
SPECIAL = (0, 1, 2, 3, 4, 5, 6)  # begin, end, pad and the roles

SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type": "object", "required": ["name", "sizes"], "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        "kind": {"enum": ["a", "bc", null]}}}""",
)
REGEX = Grammar(GrammarKind.REGEX, r"[a-z]{2,6}( [A-Z][a-z]+)*: -?\d+(\.\d{1,3})?")
EBNF = Grammar(
    GrammarKind.EBNF,
    """root ::= term ("+" term)*
    term ::= [0-9]+ | "(" root ")\"""",
)
CHOICE = Grammar(
    GrammarKind.CHOICE, r'["yes", "yes, but", "no", "peut-être\n\"\\ \u00e9 \ud83d\ude00"]'
)
ALL = (SCHEMA, REGEX, EBNF, CHOICE)


@cache
def library() -> GrammarLibrary:
    return GrammarLibrary(str(FOLDER), VOCAB_SIZE, [END], 1)


@cache
def compiled(grammar: Grammar) -> CompiledGrammar:
    return library().compile(grammar)


def mask(state: GrammarState) -> np.ndarray:
    """The ids allowed next."""
    masks = empty_masks(1, state.vocab_size)
    state.fill(masks)
    return allowed_tokens(masks[0], state.vocab_size)


# What ends a word of any of the grammars.
_CLOSING = np.array([END, *(TOKENIZER.token_to_id(mark) for mark in '"}]),:-.0123456789')])


def outputs(
    grammar: CompiledGrammar, seed: int, count: int, most_tokens: int = 200
) -> Iterator[list[int]]:
    """Random token ids under the grammar, each with its end token; hurried on towards the end. One
    that is not there after `most_tokens` is left out."""
    chance = Random(seed)
    for _ in range(count):
        state, tokens = GrammarState(grammar), list[int]()
        while not state.is_over and len(tokens) < most_tokens:
            allowed = mask(state)
            closing = np.intersect1d(allowed, _CLOSING)
            hurries = len(closing) > 0 and chance.random() < 0.6
            tokens.append(int(chance.choice(closing if hurries else allowed)))
            state.commit(tokens[-1:])
        if state.is_over:
            yield tokens


def text_of(tokens: list[int]) -> str:
    """As the client sees it."""
    return TOKENIZER.decode(tokens, skip_special_tokens=True)
