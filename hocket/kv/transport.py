"""Is what moves blocks what was asked for? Pure decisions on the transport's name.

`transfer.require` = "rdma" promises that no block crosses a network but by RDMA. What can be known,
and when:

- At start, from a READ of this worker's own blocks (`hocket/kv/self_read.py`) and from the kernel's
  list of RDMA devices. Within one host UCX prefers shared memory even where RDMA exists, so the
  READ proves that NIXL works, not that RDMA does; and a device may be listed that the process may
  not open. So each one alone proves too little to serve on, but enough to refuse: no device and no
  RDMA in the READ, or TCP although a device is listed (a container without /dev/infiniband, ports
  that are down), or no account of UCX's to judge later READs by.
- After the first READ of each peer, from UCX's account of it. TCP found there fails the READ.
  Copies within a host, and NVLink, also between hosts, are no downgrade: they cross no network.

Next: `hocket/kv/nixl_reads.py`, which asks after first READs.
"""

from __future__ import annotations

# As UCX names them, up to the first "_": rc_mlx5, dc_mlx5, gga_mlx5, srd. (ud emulates READs.)
_RDMA = {"rc", "dc", "gga", "srd"}
_NVLINK = {"cuda_ipc"}
_WITHIN_A_HOST = {"cma", "xpmem", "knem", "sysv", "posix", "self", "cuda_copy", "gdr_copy"}

UNKNOWN = "unknown"
"""The transport when UCX left no account of it."""


def is_rdma(transport: str) -> bool:
    """Whether RDMA has a part in it. `transport` is one name, or several joined by "+"."""
    return any(lane.split("_")[0] in _RDMA for lane in transport.split("+"))


def is_tcp(transport: str) -> bool:
    """Whether TCP has a part in it."""
    return "tcp" in transport.split("+")


def why_not_start(transport: str, require: str, has_rdma_devices: bool) -> str:
    """Why a worker must not start; "" when it may. `transport` is that of a READ of its own blocks,
    `require` is `transfer.require`."""
    if require != "rdma":
        return ""
    if transport == UNKNOWN:
        return (
            "UCX left no account of the transport that it chose, so nothing shows that it is RDMA"
        )
    if not has_rdma_devices and not is_rdma(transport):
        return (
            f"this host has no RDMA device, and UCX moved a block of this worker's by {transport!r}"
        )
    if bad := _not_allowed(transport):
        return (
            f"UCX moved a block of this worker's by {bad!r} although the host has RDMA devices: "
            "none of them is up, or this process may not open it (/dev/infiniband)"
        )
    return ""


def why_not_read(transport: str, require: str) -> str:
    """Why bytes that came by `transport` are refused; "" when they are not. Without an account
    nothing speaks against them."""
    if require != "rdma" or transport == UNKNOWN:
        return ""
    if bad := _not_allowed(transport):
        return f"transfer.require is 'rdma', but UCX reads this peer by {bad!r}"
    return ""


def is_downgrade(transport: str, tls: str, has_rdma_devices: bool) -> bool:
    """Whether UCX chose TCP where RDMA was to be expected. `tls` is `transfer.tls`."""
    return is_tcp(transport) and tls == "auto" and has_rdma_devices


def _not_allowed(transport: str) -> str:
    """Those parts of it that are neither RDMA nor stay off the network."""
    allowed = _NVLINK | _WITHIN_A_HOST
    lanes = transport.split("+")
    return "+".join(lane for lane in lanes if lane not in allowed and not is_rdma(lane))
