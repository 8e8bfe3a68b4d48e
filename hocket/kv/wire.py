"""What the Export stream says about pools and failures, to and from protobuf.

`hocket.rpc.convert` lies below the transfer seam and does not know `PoolDescription`; the two
hand-off tables do the rest of their conversions there.
"""

from __future__ import annotations

from hocket.errors import HandOffFailed, HocketError
from hocket.kv.transfer import PoolDescription
from hocket.rpc import worker_pb2 as worker


def pool_to_message(pool: PoolDescription) -> worker.ExportOpened:
    """How to read the exporter's pool."""
    return worker.ExportOpened(
        agent=pool.agent,
        agent_metadata=pool.agent_metadata,
        base_address=pool.base_address,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks,
        device=pool.device,
        memory=pool.memory,
        epoch_address=pool.epoch_address,
        num_slots=pool.num_slots,
    )


def pool_from_message(message: worker.ExportOpened) -> PoolDescription:
    """The inverse of `pool_to_message`."""
    return PoolDescription(
        agent=message.agent,
        agent_metadata=message.agent_metadata,
        base_address=message.base_address,
        block_bytes=message.block_bytes,
        num_blocks=message.num_blocks,
        device=message.device,
        memory=message.memory,
        epoch_address=message.epoch_address,
        num_slots=message.num_slots,
    )


def error_to_event(error: HocketError) -> worker.ExportEvent:
    """The last event of an export that failed."""
    aborted = worker.ExportAborted(code=error.code, message=str(error), reason=error.reason)
    return worker.ExportEvent(aborted=aborted)


def error_from_message(message: worker.ExportAborted) -> HandOffFailed:
    """Whatever ended the export, for the reader the hand-off failed; the cause is kept."""
    return HandOffFailed(
        f"The prefill worker ended the hand-off: {message.message}",
        cause=message.reason,
        cause_code=message.code,
    )
