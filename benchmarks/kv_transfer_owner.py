"""The far side of `kv_transfer.py`: owns blocks, and lets Hocket and raw NIXL read them.

Says how in one JSON line, then sleeps until its stdin is closed.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict

import numpy as np
from kv_transfer_raw import RawAgent

from hocket.kv.nixl_agent import NixlOptions, RegisteredPool, load_bindings, new_agent_name
from hocket.kv.nixl_transfer import NixlExporter

NUM_SLOTS = 64
_PAGE_BYTES = 4096


def new_blocks(num_blocks: int, block_bytes: int, seed: int) -> np.ndarray:
    """Page-aligned blocks [num_blocks, block_bytes], every page written."""
    raw = np.empty(num_blocks * block_bytes + _PAGE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _PAGE_BYTES
    values = raw[start : start + num_blocks * block_bytes]
    values[:] = np.arange(seed, seed + len(values), dtype=np.uint32).astype(np.uint8)
    return values.reshape(num_blocks, block_bytes)


def pool_of(values: np.ndarray) -> RegisteredPool:
    return RegisteredPool(values.ctypes.data, values.shape[1], values.shape[0])


def main() -> None:
    num_blocks, block_bytes = (int(word) for word in sys.argv[1:3])
    pool = pool_of(values := new_blocks(num_blocks, block_bytes, seed=1))
    exporter = NixlExporter(pool, NUM_SLOTS, NixlOptions())
    raw = RawAgent(load_bindings(""), new_agent_name("raw"), pool)
    description = asdict(exporter.describe())
    description["agent_metadata"] = base64.b64encode(description["agent_metadata"]).decode()
    raw_metadata = base64.b64encode(raw.metadata()).decode()
    said = {"pool": description, "raw": raw_metadata, "epoch": exporter.slot_epoch(0)}
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    exporter.close()
    del values


if __name__ == "__main__":
    main()
