"""Generate `docs/configuration.md`, every key of the TOML file, from `hocket.config`'s dataclasses.

`python tools/generate_configuration.py [FILE]` writes FILE (default: the page in the repository).
Defaults are the fields', meanings the docstrings' ("key: what it is", further lines indented). A
test compares the page with what this writes, so that it never trails the code.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hocket.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
HEAD = """\
# Configuration

`hocket up --config FILE --set section.key=value` takes one TOML file, and overrides that come after
it. Every key may be left out: the empty file serves the embedded model with one prefill and one
decode worker on loopback. An unknown key or a value out of range is an error that says what is
allowed. `deploy/examples/` has files to start from. On Kubernetes the same keys stand below
`config` in the chart's values, but those that follow from its other values.

This page is made from `hocket/config.py`, `hocket/autoscaler_settings.py` and
`hocket/transfer_settings.py` by `python tools/generate_configuration.py`: change it there.
"""

_HEAD = r"((?:\[[\w.]+\](?:, )?)+): (.+?)(?: Keys as in \[(\w+)\], but these:)?"


@dataclass(frozen=True)
class Table:
    """What one docstring says. `meanings`: by the keys that share one; `inherits`: the table that
    has those left out ("Keys as in [prefill], but these:"), or empty."""

    names: str
    intro: str
    meanings: dict[tuple[str, ...], str]
    inherits: str


def read_table(settings: type) -> Table:
    """What `settings` says of its table. Raises ValueError when its docstring has another form."""
    head, meanings = "", dict[tuple[str, ...], str]()
    keys: tuple[str, ...] = ()
    for line in inspect.cleandoc(settings.__doc__ or "").splitlines():
        entry = re.fullmatch(r"([a-z_]+(?:, [a-z_]+)*): (.+)", line)
        if entry:
            keys = tuple(entry[1].split(", "))
            meanings[keys] = entry[2]
        elif keys:
            meanings[keys] += f" {line.strip()}"
        else:
            head += f"{line} "
    parts = re.fullmatch(_HEAD, head.strip())
    if parts is None:
        raise ValueError(f"{settings.__name__} does not begin with [its table]: {head!r}")
    return Table(parts[1], parts[2], meanings, parts[3] or "")


def rows(settings: type, tables: dict[str, type]) -> Iterator[str]:
    """The rows of a Markdown table, in the order of the fields. Raises ValueError for a key that
    nothing describes, and for a description of no key."""
    table = read_table(settings)
    known = {f.name: f for f in fields(settings)}
    if stray := {key for keys in table.meanings for key in keys} - set(known):
        raise ValueError(f"{settings.__name__} describes what it does not have: {sorted(stray)}")
    meanings = {key: (keys, text) for keys, text in table.meanings.items() for key in keys}
    if table.inherits:
        parent = read_table(tables[table.inherits]).meanings
        meanings = {key: (keys, text) for keys, text in parent.items() for key in keys} | meanings
    done: set[str] = set()
    for name in known:
        if name not in meanings:
            raise ValueError(f"{settings.__name__}.{name} is not described")
        keys, meaning = meanings[name]
        if name not in done:
            done.update(keys)
            names = ", ".join(f"`{key}`" for key in keys)
            defaults = ", ".join(default_of(known[key]) for key in keys)
            yield f"| {names} | {defaults} | {meaning} |"


def default_of(field: Any) -> str:
    """The default as TOML writes it; of a table, that it is one."""
    value = field.default_factory() if field.default is MISSING else field.default
    return "a table" if is_dataclass(value) else f"`{json.dumps(value)}`"


def sections(settings: type, name: str, tables: dict[str, type]) -> Iterator[str]:
    """The sections of one table and of those inside it that were not met before."""
    tables[name] = settings
    table = read_table(settings)
    body = "\n".join(rows(settings, tables))
    yield (
        f"\n## `{table.names}`\n\n{table.intro[0].upper()}{table.intro[1:]}\n\n"
        f"| key | default | meaning |\n|---|---|---|\n{body}\n"
    )
    for key, hint in typing.get_type_hints(settings).items():
        if is_dataclass(hint) and hint not in tables.values():
            assert isinstance(hint, type)
            yield from sections(hint, f"{name}.{key}", tables)


def page() -> str:
    """The whole page."""
    tables: dict[str, type] = {}
    hints = typing.get_type_hints(Config)
    return HEAD + "".join(part for name in hints for part in sections(hints[name], name, tables))


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
