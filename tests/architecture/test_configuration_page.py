"""docs/configuration.md is made from the dataclasses of the configuration."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "generate_configuration.py"


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_equals_the_generated_one(tmp_path: Path) -> None:
    fresh = tmp_path / "configuration.md"
    subprocess.run([sys.executable, str(SCRIPT), str(fresh)], check=True, cwd=ROOT)
    committed = ROOT / "docs" / "configuration.md"
    assert committed.read_text() == fresh.read_text(), f"run python {SCRIPT.relative_to(ROOT)}"


@dataclass
class Lacking:
    """[lacking]: has a key that nothing describes.

    known: is described,
        on two lines.
    """

    known: int = 1
    forgotten: int = 2


@dataclass
class Stray:
    """[stray]: describes a key that is gone.

    known, gone: are described.
    """

    known: int = 1


def test_a_key_that_nothing_describes_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"Lacking\.forgotten is not described"):
        list(generator.rows(Lacking, {}))


def test_a_description_of_no_key_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"does not have: \['gone'\]"):
        list(generator.rows(Stray, {}))
