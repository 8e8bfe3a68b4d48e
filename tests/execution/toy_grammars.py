"""A vocabulary of characters and pieces of text for random models, and grammars over it.

Pieces overlap ("a", "ab", "abc"), so the same text has several spellings, and a draft can be wrong
in the text or in the spelling only.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import xgrammar

from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.local_engine import LocalRequest
from hocket.request_params import Grammar, GrammarKind

END = 1
_PIECES = ["", "", *"abcdef019", *'{}[]":, ', "ab", "abc", "bc", "de", "ef", '{"', '":', "],"]
PIECES = [*_PIECES, "true", "null", "aaaa", "10", "cab", "-", "f,", "é"]

GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[a-f]{3,9}"),
    Grammar(GrammarKind.REGEX, "(abc|de|-?[019]+)(,(abc|de|-?[019]+))*"),
    Grammar(GrammarKind.EBNF, 'root ::= "a" root "b" | "c" [d-f]? "0" | "é"'),
    Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "array", "items": {"enum": [True, None, 10]}},
                    "bc": {"type": "string", "pattern": "^[a-e]*$"},
                },
                "required": ["a", "bc"],
                "additionalProperties": False,
            }
        ),
    ),
)


@cache
def compiled(grammar: Grammar, vocab_size: int) -> CompiledGrammar:
    """Over `PIECES`; the model's other tokens are no text, and no grammar allows them."""
    vocabulary = [*PIECES, *[""] * (vocab_size - len(PIECES))]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_size=vocab_size, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    match grammar.kind:
        case GrammarKind.REGEX:
            handle = compiler.compile_regex(grammar.source)
        case GrammarKind.JSON_SCHEMA:
            handle = compiler.compile_json_schema(grammar.source, any_whitespace=False)
        case _:
            handle = compiler.compile_grammar(grammar.source)
    return CompiledGrammar(grammar, handle, frozenset([END]), vocab_size, 0)


def under(grammar: Grammar, request: LocalRequest, vocab_size: int) -> LocalRequest:
    """The request with this grammar; its end token ends the output."""
    stopping = request.stopping
    return replace(
        request,
        sampling=replace(request.sampling, grammar=grammar),
        stopping=replace(stopping, stop_token_ids=stopping.stop_token_ids | {END}),
        grammar=compiled(grammar, vocab_size),
    )


def text_of(token_ids: tuple[int, ...]) -> str:
    """What was said, without the end."""
    return "".join(PIECES[token] for token in token_ids if token != END)
