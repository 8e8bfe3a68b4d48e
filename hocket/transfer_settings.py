"""The [transfer] table of the configuration, how KV blocks cross, and [faults], how tests break it.

`hocket.config` has all other tables, and loads these with them. `hocket.execution.transfer_setup`
builds a worker's half of the transfer from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.toml_tables import at_least, between, one_of, wrong


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """[transfer]: how KV blocks cross from prefill to decode.

    backend: "nixl" between processes; "memory" only inside one process (tests).
    tls: "auto" lets UCX find RDMA, NVLink, shared memory or TCP; "tcp" allows TCP only.
    require: "rdma": a worker that finds no RDMA refuses to start, and a READ that is found to come
        over TCP fails. NVLink, and copies within a host, are as good as RDMA. "any": decode warns
        once when blocks come over TCP although its host has RDMA devices.
    checksum: "xxh3": prefill announces every block with a checksum, and a READ fails when what
        arrived differs, if only by a bit. "off" trusts the transport's own.
    open_timeout_s: a finished or running export that no decode worker opens is given up.
    progress_timeout_s: an open hand-off on which nothing moves is given up; must be longer than
        the longest step of either engine, which says nothing meanwhile.
    read_timeout_s: a READ of which nothing arrives for so long is abandoned and its blocks
        quarantined.
    num_slots: hand-offs that one prefill worker can have in flight.
    max_unread_share: share of prefill's blocks that finished, unread prompts may hold.
    max_quarantine_share: share of decode's blocks in quarantine that forces a new import agent.
    policy: a failed hand-off is computed again by decode ("recompute") or fails the request.
    """

    backend: str = one_of("nixl", "memory")
    tls: str = one_of("auto", "tcp")
    require: str = one_of("any", "rdma")
    checksum: str = one_of("off", "xxh3")
    open_timeout_s: float = at_least(0.01, 15.0)
    progress_timeout_s: float = at_least(0.01, 10.0)
    read_timeout_s: float = at_least(0.01, 10.0)
    num_slots: int = between(1, 65536, 256)
    max_unread_share: float = between(0.01, 1.0, 0.5)
    max_quarantine_share: float = between(0.01, 1.0, 0.25)
    policy: str = one_of("recompute", "fail")


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """[faults]: READs of KV blocks that go wrong on purpose, to test what becomes of them; never
    for production, and nothing that the chart offers. Shares are of decode's READs; a READ has at
    most one fault, so they make at most 1 together.

    corrupted: one byte of what arrived is changed, before checksums are looked at.
    truncated: the last block does not arrive, though the READ says it is done.
    dropped: the READ never ends, and its last block arrives `delay_s` late, unless a new import
        agent fences it before.
    delayed: the READ ends no sooner than after `delay_s`.
    failed: the blocks arrive, but the READ reports an error.
    delay_s: for `dropped` and `delayed`.
    seed: the same one makes the same of the same READs in the same order.
    """

    corrupted: float = between(0.0, 1.0, 0.0)
    truncated: float = between(0.0, 1.0, 0.0)
    dropped: float = between(0.0, 1.0, 0.0)
    delayed: float = between(0.0, 1.0, 0.0)
    failed: float = between(0.0, 1.0, 0.0)
    delay_s: float = at_least(0.0, 0.5)
    seed: int = at_least(0, 0)

    @property
    def total(self) -> float:
        """The share of READs that have a fault; 0: faults are off."""
        return self.corrupted + self.truncated + self.dropped + self.delayed + self.failed


def check_transfer(transfer: TransferSettings, faults: FaultSettings) -> None:
    """What no single key can tell. Raises ConfigError."""
    if transfer.require == "rdma" and transfer.tls == "tcp":
        raise wrong("transfer.require", "rdma", '"any" while transfer.tls is "tcp"')
    if faults.total > 1:
        raise wrong("faults", faults.total, "shares that are at most 1 together")
