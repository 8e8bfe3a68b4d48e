"""The ranks of an expert-parallel group, and what they can do together.

`RankGroup` joins the others through a store that lies outside of all ranks (`RedisStore`), then
offers two collectives: `exchange`, a few integers from everyone to everyone, over gloo on hosts,
and `all_to_all`, rows of tensors, over NCCL on CUDA devices and gloo elsewhere. torch's process
groups are held as objects, not as torch's global default, so that several ranks can live in one
process (tests).

A rank that died or hangs makes every collective of the others raise `GroupLost`: there is no
going on within this life of the group.

Shape letters: M rows received, N rows sent, X elements of a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import redis
import torch
from torch._C import _distributed_c10d as _torch_c10d

from hocket.config import GroupSettings
from hocket.errors import GroupLost

# Ranks of one group start within this time of each other, or the supervisor has ended them.
_MEETING_S = 600.0
_LOOK_S = 0.02
# Keys of a group's life; they are read while it forms only.
_KEYS_LAST_S = 24 * 3600

# torch exports these under `torch.distributed` at run time only, without their options' types.
c10d: Any = _torch_c10d


class RedisStore(_torch_c10d.Store):
    """torch's rendezvous store on Redis: what `RankGroup` needs of it.

    torch asks for a subclass here. Raises `redis.RedisError` when Redis is away, and TimeoutError
    when a key has not come in `_MEETING_S`.
    """

    def __init__(self, group: GroupSettings, epoch: int) -> None:
        super().__init__()
        self._redis: Any = redis.Redis.from_url(group.redis.url, socket_timeout=5.0)
        self._prefix = f"{{{group.redis.prefix}}}:group:{group.name}:{epoch}:"

    def set(self, key: str, value: str | bytes) -> None:
        self._redis.set(self._prefix + key, value, ex=_KEYS_LAST_S)

    def get(self, key: str) -> bytes:
        """The value; waits for it."""
        self.wait([key])
        return self._redis.get(self._prefix + key)

    def add(self, key: str, value: int) -> int:
        name = self._prefix + key
        number = int(self._redis.incrby(name, value))
        self._redis.expire(name, _KEYS_LAST_S)
        return number

    def check(self, keys: list[str]) -> bool:
        return self._redis.exists(*(self._prefix + key for key in keys)) == len(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns when all keys are there. torch's `timeout` is that of a collective: too short
        for ranks whose processes start one after another, so it is not used."""
        del timeout
        deadline = time.monotonic() + _MEETING_S
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {keys} in {_MEETING_S:.0f} s: a rank did not start")
            time.sleep(_LOOK_S)


class RankGroup:
    """This rank's end of the group. Its methods are called by one thread, in the same order on
    every rank. Raises `GroupLost` from all of them."""

    def __init__(
        self, store: _torch_c10d.Store, group: GroupSettings, host: str, device: torch.device
    ) -> None:
        """Meets the other ranks; returns when all are connected. `host` is this rank's address.

        Raises:
            GroupLost: a rank left while they met.
        """
        self.name = group.name
        self.rank = group.rank
        self.size = group.size
        self._store = store
        self._timeout = timedelta(seconds=group.timeout_s)
        self._hosts, self._devices = self._connect(host, device)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by rank; as many from each."""
        own = torch.tensor(numbers)
        everyone = own.new_empty(self.size * len(numbers))
        options = c10d.AllgatherOptions()
        options.timeout = self._timeout
        self._together(lambda: self._hosts._allgather_base(everyone, own, options))
        return everyone.view(self.size, -1).tolist()

    def all_to_all(
        self, rows_NX: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> torch.Tensor:
        """Rows [M, X] from all ranks, in order of rank; `sent[r]` rows in turn go to rank r,
        `received[r]` come from it."""
        arrived_MX = rows_NX.new_empty(sum(received), *rows_NX.shape[1:])
        options = c10d.AllToAllOptions()
        options.timeout = self._timeout
        self._together(
            lambda: self._devices.alltoall_base(
                arrived_MX, rows_NX.contiguous(), list(received), list(sent), options
            )
        )
        return arrived_MX

    def tell_all(self, key: str, text: str) -> list[str]:
        """Everyone's text, by rank, through the store: for what is said once, at the start."""
        self._store.set(f"{key}/{self.rank}", text)
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.size)]

    def _connect(self, host: str, device: torch.device) -> tuple[Any, Any]:
        """The process groups of the hosts and of the devices; on CPUs they are one."""
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]
        store = c10d.PrefixStore("gloo", self._store)
        try:
            hosts = c10d.ProcessGroupGloo(store, self.rank, self.size, options)
            if device.type != "cuda":
                return hosts, hosts
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = c10d.PrefixStore("nccl", self._store)
            return hosts, c10d.ProcessGroupNCCL(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise GroupLost(
                f"Rank {self.rank} of expert-parallel group {self.name} could not meet the others "
                f"from {host}: {error}"
            ) from error

    def _together(self, start: Callable[[], Any]) -> None:
        """Runs a collective. torch raises RuntimeError (and its DistBackendError) when a peer is
        gone or late."""
        try:
            start().wait()
        except RuntimeError as error:
            raise GroupLost(
                f"Expert-parallel group {self.name} has lost a rank, and with it this step; all "
                "its requests end and it starts again. Retry.",
                group=self.name,
                seen_by_rank=self.rank,
            ) from error
