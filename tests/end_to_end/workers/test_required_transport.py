"""B7: a worker that must have RDMA does not start where there is none, and says what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hocket.environment import has_rdma_devices

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(has_rdma_devices(), reason="this host has RDMA: nothing to refuse"),
]

ROOT = Path(__file__).parents[3]


def start(package: str, checkpoint: Path, folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit status and stderr of a worker process that gets no further than its start."""
    settings = [f"model.path={checkpoint}", "prefill.num_blocks=8", "decode.num_blocks=8"]
    flags = [flag for setting in [*settings, *overrides] for flag in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", package, *flags],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("package", ["prefill_workers", "decode_workers"])
def test_b7_a_worker_that_requires_rdma_refuses_to_start_without(
    package: str, checkpoint: Path, tmp_path: Path
) -> None:
    status, said = start(package, checkpoint, tmp_path, "transfer.require=rdma")
    assert status == 1, said
    assert "transfer.require is 'rdma', but this host has no RDMA device" in said
    assert "UCX moved a block of this worker's by 'cma'" in said
    assert 'set transfer.require = "any"' in said


def test_b7_rdma_and_tcp_only_exclude_each_other(checkpoint: Path, tmp_path: Path) -> None:
    overrides = ["transfer.require=rdma", "transfer.tls=tcp"]
    status, said = start("decode_workers", checkpoint, tmp_path, *overrides)
    assert status == 1, said
    assert "transfer.require is 'rdma'; it must be \"any\" while transfer.tls" in said
