"""What a client wrote as a grammar, as the compiler is to read it.

`ready(grammar)` is the first step of `library.py`. A list of choices becomes EBNF, a dot in a
regular expression leaves line ends out, and a JSON schema is checked: xgrammar passes over what it
cannot hold an output to, and an output that breaks its schema is worse than a refusal. Where it
could hold it to the same in other words, those are written in. What an output may look like is
then sometimes less than the schema allows, never more: properties in the schema's order and no
others beside them, little whitespace, nothing that JSON escapes in a string with a pattern or a
length. Of a format it has the shape: February may have 31 days.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from hocket.errors import InvalidRequest
from hocket.execution.grammars.states import refusal
from hocket.request_params import Grammar, GrammarKind

# What says something about values of one type only.
_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip
# xgrammar obeys the first of these that it finds, and nothing beside it.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NOT_HELD = ("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies",
             "$dynamicRef", "$recursiveRef")  # fmt: skip
_CONSTRAINTS = {"type", *_ALONE, *(word for words in _OF_TYPE.values() for word in words)}

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties",
           "unevaluatedItems")  # fmt: skip

_PARTS = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c.|.)|.", re.DOTALL)
_CONTROL = "ntrfvb0"  # after a backslash
# Strings of so many characters are twice as fast as a pattern; longer ones are very slow as one.
_SHORT = 128
_ANYTHING = r"[\s\S]*"


def ready(grammar: Grammar) -> str:
    """The schema, regular expression or EBNF for the compiler. Raises InvalidRequest."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _SchemaCheck(grammar).rewritten()
        case GrammarKind.REGEX:
            return "".join(
                r"[^\n\r]" if part == "." and not in_class else part
                for part, in_class, _ in _parts(grammar.source)
            )
        case GrammarKind.CHOICE:
            return _choices(grammar)
        case GrammarKind.EBNF:
            return grammar.source


def _choices(grammar: Grammar) -> str:
    found = _json(grammar)
    if not (isinstance(found, list) and found and all(isinstance(c, str) and c for c in found)):
        raise refusal(grammar, "a JSON list of one or more strings, none of them empty")
    if len(set(found)) < len(found):
        raise refusal(grammar, "a list of different strings")
    return "root ::= " + " | ".join(f'"{_escaped(choice, grammar)}"' for choice in found)


def _escaped(choice: str, grammar: Grammar) -> str:
    if any("\ud800" <= c <= "\udfff" for c in choice):
        raise refusal(grammar, "strings of whole characters")
    return "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in choice)


def _json(grammar: Grammar) -> Any:
    def wrong_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(grammar.source, parse_constant=wrong_constant)
    except ValueError as error:
        raise refusal(grammar, f"valid JSON ({error})") from None
    except RecursionError:
        raise refusal(grammar, "JSON that is nested less deeply") from None


def _parts(regex: str) -> Iterator[tuple[str, bool, bool]]:
    """Its characters and escapes, each with whether it is in a [class], and in a [^class]."""
    in_class = is_negated = False
    parts = _PARTS.findall(regex)
    for index, part in enumerate(parts):
        if not in_class and part == "[":
            is_negated = parts[index + 1 : index + 2] == ["^"]
            yield part, False, False
            in_class = True
            continue
        in_class = in_class and part != "]"
        yield part, in_class, in_class and is_negated


class _SchemaCheck:
    """One JSON schema: every schema in it, once, wherever a `$ref` finds it."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._root = _json(grammar)
        self._seen: set[int] = set()

    def rewritten(self) -> str:
        """The schema for xgrammar. Raises InvalidRequest for what would not be held."""
        if not isinstance(self._root, dict | bool):
            raise refusal(self._grammar, "a JSON object, or true")
        waiting: list[tuple[str, Any]] = [("#", self._root)]
        while waiting:
            where, schema = waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._seen:
                self._seen.add(id(schema))
                waiting += self._schemas_in(where, schema)
                self._check(where, schema)
        return json.dumps(self._root)

    def _schemas_in(self, where: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for word in _SCHEMAS_BY_NAME:
            if isinstance(schema.get(word), dict):
                for name, inner in schema[word].items():
                    yield f"{where}/{word}/{name}", inner
        for word in _SCHEMA_LISTS:
            if isinstance(schema.get(word), list):
                for index, inner in enumerate(schema[word]):
                    yield f"{where}/{word}/{index}", inner
        for word in _SCHEMA:
            yield f"{where}/{word}", schema.get(word)
        if isinstance(reference := schema.get("$ref"), str):
            yield reference, self._target(reference)

    def _target(self, reference: str) -> Any:
        """What it names as xgrammar looks it up; None where that finds nothing, and says so."""
        found: Any = self._root
        for name in reference.split("/")[1:]:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _check(self, where: str, schema: dict[str, Any]) -> None:
        for word in _NOT_HELD:
            if word in schema:
                raise self._not_held(where, word)
        if schema.get("uniqueItems") is True:
            raise self._not_held(where, "uniqueItems")
        if alone := next((word for word in _ALONE if word in schema), None):
            self._check_alone(where, alone, schema)
        elif not schema.get("type"):
            found = (t for t, words in _OF_TYPE.items() if any(word in schema for word in words))
            if (type_ := next(found, None)) or "type" in schema:
                schema["type"] = type_ or self._wrong(where, "type", "one type or more")
        self._check_object(where, schema)
        self._rewrite_strings(where, schema)

    def _check_alone(self, where: str, alone: str, schema: dict[str, Any]) -> None:
        for word in schema:
            is_type_of_values = word == "type" and alone in ("const", "enum")
            if word in _CONSTRAINTS and word != alone and not is_type_of_values:
                raise self._not_held(where, f"{word} beside {alone}")
        if alone in ("const", "enum") and "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            values = schema["enum"] if alone == "enum" else [schema["const"]]
            for value in values if isinstance(values, list) else ():
                if not any(_has_type(value, name) for name in types):
                    self._wrong(where, alone, f"of its type: {value!r:.40} is not")

    def _check_object(self, where: str, schema: dict[str, Any]) -> None:
        patterns, names = schema.get("patternProperties"), schema.get("propertyNames")
        properties = schema.get("properties", {})
        if isinstance(patterns, dict):
            if len(patterns) > 1 or properties:
                raise self._not_held(where, "patternProperties of several patterns, or beside "
                                            "properties")  # fmt: skip
            schema["patternProperties"] = {
                self._in_string(where, pattern): inner for pattern, inner in patterns.items()
            }
        if names is not None and (properties or patterns):
            raise self._not_held(where, "propertyNames beside properties or patternProperties")
        required = schema.get("required", ())
        if isinstance(properties, dict) and isinstance(required, list):
            for name in required:
                if isinstance(name, str) and name not in properties:
                    self._wrong(where, "required", f"in its properties: {name!r:.40} is not")

    def _rewrite_strings(self, where: str, schema: dict[str, Any]) -> None:
        if isinstance(pattern := schema.get("pattern"), str):
            if "format" in schema:
                raise self._not_held(where, "pattern beside format")
            schema["pattern"] = self._in_string(where, pattern)
        elif "format" not in schema and not {"minLength", "maxLength"}.isdisjoint(schema):
            low, high = schema.get("minLength", 0), schema.get("maxLength", _SHORT)
            if type(low) is type(high) is int and 0 <= low <= high <= _SHORT:
                top = schema.pop("maxLength", "")
                schema.pop("minLength", None)
                schema["pattern"] = rf"^[\s\S]{{{low},{top}}}$"

    def _in_string(self, where: str, pattern: str) -> str:
        """A pattern that may begin and end anywhere, as one that spans the whole JSON string.

        xgrammar matches it with what stands between the quotes, where these must be escaped.
        """
        for part, _, is_negated in _parts(pattern):
            if not is_negated and _must_be_escaped(part):
                raise self._not_held(where, f"a pattern with {part!r}, which JSON escapes,")
        starts, ends = pattern.startswith("^"), _PARTS.findall(pattern)[-1:] == ["$"]
        if starts and ends:
            return pattern
        body = pattern[starts : len(pattern) - ends]
        before, after = "" if starts else _ANYTHING, "" if ends else _ANYTHING
        return f"^{before}(?:{body}){after}$" if body else f"^{before or after}$"

    def _not_held(self, where: str, what: str) -> InvalidRequest:
        return refusal(self._grammar, f"a schema without {what} at {where}, which cannot be held")

    def _wrong(self, where: str, word: str, limit: str) -> NoReturn:
        raise refusal(self._grammar, f"a schema whose {word} at {where} is {limit}")


def _must_be_escaped(part: str) -> bool:
    if len(part) == 1:
        return part == '"' or part < " "
    kind, digits = part[1], part[2:].strip("{}")
    if kind in "xu" and digits:
        character = int(digits, 16)
        return character < 0x20 or character in (0x22, 0x5C)
    return kind in '"\\c' or kind in _CONTROL


def _has_type(value: Any, name: Any) -> bool:
    match value:
        case bool():
            return name == "boolean"
        case None:
            return name == "null"
        case str():
            return name == "string"
        case int() | float():
            return name == "number" or (name == "integer" and value % 1 == 0)
        case list():
            return name == "array"
        case _:
            return name == "object"
