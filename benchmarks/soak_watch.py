"""What `soak.py` does to the cluster, and what it sees of it: kills, memory, what is left at rest.

`Killer` and `MemoryWatch` are turned now and then by `soak.py`, in a thread of their own;
`wait_for_rest` asks the gateway and every worker at the end. Next: `soak_report.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from control_plane.cluster.cluster import Cluster
from hocket.rpc import cluster_pb2 as cluster_messages
from hocket.rpc.clients import ClusterClient, WorkerClient

REST_TIMEOUT_S = 60.0
"""Longer than any lease, deadline or quarantine of the default configuration."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_COUNTERS = (
    "hocket_prefill_hand_off_",
    "hocket_decode_hand_off_",
    "hocket_worker_recomputed",
    "hocket_preemptions",
    "hocket_prefix_cache_",
    "hocket_transfer_",
)
_ZERO_AT_REST = (
    "hocket_decode_hand_off_reads_in_flight",
    "hocket_decode_hand_off_blocks_in_quarantine",
)


@dataclass(slots=True)
class Kill:
    """A worker killed at `at_s`; `back_s` is when its next life was seen, None: not yet."""

    worker_id: str
    process_id: int
    at_s: float
    back_s: float | None = None


def places(cluster: Cluster) -> dict[str, int]:
    """Process ids of gateway and workers by place; empty while one of them is being replaced."""
    # Not before the cluster has prepared what Ray reads at import.
    from ray.exceptions import RayError

    try:
        return cluster.process_ids()
    except RayError:
        return {}


class Killer:
    """Kills a random worker (SIGKILL) now and then, never one while another is still away."""

    def __init__(self, every_s: float, most: int, seed: int) -> None:
        """`every_s` 0: never. `most`: kills in all."""
        self.kills: list[Kill] = []
        self._every_s = every_s
        self._most = most
        self._chance = random.Random(seed)
        self._next_s = every_s

    def turn(self, now_s: float, found: dict[str, int]) -> None:
        """`found`: process ids by place, as `places` has them."""
        last = self.kills[-1] if self.kills else None
        if last is not None and last.back_s is None:
            if found.get(last.worker_id, last.process_id) != last.process_id:
                last.back_s = now_s
            return
        workers = sorted(name for name in found if name != "gateway")
        is_due = self._every_s > 0 and self._next_s <= now_s and len(self.kills) < self._most
        if not is_due or not workers:
            return
        name = self._chance.choice(workers)
        os.kill(found[name], signal.SIGKILL)
        self.kills.append(Kill(name, found[name], now_s))
        self._next_s = now_s + self._every_s


@dataclass(slots=True)
class Memory:
    """One process: (requests ended in the run so far, resident bytes), again and again."""

    name: str
    process_id: int
    samples: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class MemoryWatch:
    """Resident memory by process."""

    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}

    def turn(self, num_ended: int, found: dict[str, int]) -> None:
        """`found`: process ids by name."""
        for name, process_id in found.items():
            resident = resident_bytes(process_id)
            if resident:
                memory = self.memories.setdefault(process_id, Memory(name, process_id))
                memory.samples.append((num_ended, resident))


def resident_bytes(process_id: int) -> int:
    """0 when there is no such process any more."""
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def descendants_named(of: int, names: tuple[str, ...]) -> dict[str, int]:
    """Ids by name of the processes with one of these names that descend from a process."""
    found: dict[str, int] = {}
    todo = [of]
    while todo:
        try:
            tasks = [*Path(f"/proc/{todo.pop()}/task").iterdir()]
            children = [int(word) for t in tasks for word in (t / "children").read_text().split()]
            named = {Path(f"/proc/{child}/comm").read_text().strip(): child for child in children}
        except OSError:
            continue  # It has ended meanwhile.
        found |= {name: child for name, child in named.items() if name in names}
        todo += children
    return found


@dataclass(frozen=True, slots=True)
class Rest:
    """The cluster after the last request. `left`: what did not come back, in words. `counters`:
    the hand-off counters of the workers that live now, summed."""

    waited_s: float
    left: tuple[str, ...]
    counters: dict[str, float]


async def wait_for_rest(admin_address: str, num_workers: int, timeout_s: float) -> Rest:
    """Returns as soon as nothing is left anywhere, or after `timeout_s`."""
    gateway = ClusterClient(admin_address)
    began = time.monotonic()
    try:
        while True:
            status = await gateway.get_status()
            left = gateway_left(status, num_workers)
            for entry in status.workers:
                left += await _worker_left(entry.worker.address)
            waited_s = time.monotonic() - began
            if not left or waited_s > timeout_s:
                break
            await asyncio.sleep(0.2)
    finally:
        await gateway.close()
    counters: dict[str, float] = {}
    for entry in status.workers:
        page = await asyncio.to_thread(_read_page, entry.worker.metrics_address)
        for name, value in page.items():
            counters[name] = counters.get(name, 0.0) + value
    left += [f"{name} is {counters[name]:g}" for name in _ZERO_AT_REST if counters.get(name)]
    return Rest(round(waited_s, 2), tuple(left), counters)


def gateway_left(status: cluster_messages.ClusterStatus, num_workers: int) -> list[str]:
    """What the gateway still has on its books."""
    left: list[str] = []
    gateway = status.gateway
    if gateway.requests_in_flight or gateway.requests_queued:
        left.append(
            f"gateway: {gateway.requests_in_flight} requests in flight, "
            f"{gateway.requests_queued} queued"
        )
    for entry in status.workers:
        if entry.gateway_requests:
            worker_id = entry.worker.worker_id
            left.append(f"gateway: {entry.gateway_requests} requests booked on {worker_id}")
    if len(status.workers) != num_workers:
        names = [entry.worker.worker_id for entry in status.workers]
        left.append(f"gateway: knows {names}, not {num_workers} workers")
    return left


async def _worker_left(address: str) -> list[str]:
    """What a worker still holds, by its own account."""
    client = WorkerClient(address)
    try:
        worker = await client.describe()
    finally:
        await client.close()
    load, left = worker.load, list[str]()
    if load.free_blocks != worker.num_blocks or load.num_blocks != worker.num_blocks:
        left.append(f"{worker.worker_id}: {load.free_blocks} of {worker.num_blocks} blocks free")
    for name in ("running_requests", "waiting_requests", "queued_prompt_tokens", "unread_blocks"):
        if getattr(load, name):
            left.append(f"{worker.worker_id}: {name} is {getattr(load, name)}")
    return left


def _read_page(address: str) -> dict[str, float]:
    """The hand-off counters on a worker's Prometheus page; none when it has no page."""
    if not address:
        return {}
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
        text = page.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(_COUNTERS) and not sample.name.endswith("_created")
    }
