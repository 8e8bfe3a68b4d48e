"""The wheel: it holds the packages and the embedded model, nothing else, and runs anywhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"hocket", "control_plane", "prefill_workers", "decode_workers"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_packages_and_the_embedded_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES
    checkpoint = "hocket/checkpoints/hocket-tiny"
    for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert f"{checkpoint}/{file}" in names
    assert wheel.stat().st_size < 25 * 2**20, "the wheel has grown beyond 25 MiB"


def test_the_installed_wheel_runs_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import hocket.config\n"
        "assert hocket.config.__file__.startswith(sys.path[0]), hocket.config.__file__\n"
        "assert hocket.config.ModelSettings().checkpoint().is_dir()\n"
        "from hocket.cli import main; main()\n"
    )
    # -S and -I would hide the dependencies; the wheel's folder simply comes first.
    done = subprocess.run(
        [sys.executable, "-c", program, str(site), "--help"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout
