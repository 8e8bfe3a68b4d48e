"""Typed values out of a JSON object that a client sent; what is wrong is an `InvalidRequest`.

`requests.py` asks for each field by its OpenAI name, which is also the `param` of the error. Null
is the same as absent everywhere, as it is at OpenAI.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from hocket.errors import InvalidRequest

MAX_UINT32 = 2**32 - 1


class Fields:
    """The fields of one JSON object. `where` is its own name with a dot, or empty."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def names(self) -> list[str]:
        """Of all fields that are there."""
        return list(self._values)

    def value(self, name: str) -> Any:
        """As it came; None when it is absent."""
        return self._values.get(name)

    def boolean(self, name: str) -> bool:
        """False when absent."""
        value = self.value(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_UINT32) -> int | None:
        """A whole number within the limits, both included."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str) -> float | None:
        """Any number that a float can hold."""
        value = self.value(name)
        if value is None:
            return None
        try:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        except OverflowError:
            pass
        raise self.wrong(name, "a number")

    def text(self, name: str) -> str | None:
        """A string that UTF-8 can hold."""
        value = self.value(name)
        return None if value is None else checked_text(value, self.full_name(name))

    def table(self, name: str) -> Fields | None:
        """A JSON object."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(cast("dict[str, Any]", value), f"{self.full_name(name)}.")

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return cast("list[Any]", value)

    def full_name(self, name: str) -> str:
        """The field as an error names it."""
        return f"{self._where}{name}"

    def wrong(self, name: str, limit: str, way_out: str = "") -> InvalidRequest:
        """The error that this field is not as it must be."""
        return InvalidRequest(self.full_name(name), self.value(name), limit, way_out)


def checked_text(value: object, name: str) -> str:
    """`value` if it is a string that UTF-8 can hold. Raises InvalidRequest."""
    if not isinstance(value, str):
        raise InvalidRequest(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, value, "valid Unicode, without lone surrogates") from None
    return value


def parse_object(body: bytes) -> Fields:
    """The JSON object of a request's body. Raises InvalidRequest."""
    try:
        values = json.loads(
            body, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeated
        )
    except (ValueError, RecursionError) as error:
        told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest("body", _start(body), f"a JSON object ({told})") from None
    if not isinstance(values, dict):
        raise InvalidRequest("body", _start(body), "a JSON object")
    return Fields(cast("dict[str, Any]", values))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What the first of two fields said would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.40} is there more than once")
    return values


def _start(body: bytes) -> str:
    return body[:100].decode(errors="replace")
