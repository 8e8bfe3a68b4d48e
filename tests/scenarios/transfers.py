"""The two transports that every scenario runs on: in memory, and NIXL over TCP.

Both hold a READ back until the scenario says what happens to it, so they share one vocabulary:
`fabric.reads`, `copy`, `deliver`, `complete`, `fail`, `fence`, and pools that are read and written
as bytes. Over NIXL the bytes, and after them the epoch, really travel when a READ is delivered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hocket.kv.memory_transfer import MemoryExporter, MemoryFabric, MemoryImporter
from tests.scenarios.nixl_fabric import HeldExporter, HeldImporter, NixlFabric


@dataclass(frozen=True)
class Transfer:
    """How to build one: `fabric(is_automatic=...)`, `exporter(fabric, pool, num_slots)` and
    `importer(fabric, pool)`, `pool` being a list of every block's bytes. `transport` is what an
    importer says that it found."""

    transport: str
    fabric: Callable[..., Any]
    exporter: Callable[..., Any]
    importer: Callable[..., Any]


MEMORY = Transfer("memory", MemoryFabric, MemoryExporter, MemoryImporter)
NIXL = Transfer("tcp", NixlFabric, HeldExporter, HeldImporter)
TRANSFERS = {"memory": MEMORY, "nixl": NIXL}
