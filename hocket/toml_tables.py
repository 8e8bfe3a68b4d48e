"""From a TOML table to frozen dataclasses, every key and value checked.

`hocket.config` declares the dataclasses: a field's type and what `at_least`, `between` and `one_of`
say of it are all that is allowed. `build` makes them of a table; errors name the key, the value
and the limit, an unknown key the nearest known one.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, cast

from hocket.errors import ConfigError

_Settings = TypeVar("_Settings")


def at_least(low: float, default: Any) -> Any:
    """A field whose value is not below `low`."""
    return field(default=default, metadata={"min": low})


def between(low: float, high: float, default: Any) -> Any:
    """A field whose value is from `low` to `high`."""
    return field(default=default, metadata={"min": low, "max": high})


def one_of(default: str, *others: str) -> Any:
    """A field that is one of these words."""
    return field(default=default, metadata={"choices": (default, *others)})


def lay_over(table: dict[str, Any], override: str) -> None:
    """Puts a `section.key=value` into the table. Raises ConfigError."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys) or len(keys) < 2:
        raise ConfigError(f"{override!r} is not of the form section.key=value.", field=override)
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for depth, key in enumerate(keys[:-1]):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise wrong(".".join(keys[: depth + 1]), inner, "a table")
        table = cast("dict[str, Any]", inner)
    table[keys[-1]] = value


def build(settings: type[_Settings], table: Mapping[str, Any], where: str) -> _Settings:
    """`settings` from a table; `where` is the table's name with its dot, or empty.

    Raises ConfigError.
    """
    assert is_dataclass(settings)
    known = {f.name: f for f in fields(settings)}
    hints = typing.get_type_hints(settings)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise _unknown(where, key, list(known))
        values[key] = _check(f"{where}{key}", value, hints[key], known[key].metadata)
    return cast(_Settings, settings(**values))


def _check(key: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """The value as the type `hint`, within `limits`."""
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong(key, value, "a table")
        return build(cast("type[Any]", hint), cast("dict[str, Any]", value), f"{key}.")
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise wrong(key, value, "a table")
        items = cast("dict[str, Any]", value)
        of = typing.get_args(hint)[1]
        return {name: _check(f"{key}.{name}", item, of, {}) for name, item in items.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = (
        type(value) is hint
        and value in limits.get("choices", (value,))
        and (hint is not float or math.isfinite(value))
        and limits.get("min", value) <= value <= limits.get("max", value)
    )
    if not fits:
        raise wrong(key, value, _allowed(hint, limits))
    return value


def _allowed(hint: Any, limits: Mapping[str, Any]) -> str:
    if "choices" in limits:
        return "one of " + ", ".join(repr(choice) for choice in limits["choices"])
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[hint]
    low, high = limits.get("min"), limits.get("max")
    if low is not None and low == high:
        return f"{low}: nothing else is built yet"
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return f"{name}, at least {low}" if low is not None else name


def wrong(key: str, value: object, allowed: str) -> ConfigError:
    """The error for a value that is not allowed."""
    message = f"{key} is {value!r}; it must be {allowed}."
    return ConfigError(message, field=key, value=repr(value), limit=allowed)


def _unknown(where: str, key: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {where}{near[0]}?" if near else f"known: {', '.join(known)}."
    return ConfigError(f"{where}{key} is not a known key; {hint}", field=f"{where}{key}")
