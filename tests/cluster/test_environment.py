"""What the processes that we start must find in their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket import environment
from hocket.environment import is_loopback, is_no_address, worker_environment
from hocket.errors import ConfigError
from hocket.execution.worker_server import bind


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.3", False),
        ("gpu-node-7", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_alone_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", True), ("::", True), ("[::]", True), ("127.0.0.1", False), ("node-7", False)],
)
def test_what_can_be_listened_on_but_not_called_is_no_address(host: str, expected: bool) -> None:
    assert is_no_address(host) is expected


def test_b5_a_worker_does_not_tell_its_peers_an_address_that_nobody_can_call() -> None:
    with pytest.raises(ConfigError, match=r"cannot call 0\.0\.0\.0"):
        bind("0.0.0.0", 0)


def test_a_loopback_worker_moves_kv_on_loopback_only() -> None:
    assert worker_environment("auto", "127.0.0.1", 1)["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in worker_environment("auto", "10.0.0.3", 1)


def test_tcp_is_enforced_only_when_asked_for() -> None:
    assert worker_environment("tcp", "10.0.0.3", 1)["UCX_TLS"] == "tcp"
    assert "UCX_TLS" not in worker_environment("auto", "10.0.0.3", 1)


def test_verbs_are_left_out_only_where_there_is_no_rdma_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_RDMA_DEVICES", tmp_path)
    assert worker_environment("auto", "10.0.0.3", 1)["UCX_MODULES"] == "^ib"
    (tmp_path / "mlx5_0").mkdir()
    assert "UCX_MODULES" not in worker_environment("auto", "10.0.0.3", 1)


def test_the_account_of_the_transport_goes_to_the_given_folder(tmp_path: Path) -> None:
    variables = worker_environment("auto", "127.0.0.1", 3, tmp_path)
    assert Path(variables["UCX_LOG_FILE"]).parent == tmp_path
    assert variables["OMP_NUM_THREADS"] == "3"


def test_without_a_folder_the_process_names_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never the machine's folder for temporary files, where nobody would delete it."""
    assert "UCX_LOG_FILE" not in worker_environment("auto", "10.0.0.3", 1)
    monkeypatch.setenv("UCX_LOG_FILE", "")
    environment.log_ucx_to(tmp_path)
    assert Path(environment.ucx_log_file()).parent == tmp_path
    # UCX aborts a process whose log cannot be opened: a folder that is gone counts as none.
    environment.log_ucx_to(tmp_path / "gone")
    assert environment.ucx_log_file() == ""
