"""`hocket scale prefill=2 decode=3`: asks for pool sizes at the operator's door of a gateway.

The sizes are checked and written by the gateway (`control_plane.admin`); whoever runs the pools
acts on them. `--wait` follows the published status until the pools have these sizes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from hocket.commands.doors import OPERATOR, check_address, explained
from hocket.commands.status import ask
from hocket.errors import HocketError, InvalidRequest, StoreUnavailable
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.clients import ClusterClient

_POOLS = ("prefill", "decode")
_LOOK_S = 0.5
# A status that is older than this was published by nobody who still runs.
_STALE_S = 30.0
# Statuses to see before one counts: the first new one may have been on its way already.
_NEW_STATUSES = 2


def parsed(words: Sequence[str]) -> cluster.ScaleRequest:
    """The request for words like "prefill=2" and "decode=auto". Raises InvalidRequest."""
    request = cluster.ScaleRequest()
    for word in words:
        name, _, size = word.partition("=")
        if name not in _POOLS:
            raise InvalidRequest(word, name, "prefill=N or decode=N; N may be auto")
        if request.HasField(name):  # pyright: ignore[reportArgumentType]
            raise InvalidRequest("sizes", " ".join(words), f"one size for {name}")
        pool: cluster.PoolSize = getattr(request, name)
        if size == "auto":
            pool.auto = True
            continue
        if not (size.isascii() and size.isdecimal() and int(size) < 2**32):
            raise InvalidRequest(name, size, "a number of workers, or auto")
        pool.workers = int(size)
    return request


class Following:
    """Decides from one status after the other whether the pools have their sizes."""

    def __init__(self, request: cluster.ScaleRequest) -> None:
        self._wanted = {
            name: getattr(request, name).workers
            for name in _POOLS
            if request.HasField(name) and getattr(request, name).WhichOneof("size") == "workers"  # pyright: ignore[reportArgumentType]
        }
        self._seen: set[float] = set()

    def take(self, status: cluster.ClusterStatus) -> bool:
        """Notes a status; True when all is as asked.

        Raises:
            StoreUnavailable: nobody who runs the pools is there to act.
        """
        if status.store_fault:
            return False
        if not status.HasField("pools") or status.pools.age_s > _STALE_S:
            raise StoreUnavailable(
                "the sizes are written, but nobody runs the pools: "
                + (
                    f"their status is {status.pools.age_s:.0f} s old"
                    if status.HasField("pools")
                    else "there is no status of theirs"
                )
                + "; start `hocket up`."
            )
        self._seen.add(status.pools.unix_s)
        return len(self._seen) > _NEW_STATUSES and all(
            _is_settled(getattr(status.pools, name), size) for name, size in self._wanted.items()
        )


def _is_settled(pool: cluster.PoolStatus, size: int) -> bool:
    return (pool.size, pool.ready, pool.starting, pool.draining) == (size, size, 0, 0)


def run(words: Sequence[str], address: str, *, is_waiting: bool) -> int:
    """The command; returns its exit code."""
    try:
        request = parsed(words)
        check_address(address)
        asyncio.run(_scale(request, address, is_waiting))
    except HocketError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _scale(request: cluster.ScaleRequest, address: str, is_waiting: bool) -> None:
    client = ClusterClient(address)
    try:
        try:
            response = await client.scale(request)
        except HocketError as error:
            raise explained(error, address, OPERATOR) from error
        print(f"asked for {_targets(response.targets)}", flush=True)
        if is_waiting:
            await _follow(client, address, request)
    finally:
        await client.close()


async def _follow(client: ClusterClient, address: str, request: cluster.ScaleRequest) -> None:
    following, told = Following(request), ""
    while True:
        status = await ask(client, address)
        is_done = following.take(status)
        line = _progress(status)
        if line != told:
            print(line, flush=True)
            told = line
        if is_done:
            print("done")
            return
        await asyncio.sleep(_LOOK_S)


def _targets(targets: cluster.ScaleTargets) -> str:
    """What is written now, of both pools."""
    words: list[str] = []
    for name in _POOLS:
        if targets.HasField(name):  # pyright: ignore[reportArgumentType]
            size: cluster.PoolSize = getattr(targets, name).size
            words.append(f"{name}={'auto' if size.WhichOneof('size') == 'auto' else size.workers}")
    return " ".join(words)


def _progress(status: cluster.ClusterStatus) -> str:
    if status.store_fault:
        return status.store_fault
    parts: list[str] = []
    for name in _POOLS:
        pool: cluster.PoolStatus = getattr(status.pools, name)
        text = f"{name}: {pool.ready} of {pool.size} ready"
        text += f", {pool.starting} starting" if pool.starting else ""
        text += f", {pool.draining} draining" if pool.draining else ""
        parts.append(text)
    return "; ".join(parts)
