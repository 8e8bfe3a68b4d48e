"""What a gateway knows of the cluster, as the message that `hocket status` prints.

Pure: snapshots of the workers, the gateway's figures and what the store says come in, one
`ClusterStatus` goes out. `control_plane.admin` gathers the parts and answers with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from control_plane.cluster.scaling_store import AskedSize, PoolStatus, ScalingStatus
from control_plane.router.snapshot import WorkerSnapshot
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.convert import description_to_message
from hocket.telemetry import GatewayFigures, LatencySum
from hocket.types import DraftCounts, Role

_ROLES = list(Role)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the store says. `status` None: nobody has published any. `asked`: of each pool that an
    operator asked anything of. `fault`: why the store did not answer, "" when it did."""

    status: ScalingStatus | None = None
    asked: Mapping[Role, AskedSize] = field(default_factory=dict[Role, AskedSize])
    fault: str = ""


def workers_status(snapshots: Iterable[WorkerSnapshot]) -> list[cluster.WorkerStatus]:
    """Every worker with its latest load; by role, group and rank."""
    messages: list[cluster.WorkerStatus] = []
    for snapshot in sorted(snapshots, key=_place):
        message = cluster.WorkerStatus(
            worker=description_to_message(replace(snapshot.worker, load=snapshot.load)),
            is_connected=snapshot.is_connected,
            is_listed=snapshot.is_listed,
            gateway_requests=snapshot.books.requests,
            kept_out=snapshot.kept_out,
        )
        messages.append(message)
    return messages


def gateway_status(
    figures: GatewayFigures, *, gateway_id: str, uptime_s: float
) -> cluster.GatewayStatus:
    """The figures of a gateway since its start."""
    return cluster.GatewayStatus(
        gateway_id=gateway_id,
        uptime_s=uptime_s,
        requests_in_flight=figures.in_flight,
        requests_queued=figures.queued,
        requests=figures.requests_by_outcome,
        first_token=_latency(figures.first_token),
        inter_token=_latency(figures.inter_token),
        hand_off=_latency(figures.hand_off),
        prompt_tokens=figures.prompt_tokens,
        output_tokens=figures.output_tokens,
        hand_off_bytes=figures.hand_off_bytes_by_transport,
        drafts=_drafts(figures.drafts),
        cached_tokens=figures.cached_tokens,
        recomputed_requests=figures.recomputed_requests,
        broken_prefix_promises=figures.broken_promises,
        migrations=figures.migrations,
    )


def pools_status(status: ScalingStatus, *, unix_s: float) -> cluster.PoolsStatus:
    """Sizes and reasons, published some time before `unix_s`."""
    return cluster.PoolsStatus(
        age_s=max(0.0, unix_s - status.unix_s),
        is_autoscaled=status.is_autoscaled,
        prefill=_pool(status.prefill),
        decode=_pool(status.decode),
        reasons=status.reasons,
        unix_s=status.unix_s,
    )


def targets_message(asked: Mapping[Role, AskedSize], *, unix_s: float) -> cluster.ScaleTargets:
    """What operators asked for some time before `unix_s`."""
    targets = cluster.ScaleTargets()
    for role, one in asked.items():
        target: cluster.PoolTarget = getattr(targets, role.value)
        target.age_s = max(0.0, unix_s - one.asked_unix_s)
        if one.size is None:
            target.size.auto = True
        else:
            target.size.workers = one.size
    return targets


def _place(snapshot: WorkerSnapshot) -> tuple[int, str, int, int]:
    """Prefill first; decode-2 before decode-10; the ranks of a group in their order."""
    worker = snapshot.worker
    name, _, number = (worker.group or worker.worker_id).rpartition("-")
    return (
        _ROLES.index(worker.role),
        name,
        int(number) if number.isdecimal() else 0,
        worker.rank,
    )


def _latency(latency: LatencySum) -> cluster.Latency:
    return cluster.Latency(count=latency.count, sum_s=latency.sum_s)


def _drafts(drafts: DraftCounts) -> cluster.DraftStatus:
    return cluster.DraftStatus(
        verify_steps=drafts.verify_steps,
        emitted_tokens=drafts.emitted_tokens,
        drafted_by_position=drafts.drafted_by_position,
        accepted_by_position=drafts.accepted_by_position,
    )


def _pool(pool: PoolStatus) -> cluster.PoolStatus:
    return cluster.PoolStatus(
        size=pool.size, ready=pool.ready, starting=pool.starting, draining=pool.draining
    )
