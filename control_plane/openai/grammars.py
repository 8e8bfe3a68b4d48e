"""What the output must look like, in the words of OpenAI and of vLLM, as a `Grammar`.

    response_format      {"type": "json_object"} or {"type": "json_schema", "json_schema": {...}}
    structured_outputs   {"json": ...}, {"regex": ...}, {"choice": [...]} or {"grammar": ...}
    guided_json, guided_regex, guided_choice, guided_grammar: the same, as older clients say it

One of them at most; part of `requests.py`.
"""

from __future__ import annotations

import json
from typing import Any

from control_plane.openai.fields import Fields, checked_text
from hocket.errors import InvalidRequest
from hocket.rpc import generation_pb2 as generation

_ANY_OBJECT = '{"type":"object"}'
_KINDS = ("json", "regex", "choice", "grammar")
# Options of vLLM's that say how JSON is written: only their neutral values are served.
_UNSERVED = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern",
             "structural_tag")  # fmt: skip


def set_grammar(message: generation.GenerateRequest, fields: Fields) -> str:
    """Sets the grammar that the body asks for, if it does; the name of its field, or "".

    Raises InvalidRequest.
    """
    structured = fields.table("structured_outputs") or Fields({}, "structured_outputs.")
    for name in _UNSERVED:
        if structured.value(name):
            raise structured.wrong(name, "absent", "It is not served.")
    sources = [(structured, kind, kind) for kind in _KINDS]
    sources += [(fields, f"guided_{kind}", kind) for kind in _KINDS]
    found = [source for source in sources if source[0].value(source[1]) is not None]
    if structured.boolean("json_object"):
        found.append((structured, "json_object", "json_object"))
    if (response := _response_type(fields)) != "text":
        found.append((fields, "response_format", response))
    if not found:
        return ""
    if len(found) > 1:
        raise found[1][0].wrong(found[1][1], f"absent beside {found[0][0].full_name(found[0][1])}")
    ((holder, name, kind),) = found
    _set(message.grammar, holder, name, kind)
    return holder.full_name(name)


def _set(grammar: generation.Grammar, fields: Fields, name: str, kind: str) -> None:
    match kind:
        case "json":
            grammar.json_schema = _schema(fields, name)
        case "regex":
            grammar.regex = fields.text(name) or ""
        case "grammar":
            grammar.ebnf = fields.text(name) or ""
        case "choice":
            grammar.choice.SetInParent()
            for index, item in enumerate(fields.items(name) or []):
                full_name = f"{fields.full_name(name)}[{index}]"
                grammar.choice.strings.append(checked_text(item, full_name))
        case "json_object":
            grammar.json_schema = _ANY_OBJECT
        case _:
            grammar.json_schema = _response_schema(fields)


def _response_type(fields: Fields) -> str:
    response = fields.table("response_format")
    if response is None:
        return "text"
    kind = response.text("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise response.wrong("type", "'text', 'json_object' or 'json_schema'")
    return kind


def _response_schema(fields: Fields) -> str:
    """The schema of a `response_format`. Whether it is to be strict makes no difference: it is."""
    response = fields.table("response_format") or Fields({})
    described = response.table("json_schema")
    if described is None:
        raise response.wrong("json_schema", "an object with the schema")
    return _schema(described, "schema")


def _schema(fields: Fields, name: str) -> str:
    """A JSON Schema, which may come as an object, as true (any JSON), or as its text."""
    value: Any = fields.value(name)
    if isinstance(value, str):
        return checked_text(value, fields.full_name(name))
    if not isinstance(value, dict) and value is not True:
        raise fields.wrong(name, "a JSON Schema that something can be of")
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        limit = "a JSON Schema that is not nested so deeply"
        raise InvalidRequest(fields.full_name(name), "an object", limit) from None
