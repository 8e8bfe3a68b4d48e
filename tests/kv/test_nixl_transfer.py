"""Real NIXL between processes on loopback, over TCP and over what UCX chooses by itself.

`nixl_reader.py` does the reading, once per mode; the tests are claims on what it saw.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hocket.environment import transfer_environment

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
_LATE_S = 2.0


def has_cuda() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.fixture(
    scope="module",
    params=["tcp-cpu", "auto-cpu", pytest.param("auto-cuda", marks=pytest.mark.gpu)],
)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the reader saw with `tls` and both pools in `memory`."""
    tls, memory = request.param.split("-")
    if memory == "cuda" and not has_cuda():
        pytest.skip("no CUDA device")
    variables = transfer_environment(tls, "127.0.0.1", tmp_path_factory.mktemp("ucx"))
    environment = {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("nixl_reader.py")),
            variables["UCX_LOG_FILE"],
            memory,
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {"tls": tls, "memory": memory, **json.loads(done.stdout.splitlines()[-1])}


def test_bytes_arrive_equal_in_whatever_order_blocks_lie(seen: dict[str, Any]) -> None:
    assert seen["first_read"] == "DONE"
    assert seen["one_block_equal"]
    assert seen["scattered_equal"]


def test_the_epoch_read_after_the_bytes_is_the_owners(seen: dict[str, Any]) -> None:
    assert seen["epoch_read"] == seen["epoch_promised"]


def test_a_bump_by_the_owner_trips_the_fence(seen: dict[str, Any]) -> None:
    assert seen["epoch_bumped"] == seen["epoch_promised"] + 1
    assert seen["epoch_after_bump"] == seen["epoch_bumped"]


def test_reads_that_travel_together_keep_their_own_blocks_and_fences(seen: dict[str, Any]) -> None:
    assert seen["many_equal"]
    assert seen["many_epochs"] == seen["many_epochs_promised"]
    assert len(set(seen["many_epochs"])) == 2


def test_the_transport_found_is_named_on_evidence(seen: dict[str, Any]) -> None:
    if seen["memory"] == "cuda":
        assert seen["transport"] not in ("", "tcp", "cma")
    else:
        assert seen["transport"] == {"tcp": "tcp", "auto": "cma"}[seen["tls"]]


def test_a_worker_can_read_itself_and_leaves_no_trace(seen: dict[str, Any]) -> None:
    if seen["memory"] == "cpu":
        assert seen["self_read"] == {"tcp": "tcp", "auto": "cma"}[seen["tls"]]
    assert seen["self_read"] not in ("", "unknown")
    assert seen["self_read_leaves_zeros"]
    assert seen["self_read_s"] < _LATE_S


def test_a_wrong_byte_of_the_owners_is_found_by_its_checksum(seen: dict[str, Any]) -> None:
    assert seen["checksums_right"] == "DONE"
    assert seen["checksums_wrong"] == "CORRUPT"
    assert "1 of 3 blocks" in seen["checksums_error"]
    assert "blocks 2" in seen["checksums_error"]
    assert seen["checksums_epoch"] == seen["epoch_bumped"]


def test_injected_faults_happen_to_bytes_that_travelled(seen: dict[str, Any]) -> None:
    state, *wrong = seen["corrupted_unchecked"]
    assert (state, sorted(wrong)) == ("DONE", [0, 0, 1])
    state, *wrong = seen["truncated_unchecked"]
    assert (state, wrong[:2]) == ("DONE", [0, 0])
    assert wrong[2] > 1000
    assert seen["failed_unchecked"] == ["FAILED", 0, 0, 0]
    assert seen["corrupted_checked"] == seen["truncated_checked"] == "CORRUPT"


def test_a_dropped_read_is_fenced_by_a_rebuild_and_lands_no_more(seen: dict[str, Any]) -> None:
    assert seen["dropped"] == "IN_PROGRESS"
    assert seen["dropped_and_rebuilt"] == "FENCED"
    assert not seen["dropped_lands_late"]


def test_b7_no_read_over_tcp_is_done_where_rdma_is_required(seen: dict[str, Any]) -> None:
    if seen["tls"] == "tcp":
        assert "DONE" not in seen["required"]
        (error,) = seen["required_errors"]
        assert "transfer.require is 'rdma', but UCX reads this peer by 'tcp'" in error
        assert seen["required_refused"] >= 1
        assert seen["required_again"] == "FAILED"
    else:  # Nothing crosses a network.
        assert seen["required"] == ["DONE"]
        assert seen["required_refused"] == 0


def test_b7_tcp_beside_rdma_devices_is_counted(seen: dict[str, Any]) -> None:
    assert seen["downgraded"] == "DONE"
    assert seen["downgraded_peers"] == (1 if seen["tls"] == "tcp" else 0)


def test_idle_agents_leave_the_processor_alone(seen: dict[str, Any]) -> None:
    assert seen["idle_reader_cores"] < 0.2
    assert seen["idle_owner_cores"] < 0.2


def test_a_rebuild_fences_a_read_that_never_ends(seen: dict[str, Any]) -> None:
    if seen["tls"] == "tcp":  # Within a host, the kernel copies from a stopped process, too.
        assert seen["stopped_peer"] == "IN_PROGRESS"
        assert seen["after_rebuild"] == "FENCED"
        assert seen["rebuild_s"] < _LATE_S
    assert seen["nothing_landed_late"]
    assert seen["stopped_peer_survives"]


def test_other_peers_are_read_before_and_after_a_rebuild(seen: dict[str, Any]) -> None:
    assert seen["other_peer_equal"]
    assert seen["after_rebuild_equal"]


def test_a_stopped_peer_holds_up_nobody_else(seen: dict[str, Any]) -> None:
    assert seen["read_beside_a_stopped_peer"] == "DONE"
    assert seen["unconnected_killed"] == "FAILED"


def test_a_read_from_a_killed_peer_fails_soon(seen: dict[str, Any]) -> None:
    assert seen["killed"] == "FAILED"
    assert seen["killed_s"] < _LATE_S


def test_b1_a_peer_that_comes_back_under_a_new_name_is_read(seen: dict[str, Any]) -> None:
    assert seen["restarted_equal"]


def test_b1_an_owner_survives_readers_that_are_killed_while_they_read(seen: dict[str, Any]) -> None:
    assert seen["owner_survives_killed_readers"]
