"""A process that owns blocks and lets them be read: the far side of `nixl_reader.py`.

Says how to read it in one JSON line, then does what stdin says ("bump SLOT", "cpu", "sums BLOCK
...", "spoil BLOCK") and answers each with a line; ends when stdin does. Block b is filled with
`pattern(seed, b)`; "spoil" changes its last byte.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from dataclasses import asdict

import numpy as np

from hocket.kv.nixl_agent import NixlOptions, RegisteredPool
from hocket.kv.nixl_transfer import NixlExporter


class Blocks:
    """Blocks in "cpu" or "cuda" memory, seen through numpy."""

    def __init__(self, values: np.ndarray, memory: str) -> None:
        self.memory = memory
        self.cuda_version = ""
        self._values = values
        if memory == "cuda":
            import torch

            self.cuda_version = torch.version.cuda or ""
            self._tensor = torch.from_numpy(values).cuda()
            torch.cuda.synchronize()

    @property
    def pool(self) -> RegisteredPool:
        address = self._values.ctypes.data if self.memory == "cpu" else self._tensor.data_ptr()
        num_blocks, block_bytes = self._values.shape
        return RegisteredPool(address, block_bytes, num_blocks, self.memory)

    def read(self) -> np.ndarray:
        return self._values if self.memory == "cpu" else self._tensor.cpu().numpy()

    def spoil(self, block: int) -> None:
        if self.memory == "cpu":
            self._values[block, -1] ^= 0xFF
        else:
            self._tensor[block, -1] ^= 0xFF

    def fill(self, value: int) -> None:
        if self.memory == "cpu":
            self._values[:] = value
        else:
            self._tensor.fill_(value)


def pattern(seed: int, block: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng((seed, block)).integers(0, 256, block_bytes, dtype=np.uint8)


def main() -> None:
    seed, num_blocks, block_bytes = (int(word) for word in sys.argv[1:4])
    values = np.stack([pattern(seed, b, block_bytes) for b in range(num_blocks)])
    blocks = Blocks(values, memory=sys.argv[4])
    options = NixlOptions(cuda_version=blocks.cuda_version)
    exporter = NixlExporter(blocks.pool, num_slots=4, options=options)
    description = asdict(exporter.describe())
    description["agent_metadata"] = base64.b64encode(description["agent_metadata"]).decode()
    print(json.dumps({"pool": description, "epoch": exporter.slot_epoch(1)}), flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "bump":
            print(exporter.bump_slot_epoch(int(words[1])), flush=True)
        elif words[0] == "cpu":
            print(time.process_time(), flush=True)
        elif words[0] == "sums":
            print(exporter.checksums([int(word) for word in words[1:]]), flush=True)
        elif words[0] == "spoil":
            blocks.spoil(int(words[1]))
            print("done", flush=True)
    exporter.close()


if __name__ == "__main__":
    main()
