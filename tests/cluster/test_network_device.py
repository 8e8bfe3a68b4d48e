"""Which network device UCX is kept to: the one that has the worker's address."""

from __future__ import annotations

import os

import pytest

from hocket import environment


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has chosen a device, and whatever is set is taken back."""
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")


def test_the_device_is_found_by_its_address() -> None:
    assert environment.device_of("127.0.0.1") == "lo"
    assert environment.device_of("192.0.2.77") == ""
    assert environment.device_of("no-host") == ""


def test_ucx_is_kept_to_the_device_of_the_workers_address(no_choice: None) -> None:
    environment.use_device_of("192.0.2.77", "tcp")
    assert "UCX_NET_DEVICES" not in os.environ
    environment.use_device_of("127.0.0.1", "tcp")
    assert os.environ["UCX_NET_DEVICES"] == "lo"


def test_what_an_operator_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "bond0")
    environment.use_device_of("127.0.0.1", "tcp")
    assert os.environ["UCX_NET_DEVICES"] == "bond0"


def test_rdma_devices_are_left_to_ucx_unless_it_is_told_to_use_tcp(
    no_choice: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "has_rdma_devices", lambda: True)
    environment.use_device_of("127.0.0.1", "auto")
    assert "UCX_NET_DEVICES" not in os.environ
    environment.use_device_of("127.0.0.1", "tcp")
    assert os.environ["UCX_NET_DEVICES"] == "lo"
