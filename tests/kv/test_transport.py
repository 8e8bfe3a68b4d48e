"""B7: a transport that is not the one required is refused, and a silent downgrade is named."""

from __future__ import annotations

import pytest

from hocket.kv.transport import is_downgrade, is_rdma, why_not_read, why_not_start


@pytest.mark.parametrize("transport", ["rc_mlx5", "rc_verbs", "dc_mlx5", "srd", "cma+rc_mlx5"])
def test_rdma_is_known_by_its_lanes(transport: str) -> None:
    assert is_rdma(transport)


@pytest.mark.parametrize("transport", ["tcp", "cma", "cuda_ipc", "ud_mlx5", "unknown", ""])
def test_what_only_looks_like_rdma_is_not(transport: str) -> None:
    assert not is_rdma(transport)


@pytest.mark.parametrize("transport", ["tcp", "cma", "unknown"])
def test_b7_nothing_is_refused_when_nothing_is_required(transport: str) -> None:
    assert why_not_start(transport, "any", has_rdma_devices=False) == ""
    assert why_not_read(transport, "any") == ""


@pytest.mark.parametrize("transport", ["tcp", "cma", "sysv", "cuda_ipc"])
def test_b7_a_host_without_rdma_devices_does_not_start(transport: str) -> None:
    why = why_not_start(transport, "rdma", has_rdma_devices=False)
    assert "no RDMA device" in why
    assert repr(transport) in why


def test_b7_tcp_with_itself_although_devices_are_listed_does_not_start() -> None:
    why = why_not_start("cma+tcp", "rdma", has_rdma_devices=True)
    assert "'tcp'" in why
    assert "/dev/infiniband" in why


def test_b7_without_an_account_of_the_transport_a_worker_does_not_start() -> None:
    assert "no account" in why_not_start("unknown", "rdma", has_rdma_devices=True)


@pytest.mark.parametrize("transport", ["rc_mlx5", "cma", "cuda_ipc", "cuda_copy+gdr_copy"])
def test_b7_shared_memory_with_itself_beside_rdma_devices_starts(transport: str) -> None:
    assert why_not_start(transport, "rdma", has_rdma_devices=True) == ""


@pytest.mark.parametrize(
    "transport", ["tcp", "rc_mlx5+tcp", "cuda_copy+tcp", "ud_mlx5", "rocm_ipc"]
)
def test_b7_a_read_that_crosses_a_network_without_rdma_is_refused(transport: str) -> None:
    why = why_not_read(transport, "rdma")
    assert "transfer.require is 'rdma'" in why


@pytest.mark.parametrize("transport", ["rc_mlx5", "rc_mlx5+dc_mlx5", "cma", "cuda_ipc", "unknown"])
def test_b7_rdma_nvlink_and_copies_within_a_host_are_allowed(transport: str) -> None:
    assert why_not_read(transport, "rdma") == ""


def test_b7_a_downgrade_is_tcp_where_rdma_was_to_be_expected() -> None:
    assert is_downgrade("tcp", "auto", has_rdma_devices=True)
    assert not is_downgrade("tcp", "auto", has_rdma_devices=False)
    assert not is_downgrade("tcp", "tcp", has_rdma_devices=True)
    assert not is_downgrade("rc_mlx5", "auto", has_rdma_devices=True)
