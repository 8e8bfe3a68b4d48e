"""First verb of routing: which workers may serve a request at all, and why the others may not.

A filter is a pure function from a snapshot and a need to a reason against the worker, or "".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from control_plane.router.snapshot import Need, WorkerSnapshot
from hocket.types import PROTOCOL_VERSION

Filter = Callable[[WorkerSnapshot, Need], str]


def is_listed(snapshot: WorkerSnapshot, need: Need) -> str:
    """The registry must still name it."""
    return "" if snapshot.is_listed else "is no longer registered"


def is_connected(snapshot: WorkerSnapshot, need: Need) -> str:
    """Its Session must be up."""
    return "" if snapshot.is_connected else f"is not reachable at {snapshot.worker.address}"


def is_not_draining(snapshot: WorkerSnapshot, need: Need) -> str:
    """It must take new requests."""
    return "is draining" if snapshot.worker.is_draining else ""


def is_proven(snapshot: WorkerSnapshot, need: Need) -> str:
    """A canary must have passed it."""
    return snapshot.kept_out


def has_not_failed(snapshot: WorkerSnapshot, need: Need) -> str:
    """It must not have refused or lost this very request before."""
    worker = snapshot.worker
    has_failed = worker.worker_id in need.avoid or worker.group in need.avoid
    return "has failed this request already" if has_failed else ""


def says_the_same(snapshot: WorkerSnapshot, need: Need) -> str:
    """What has begun must go on with the same model and arithmetic."""
    if need.fingerprint is None or snapshot.worker.fingerprint == need.fingerprint:
        return ""
    return f"differs in {need.fingerprint.difference(snapshot.worker.fingerprint)}"


def speaks_our_protocol(snapshot: WorkerSnapshot, need: Need) -> str:
    """Versions N and N-1 understand each other."""
    version = snapshot.worker.protocol_version
    if abs(version - PROTOCOL_VERSION) <= 1:
        return ""
    return f"speaks protocol {version}, the gateway {PROTOCOL_VERSION}"


def fits_prefill(snapshot: WorkerSnapshot, need: Need) -> str:
    """The whole prompt must fit into the worker, were it empty."""
    worker = snapshot.worker
    most = min(worker.max_prompt_tokens, worker.num_blocks * worker.block_tokens)
    return "" if need.prompt_tokens <= most else f"takes prompts of at most {most} tokens"


def fits_decode(snapshot: WorkerSnapshot, need: Need) -> str:
    """Prompt and output must fit into the worker, were it empty."""
    worker = snapshot.worker
    most = min(worker.max_context_tokens, worker.num_blocks * worker.block_tokens)
    if need.prompt_tokens + need.max_tokens <= most:
        return ""
    return f"holds at most {most} tokens of prompt and output"


AVAILABLE: tuple[Filter, ...] = (
    is_listed,
    is_connected,
    is_not_draining,
    speaks_our_protocol,
    is_proven,
    has_not_failed,
    says_the_same,
)


def split(
    snapshots: Sequence[WorkerSnapshot], filters: Sequence[Filter], need: Need
) -> tuple[list[WorkerSnapshot], dict[str, str]]:
    """Those that pass every filter, and for each other one its name and the first reason."""
    passed: list[WorkerSnapshot] = []
    reasons: dict[str, str] = {}
    for snapshot in snapshots:
        reason = next((r for f in filters if (r := f(snapshot, need))), "")
        if reason:
            reasons[snapshot.name] = reason
        else:
            passed.append(snapshot)
    return passed, reasons
