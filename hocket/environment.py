"""The only reader and writer of environment variables.

Hocket is configured by its TOML file. What stays here are the variables that other libraries
insist on: UCX and NIXL read theirs when they are loaded, Ray before `ray` is imported, OpenMP
before torch is. `control_plane.cluster` asks for them and passes them to the processes it starts.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# Largest message of UCX over TCP; `hocket.kv.nixl_agent` says why no READ there may be larger.
TCP_SEGMENT_BYTES = 512 * 1024

# The kernel's list of IPv4 addresses: SIOCGIFCONF and its `struct ifreq`.
_LIST_ADDRESSES, _ADDRESS_BYTES, _MOST_ADDRESSES = 0x8912, 40, 1024
_RDMA_DEVICES = Path("/sys/class/infiniband")
_KUBERNETES_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True, slots=True)
class RayClusterPod:
    """A pod of a RayCluster, as KubeRay tells it."""

    cluster: str
    namespace: str
    name: str


def ray_cluster_pod() -> RayClusterPod | None:
    """The pod that this process runs in, if KubeRay has made it and it has a token for
    Kubernetes' API."""
    if not _KUBERNETES_TOKEN.is_file():
        return None
    cluster, namespace = os.environ.get("RAY_CLUSTER_NAME"), os.environ.get("RAY_CLUSTER_NAMESPACE")
    if not cluster or not namespace:
        return None
    return RayClusterPod(cluster, namespace, os.environ.get("RAY_CLOUD_INSTANCE_ID", "pod"))


def has_rdma_devices() -> bool:
    """Whether the kernel shows any RDMA device."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def is_loopback(host: str) -> bool:
    """Whether `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_no_address(host: str) -> bool:
    """Whether `host` can be listened on but not called: 0.0.0.0, or :: in IPv6."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def device_of(host: str) -> str:
    """The network device of this machine that has the IPv4 address `host`; "" when none has."""
    if sys.platform != "linux":
        return ""
    import fcntl

    entries = bytearray(_ADDRESS_BYTES * _MOST_ADDRESSES)
    memory = (ctypes.c_char * len(entries)).from_buffer(entries)
    request = struct.pack("iP", len(entries), ctypes.addressof(memory))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket.fileno(), _LIST_ADDRESSES, request)
    size, _ = struct.unpack("iP", answer)
    for name, address in struct.iter_unpack("16s4x4s16x", bytes(entries[:size])):
        if socket.inet_ntoa(address) == host:
            # A second address of a device may be labelled "eth0:1".
            return name.partition(b"\0")[0].decode().partition(":")[0]
    return ""


def num_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def transfer_environment(tls: str, host: str, log_folder: Path | None) -> dict[str, str]:
    """What UCX must see in a worker process, for `transfer.tls` and the worker's address.

    A loopback worker listens on loopback only, also for KV. Without RDMA devices the verbs
    modules are left out: with some providers installed they crash at process exit. UCX writes
    down which transport it chose, a file per process in `log_folder`: the only way to know.
    Without a folder the process has to name one itself, see `log_ucx_to`.
    """
    variables = {
        "UCX_PROTO_INFO": "y",
        "UCX_TCP_TX_SEG_SIZE": str(TCP_SEGMENT_BYTES),
        "UCX_TCP_RX_SEG_SIZE": str(TCP_SEGMENT_BYTES),
    }
    if not has_rdma_devices():
        variables["UCX_MODULES"] = "^ib"
    if tls == "tcp":
        variables["UCX_TLS"] = "tcp"
    if is_loopback(host):
        variables["UCX_NET_DEVICES"] = "lo"
    if log_folder is not None:
        variables["UCX_LOG_FILE"] = _ucx_log(log_folder)
    return variables


def worker_environment(
    tls: str, host: str, threads: int, log_folder: Path | None = None
) -> dict[str, str]:
    """All variables of a worker process that computes with `threads` threads."""
    variables = transfer_environment(tls, host, log_folder)
    variables["OMP_NUM_THREADS"] = str(threads)
    variables["MKL_NUM_THREADS"] = str(threads)
    # grpc prints a line per fork and per missing system feature otherwise.
    variables["GRPC_VERBOSITY"] = "ERROR"
    return variables


def use_device_of(host: str, tls: str) -> None:
    """Keeps UCX to the network device that has a worker's address, where KV goes over IP only; in
    this process, before UCX is loaded. UCX takes any device otherwise, also one that reaches no
    peer, such as a container bridge, which has the same address on every host. RDMA devices are
    left to UCX, and so is what UCX_NET_DEVICES says already."""
    if tls != "tcp" and has_rdma_devices():
        return
    if device := device_of(host):
        os.environ.setdefault("UCX_NET_DEVICES", device)


def quiet_grpc() -> None:
    """Keeps gRPC's own lines off the terminal of a command, which says itself what went wrong;
    before grpc is imported. A variable that is set already is left as it is."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def prepare_ray() -> None:
    """Sets what Ray reads at import, for this process and those that it starts.

    A variable that is set already is left as it is.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Keeps a local Ray on loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # Every actor here has its own environment, so idle processes started ahead are never used.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        # Ray's 15 lets any other process of the machine hold up gateway and engines for 100 ms.
        "RAY_worker_niceness": "0",
        # An actor without a GPU still sees the machine's, as Ray's next version does it.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_variables(variables: dict[str, str]) -> None:
    """Sets them in this process: before the library that reads them is loaded."""
    os.environ.update(variables)


def unset_variables(names: Iterable[str]) -> None:
    """Takes them out of this process's environment."""
    for name in names:
        os.environ.pop(name, None)


def log_ucx_to(folder: Path) -> None:
    """Has UCX write its account into `folder`; before UCX is loaded in this process."""
    os.environ["UCX_LOG_FILE"] = _ucx_log(folder)


def ucx_log_file() -> str:
    """UCX_LOG_FILE as this process was given it; "" without, or when its folder is not there: UCX
    would abort the process for that."""
    named = os.environ.get("UCX_LOG_FILE", "")
    return named if named and Path(named).parent.is_dir() else ""


def _ucx_log(folder: Path) -> str:
    return f"{folder}/ucx-%p.log"
