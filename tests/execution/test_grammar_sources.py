"""What clients write as grammars: what is held, and the reason where it is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from hocket.errors import InvalidRequest
from hocket.execution.grammars.sources import ready
from hocket.execution.grammars.states import GrammarState
from hocket.request_params import Grammar, GrammarKind
from tests.execution.grammar_texts import END, TOKENIZER, compiled, outputs, text_of

_INTEGER, _TEXT, _TRUTH = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def _object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


HELD: dict[str, Any] = {
    "true": True,
    "anything": {},
    "object": {"type": "object"},
    "optional and required": _object({"a": _INTEGER, "b": _TRUTH}, required=["b"]),
    "closed object": _object({"a": _INTEGER}, additionalProperties=False),
    "more properties": _object({"a": _INTEGER}, required=["a"], additionalProperties=_TRUTH),
    "number of properties": {"type": "object", "additionalProperties": _TRUTH, "maxProperties": 2},
    "patternProperties": {"type": "object", "patternProperties": {"^a[0-9]": _INTEGER}},
    "propertyNames": {
        "type": "object",
        "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": _INTEGER,
    },
    "property names to escape": _object({'é"\\\n': _INTEGER}, required=['é"\\\n']),
    "array": {"type": "array", "items": _TRUTH, "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [_INTEGER, _TRUTH], "minItems": 2, "items": False},
    "integer range": {"type": "integer", "minimum": -17, "exclusiveMaximum": 2345},
    "number range": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7},
    "short": {"type": "string", "minLength": 2, "maxLength": 5},
    "long": {"type": "string", "minLength": 3, "maxLength": 200},
    "at least": {"type": ["string", "null"], "minLength": 2},
    "pattern": {"type": "string", "pattern": r'^\w+-[^"x]\.$'},
    "open pattern": {"type": "string", "pattern": r"a|b\$"},
    "pattern with an open end": {"type": "string", "pattern": "^(ab)?"},
    "pattern with an open start": {"type": "string", "pattern": r"\d$"},
    "date": {"type": "string", "format": "date"},
    "types": {"type": ["integer", "null"], "minimum": 5},
    "without its type": {"minLength": 3},
    "without its type either": {"minimum": 5},
    "enum": {"enum": [{"a": [1, 2.5, None]}, 'x\n"', True]},
    "enum of a type": {"type": ["string", "number"], "enum": ["a", 1, 2.5], "title": "E"},
    "const": {"const": "é/\n"},
    "anyOf": {"anyOf": [_INTEGER, _object({"a": _TRUTH}, required=["a"])], "description": "x"},
    "oneOf": {
        "oneOf": [
            _object({"kind": {"const": "i"}, "value": _INTEGER}, required=["kind", "value"]),
            _object({"kind": {"const": "b"}, "value": _TRUTH}, required=["kind", "value"]),
        ]
    },
    "allOf of one": {"allOf": [_INTEGER]},
    "$ref": _object(
        {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "n": {"$ref": "#/$defs/n"}},
        required=["n"],
        **{"$defs": {"n": {"minLength": 1, "maxLength": 3}}},
    ),
    "annotations": {"type": "integer", "title": "t", "default": {"not": 1}, "x-mine": {"if": 1}},
    "words as names": _object({"not": _INTEGER, "enum": _TRUTH, "minLength": _INTEGER}),
}


@pytest.mark.parametrize("name", HELD)
def test_outputs_are_valid_json_of_their_schema(name: str) -> None:
    schema = HELD[name]
    grammar = compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    texts = [text_of(tokens) for tokens in outputs(grammar, 3, 20)]
    assert len(texts) >= 10
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def _takes(schema: Any, text: str) -> bool:
    state = GrammarState(compiled(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))))
    return state.seek([*TOKENIZER.encode(text, add_special_tokens=False).ids, END])


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("closed object", ["{}", '{"a": -1}', '{ "a":\n1 }'], ['{"a": 1.5}', '{"b": 1}']),
        ("patternProperties", ['{"a1b": 3}', '{"a1": 3, "a2": 4}'], ['{"b": 3}']),
        ("short", ['"ab"', '"é b😀x"'], ['"a"', '"abcdef"', '"a\tb"', '"a\nb"']),
        ("long", ['"abc"', '"' + "a" * 200 + '"'], ['"ab"', '"' + "a" * 201 + '"', '"abc\tb"']),
        ("at least", ["null", '"abc"'], ['"a"']),
        ("open pattern", ['"xax"', '"b$"', '"xb$ "'], ['"b"', '"x"']),
        ("pattern with an open end", ['"abx"', '"x"', '""'], []),
        ("pattern with an open start", ['"x1"', '"1"'], ['"1x"']),
        ("date", ['"2024-02-29"'], ['"2024-13-01"', '"x"', "1"]),
        ("types", ["null", "5", "17"], ["4", '"a"']),
        ("$ref", ['{"n": "abc"}', '{"next": {"n": "a"}, "n": "b"}'], ['{"n": ""}', "{}"]),
    ],
)
def test_what_a_schema_takes(name: str, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not _takes(HELD[name], text)] == []
    assert [text for text in refused if _takes(HELD[name], text)] == []


def test_whitespace_between_words_has_an_end() -> None:
    assert _takes({"type": "object"}, "{" + " " * 20 + "}")
    assert not _takes({"type": "object"}, "{" + " " * 21 + "}")


NOT_HELD: list[tuple[Any, str]] = [
    ([], "a JSON object, or true"),
    (False, "Schema 'false' cannot accept any value"),
    ({"type": "foo"}, 'Unsupported type "foo"'),
    ({"type": []}, "type at # is one type or more"),
    ({"type": "object", "properties": 1}, "properties must be an object"),
    ({"enum": []}, "enum array must not be empty"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater than maximum"),
    ({"type": "string", "minLength": 5, "maxLength": 1}, "minLength 5 is greater than maxLength 1"),
    ({"type": "string", "minLength": "5"}, "minLength must be an integer"),
    ({"$ref": "#/$defs/nowhere"}, r"Cannot find field \$defs in #/\$defs/nowhere"),
    ({"not": {}}, "without not at #,"),
    ({"if": {}, "then": {"type": "integer"}}, "without if at #,"),
    (_object({"a": {"contains": _INTEGER}}), "without contains at #/properties/a,"),
    ({"type": "array", "items": {"uniqueItems": True}}, "without uniqueItems at #/items,"),
    ({"dependentRequired": {"a": ["b"]}}, "without dependentRequired"),
    ({"anyOf": [_TRUTH, {"not": {}}]}, "without not at #/anyOf/1,"),
    ({"hidden": {"not": {}}, "$ref": "#/hidden"}, "without not at #/hidden,"),
    ({"anyOf": [_TRUTH], "properties": {}}, "without properties beside anyOf at #,"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": _INTEGER}}, r"minimum beside \$ref"),
    ({"type": "integer", "enum": [1, "a"]}, "enum at # is of its type: 'a' is not"),
    ({"type": "string", "const": 3}, "const at # is of its type: 3 is not"),
    ({"type": "integer", "const": True}, "of its type: True is not"),
    (_object({"a": _INTEGER}, required=["b"]), "required at # is in its properties: 'b' is not"),
    (_object({"a": _TEXT}, patternProperties={"^a": _INTEGER}), "patternProperties of several"),
    (_object({"A": _TEXT}, propertyNames={"pattern": "^[a-z]$"}), "propertyNames beside"),
    ({"type": "string", "pattern": '^"$'}, "without a pattern with '\"', which JSON escapes, at #"),
    ({"type": "string", "pattern": r"^\\$"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"^a\n$"}, "which JSON escapes"),
    ({"type": "string", "pattern": r"^[\u0022]$"}, "which JSON escapes"),
    ({"type": "object", "patternProperties": {r"\x09": {}}}, "which JSON escapes"),
    ({"type": "string", "pattern": "^(a$"}, "The parenthesis is not closed"),
    ({"pattern": "^a$", "format": "date"}, "pattern beside format"),
    ({"const": "\ud800"}, "can be compiled"),
]


@pytest.mark.parametrize(("schema", "reason"), NOT_HELD, ids=lambda value: str(value)[:40])
def test_a_schema_that_would_not_be_held_is_refused(schema: Any, reason: str) -> None:
    _check_refused(GrammarKind.JSON_SCHEMA, json.dumps(schema), reason)


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (GrammarKind.JSON_SCHEMA, "", r"valid JSON \(Expecting value: line 1"),
        (GrammarKind.JSON_SCHEMA, '{"type": ', "valid JSON"),
        (GrammarKind.JSON_SCHEMA, '{"const": NaN}', "NaN is no JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "enum": [1.0, 1e999]}', "type: inf is not"),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000, "nested less deeply"),
        (GrammarKind.REGEX, "(a", r"compiled \(Regex parsing error at position 3: The parenthesis"),
        (GrammarKind.REGEX, "[a", "Unclosed"),
        (GrammarKind.REGEX, "a{2,1}", "Lower bound is larger than upper bound"),
        (GrammarKind.REGEX, "a{9999999999999999999}", "Integer is too large"),
        (GrammarKind.REGEX, r"(?=a)b", "Lookahead is not supported"),
        (GrammarKind.REGEX, r"(a)\1", "Backreference is not supported"),
        (GrammarKind.REGEX, "(" * 10_000 + ")" * 10_000, "Nest layer exceeded"),
        (GrammarKind.REGEX, "\0", "must not contain null"),
        (GrammarKind.REGEX, "\ud800", "can be compiled"),
        (GrammarKind.EBNF, "", 'root rule with name "root" is not found'),
        (GrammarKind.EBNF, "root ::= a", 'Rule "a" is not defined'),
        (GrammarKind.EBNF, 'root ::= "a', 'Expect " in string literal'),
        (GrammarKind.EBNF, 'root ::= "a"\nroot ::= "b"', "line 2, column 1: Rule .* multiple"),
        (GrammarKind.CHOICE, "yes", "valid JSON"),
        (GrammarKind.CHOICE, "{}", "a JSON list of one or more strings"),
        (GrammarKind.CHOICE, "[]", "a JSON list of one or more strings"),
        (GrammarKind.CHOICE, '["a", ""]', "none of them empty"),
        (GrammarKind.CHOICE, '["a", 1]', "a JSON list of one or more strings"),
        (GrammarKind.CHOICE, '["a", "a"]', "different strings"),
        (GrammarKind.CHOICE, r'["\ud800"]', "whole characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_malformed_grammar_is_refused(kind: GrammarKind, source: str, reason: str) -> None:
    _check_refused(kind, source, reason)


def _check_refused(kind: GrammarKind, source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compiled(Grammar(kind, source))
    assert caught.value.field == f"grammar.{kind.value}"
    assert "/" not in str(caught.value) or not re.search(r"\.(cc|h):\d", str(caught.value))


@pytest.mark.parametrize(
    ("written", "read"),
    [("a.b", r"a[^\n\r]b"), (r"a\.[.]", r"a\.[.]"), (r"[^\].].", r"[^\].][^\n\r]")],
)
def test_a_dot_stands_for_no_line_end(written: str, read: str) -> None:
    assert ready(Grammar(GrammarKind.REGEX, written)) == read


def test_every_choice_is_taken_as_it_is_written() -> None:
    choices = ['"', "\\", "\n", "\x00", "a b", "]", "é", "😀", "\u2028", "$(x)"]
    grammar = compiled(Grammar(GrammarKind.CHOICE, json.dumps(choices)))
    for choice in choices:
        tokens = TOKENIZER.encode(choice, add_special_tokens=False).ids
        assert GrammarState(grammar).seek([*tokens, END]), choice
        assert not GrammarState(grammar).seek([*tokens, *tokens]), choice
