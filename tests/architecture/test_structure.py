"""The repository as tests: sizes, documented names, generated stubs, torch-free imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hocket", "control_plane", "prefill_workers", "decode_workers")
CODE_FOLDERS = (*PACKAGES, "tools", "benchmarks")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# The ratchet: what is longer than the limits today, and how long. Entries may only shrink or go.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def _sources() -> list[Path]:
    found = [p for folder in CODE_FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if "_pb2" not in p.name]


def _function_lengths(path: Path) -> dict[str, int]:
    tree = ast.parse(path.read_text())
    name = path.relative_to(ROOT).as_posix()
    return {
        f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _check_ratchet(lengths: dict[str, int], limit: int, exceptions: dict[str, int]) -> None:
    too_long = {n: k for n, k in lengths.items() if k > max(limit, exceptions.get(n, 0))}
    assert not too_long, f"longer than {limit} lines (split them): {too_long}"
    stale = {n: lengths.get(n, 0) for n, k in exceptions.items() if lengths.get(n, 0) < k}
    assert not stale, f"the ratchet may be tightened to: {stale}"


def test_files_stay_small() -> None:
    lengths = {p.relative_to(ROOT).as_posix(): p.read_text().count("\n") for p in _sources()}
    _check_ratchet(lengths, MAX_FILE_LINES, LONG_FILES)


def test_functions_stay_small() -> None:
    lengths: dict[str, int] = {}
    for path in _sources():
        lengths |= _function_lengths(path)
    _check_ratchet(lengths, MAX_FUNCTION_LINES, LONG_FUNCTIONS)


def _documented_names(text: str) -> set[str]:
    """Backticked paths and dotted names of our packages; anything else is prose."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    names = set(re.findall(r"`([A-Za-z_][\w./-]*)`", prose))
    roots = (*PACKAGES, "protos", "deploy", "tests", "tools", "benchmarks", "docs")
    return {n for n in names if re.split(r"[./]", n)[0] in roots and re.search(r"[./]", n)}


def _exists(name: str) -> bool:
    """True for a path in the repository, a name on the wire, a module, or what a module defines."""
    if "/" in name:
        return (ROOT / name.rstrip("/")).exists()
    if name.startswith("hocket.v1."):
        protos = [ROOT / f"protos/hocket/rpc/{name}.proto" for name in ("generation", "cluster")]
        public = "".join(proto.read_text() for proto in protos)
        return (
            re.search(rf"^(service|message|enum) {name.split('.')[2]}\b", public, re.M) is not None
        )
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        module = (
            base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        )
        if module.exists():
            return _defines(module, parts[cut:])
    return False


def _defines(module: Path, attributes: list[str]) -> bool:
    body: list[ast.stmt] = ast.parse(module.read_text()).body
    for attribute in attributes:
        found = next((n for n in body if getattr(n, "name", None) == attribute), None)
        targets = {
            t.id
            for n in body
            for t in ([n.target] if isinstance(n, ast.AnnAssign) else getattr(n, "targets", []))
            if isinstance(t, ast.Name)
        }
        if found is None:
            return attribute in targets
        body = getattr(found, "body", [])
    return True


@pytest.mark.parametrize("page", ["docs/architecture.md", "README.md"])
def test_every_name_in_the_documents_exists(page: str) -> None:
    names = _documented_names((ROOT / page).read_text())
    missing = sorted(n for n in names if not _exists(n))
    assert names, f"{page} names no code at all"
    assert not missing, f"{page} names what does not exist: {missing}"


def test_committed_stubs_equal_generated_ones(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "generate_stubs.py"), str(tmp_path)], check=True
    )
    fresh = sorted(p for p in tmp_path.rglob("*_pb2*") if p.is_file())
    assert fresh
    for path in fresh:
        committed = ROOT / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), f"{committed}: run `make protos`"


def _torch_free_modules() -> list[str]:
    """The modules that the import-linter contract names, packages unfolded."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [c for c in contracts["contracts"] if c["type"] == "forbidden"]
    modules: list[str] = []
    for name in contract["source_modules"]:
        base = ROOT.joinpath(*name.split("."))
        files = sorted(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        for file in files:
            dotted = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            modules.append(dotted.removesuffix(".__init__"))
    return [m for m in modules if not m.endswith("__main__")]


def test_torch_free_modules_import_without_torch() -> None:
    modules = _torch_free_modules()
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'nixl_cu12', 'nixl_cu13'):\n"
        "            raise ImportError(f'{name} was imported')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import importlib\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        raise SystemExit(f'{name}: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
