"""The bytes of a registered pool's blocks, for checksums and for tests that damage them.

Host memory is seen where it lies; from a GPU each block is copied, on a stream of its own, so that
nothing waits for the model's work: right but slow. Next: `hocket/kv/checksum.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.kv.nixl_agent import RegisteredPool
from hocket.kv.transfer import BlockBytes


class HostBlocks:
    """Blocks in host memory. The pool stays mapped for the life of the process."""

    def __init__(self, pool: RegisteredPool) -> None:
        size = pool.num_blocks * pool.block_bytes
        memory = (ctypes.c_uint8 * size).from_address(pool.base_address)
        self._blocks = np.ctypeslib.as_array(memory).reshape(pool.num_blocks, pool.block_bytes)

    def read(self, block: int) -> NDArray[np.uint8]:
        return self._blocks[block]

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        self._blocks[block] = data


class CudaBlocks:
    """Blocks in a GPU's memory."""

    def __init__(self, pool: RegisteredPool) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", pool.device)
        self._stream = torch.cuda.Stream(self._device)
        self._blocks = torch.as_tensor(_CudaMemory(pool), device=self._device)

    def read(self, block: int) -> NDArray[np.uint8]:
        with self._torch.cuda.stream(self._stream):
            return self._blocks[block].cpu().numpy()

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        with self._torch.cuda.stream(self._stream):
            self._blocks[block].copy_(self._torch.from_numpy(data.copy()))
        self._stream.synchronize()


class _CudaMemory:
    """Tells torch of memory that it did not allocate, or does not know that it did."""

    def __init__(self, pool: RegisteredPool) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pool.num_blocks, pool.block_bytes),
            "typestr": "|u1",
            "data": (pool.base_address, False),
            "version": 3,
        }


def blocks_of(pool: RegisteredPool) -> BlockBytes:
    """The pool's blocks, in whichever memory they lie."""
    return HostBlocks(pool) if pool.memory == "cpu" else CudaBlocks(pool)
