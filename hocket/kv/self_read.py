"""A worker READs a block of its own, before it says that it serves: a canary of the KV path.

A NIXL that cannot move a block here (a missing library, memory that can't be registered, a device
that is there and not usable) is found at start and not by the first request. It takes the whole
way: two agents, connection, READ, fence, checksum; some 30 ms. `hocket/kv/transport.py` says what
the transport that it finds is worth. Called by `hocket.execution.transfer_setup`.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np

from hocket.errors import ConfigError
from hocket.kv.nixl_agent import NixlError, NixlOptions, RegisteredPool
from hocket.kv.nixl_transfer import NixlExporter, NixlImporter
from hocket.kv.pool_bytes import blocks_of
from hocket.kv.transfer import ReadResult, ReadState

# A READ within one process takes milliseconds; the first connection over RDMA maybe a second.
_TIMEOUT_S = 20.0


def read_own_block(pool: RegisteredPool, options: NixlOptions) -> str:
    """READs the pool's first block into its second one (into itself where there is only one), by
    two agents that are gone afterwards, so that nothing they did shows in the worker's own.

    Returns the transport, as `KVImporter.transport` says it. Leaves both blocks zero, as a new pool
    is. To be called before anything lies in the pool.

    Raises:
        ConfigError: the block did not arrive; says why.
    """
    target = min(1, pool.num_blocks - 1)
    some = replace(pool, num_blocks=target + 1)
    blocks = blocks_of(some)
    blocks.write(0, np.arange(pool.block_bytes, dtype=np.uint64).astype(np.uint8))
    try:
        with (
            closing(NixlExporter(some, 1, replace(options, require="any"))) as exporter,
            closing(NixlImporter(some, replace(options, require="any"))) as importer,
        ):
            result = _read(exporter, importer, target)
            transport = importer.transport()
    except NixlError as error:
        result, transport = ReadResult(ReadState.FAILED, str(error)), ""
    for block in (0, target):
        blocks.write(block, np.zeros(pool.block_bytes, np.uint8))
    if result.state is not ReadState.DONE:
        why = result.error or f"nothing arrived within {_TIMEOUT_S:g} s"
        way_out = "" if options.tls == "tcp" else ' Try transfer.tls = "tcp".'
        raise ConfigError(
            f"NIXL cannot move a KV block even within this process, so no hand-off would work: "
            f"{why}.{way_out} With UCX_LOG_LEVEL=info UCX says more.",
            field="transfer.tls",
        )
    return transport


def _read(exporter: NixlExporter, importer: NixlImporter, target: int) -> ReadResult:
    ended = threading.Event()
    importer.notify(ended.set)
    checksums = exporter.checksums([0])
    read = importer.read_blocks(exporter.describe(), 0, [0], [target], checksums)
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        ended.clear()
        result = importer.poll(read)
        left_s = deadline - time.monotonic()
        if result.state is not ReadState.IN_PROGRESS or left_s <= 0:
            break
        ended.wait(left_s)
    if result.state is ReadState.DONE and result.epoch != exporter.slot_epoch(0):
        return ReadResult(ReadState.FAILED, "another epoch arrived than the one that was sent")
    return result
