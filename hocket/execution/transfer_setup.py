"""A worker's half of the KV transfer, tried before it is used: the exporter, or the importer.

Comes after `hocket/execution/model_setup.py`, which made the pool that it registers. Either way the
worker first READs a block of its own: what is found is held against `transfer.require`
(`hocket/kv/transport.py` says how). Next: `prefill_workers/server.py` and
`decode_workers/server.py` put a table on top.
"""

from __future__ import annotations

import logging

import torch

from hocket import environment
from hocket.config import WorkerSettings
from hocket.errors import ConfigError
from hocket.kv.faults import FaultyImporter
from hocket.kv.nixl_agent import NixlOptions, RegisteredPool
from hocket.kv.nixl_transfer import NixlExporter, NixlImporter
from hocket.kv.self_read import read_own_block
from hocket.kv.transfer import KVImporter
from hocket.kv.transport import why_not_start

_logger = logging.getLogger(__name__)


def set_up_exporter(settings: WorkerSettings, pool: RegisteredPool) -> NixlExporter:
    """What peers read this worker's pool through. The pool is new: nothing lies in it.

    Raises:
        ConfigError: NIXL does not work here, or not over what `transfer.require` says.
    """
    options = nixl_options(settings)
    _check_transport(settings, pool, options)
    return NixlExporter(pool, settings.transfer.num_slots, options)


def set_up_importer(settings: WorkerSettings, pool: RegisteredPool) -> KVImporter:
    """What this worker reads peers' pools with. With [faults], its READs go wrong on purpose. The
    pool is new: nothing lies in it.

    Raises:
        ConfigError: NIXL does not work here, or not over what `transfer.require` says.
    """
    options = nixl_options(settings)
    _check_transport(settings, pool, options)
    importer = NixlImporter(pool, options)
    if settings.faults.total > 0:
        return FaultyImporter(importer, settings.faults)
    return importer


def nixl_options(settings: WorkerSettings) -> NixlOptions:
    """How the worker's transfer uses NIXL.

    Raises:
        ConfigError: another backend is wanted, which only exists inside one process.
    """
    transfer = settings.transfer
    if transfer.backend != "nixl":
        raise ConfigError(
            f"transfer.backend is {transfer.backend!r}: that moves blocks inside one process "
            "only; workers need 'nixl'.",
            field="transfer.backend",
        )
    return NixlOptions(
        cuda_version=torch.version.cuda or "",
        tls=transfer.tls,
        ucx_log=environment.ucx_log_file(),
        require=transfer.require,
        has_rdma_devices=environment.has_rdma_devices(),
    )


def _check_transport(settings: WorkerSettings, pool: RegisteredPool, options: NixlOptions) -> None:
    transport = read_own_block(pool, options)
    _logger.info("A KV block of this worker's own was moved by %s.", transport)
    require = settings.transfer.require
    if why_not := why_not_start(transport, require, options.has_rdma_devices):
        raise ConfigError(
            f"transfer.require is {require!r}, but {why_not}. Give the worker a host with RDMA, or "
            'set transfer.require = "any".',
            field="transfer.require",
        )
