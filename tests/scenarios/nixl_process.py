"""Runs the NIXL variants of scenarios in one process of their own, and tells their reports here.

UCX reads its settings when it is loaded, and a transport that crashes takes its process with it; so
the pytest that somebody started loads no NIXL. It starts a second pytest for all NIXL variants that
were asked for, whose UCX knows nothing but TCP on loopback, and reports test by test what that one
reported. This module is the second one's plugin, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hocket.environment import transfer_environment

_OPTION = "--reports-to"
_TIMEOUT_S = 280.0
_reports = pytest.StashKey[dict[str, list[pytest.TestReport]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, help="write every report to this file, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption(_OPTION, None):
        config.pluginmanager.register(_Writer(config, Path(path)))


class _Writer:
    """In the second process: writes reports as they come, so that a crash loses none."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_data = self._config.hook.pytest_report_to_serializable
        with self._path.open("a") as file:
            print(json.dumps(to_data(config=self._config, report=report)), file=file)


class Elsewhere(pytest.Item):
    """Stands in for a NIXL variant: passes, fails or is skipped as that did in the second process,
    which the first of these starts for all."""

    @classmethod
    def of(cls, item: pytest.Item) -> Elsewhere:
        stand_in = cls.from_parent(item.parent, name=item.name)
        stand_in.real_location = item.location
        stand_in.own_markers = item.own_markers
        return stand_in

    def runtest(self) -> None:
        stash = self.session.stash
        if _reports not in stash:
            items = [item for item in self.session.items if isinstance(item, Elsewhere)]
            stash[_reports] = _run([item.nodeid for item in items], self.config)
        for report in stash[_reports][self.nodeid]:
            if report.skipped:
                _, _, reason = report.longrepr
                pytest.skip(reason.removeprefix("Skipped: "))
            if report.failed:
                raise _FailedThereError(f"{report.longreprtext}\n{report.capstdout}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _FailedThereError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        _, line, name = self.real_location
        return self.path, line, name


class _FailedThereError(Exception):
    """What the second process reported of a failed test."""


def send_elsewhere(items: list[pytest.Item], config: pytest.Config) -> None:
    """Replaces NIXL variants, unless this is the process for them."""
    if config.getoption(_OPTION, None):
        return
    for i, item in enumerate(items):
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("transfer") == "nixl":
            items[i] = Elsewhere.of(item)


def _run(names: list[str], config: pytest.Config) -> dict[str, list[pytest.TestReport]]:
    """The reports of each named test; one that did not get to its end failed."""
    with tempfile.TemporaryDirectory(prefix="hocket-nixl-") as folder:
        path = Path(folder, "reports")
        path.touch()
        options = ["-p", __name__, _OPTION, str(path), "-p", "no:cacheprovider", "-q"]
        said = ""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *names],
                cwd=config.rootpath,
                env={**os.environ, **transfer_environment("tcp", "127.0.0.1", Path(folder))},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            said = f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        except subprocess.TimeoutExpired as error:
            said = f"{error}\n{error.stdout}\n{error.stderr}"
        reports = _read(path, config)
    for name in names:
        if not any(r.when == "call" or not r.passed for r in reports[name]):
            text = f"The NIXL process said nothing of this test. {said[-8000:]}"
            location = (name, 0, name)
            reports[name].append(pytest.TestReport(name, location, {}, "failed", text, "call"))
    return reports


def _read(path: Path, config: pytest.Config) -> dict[str, list[pytest.TestReport]]:
    reports: dict[str, list[pytest.TestReport]] = defaultdict(list)
    for line in path.read_text().splitlines():
        data: dict[str, Any] = json.loads(line)
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        reports[report.nodeid].append(report)
    return reports
