"""`hocket up --log-dir` is the key telemetry.log_folder, whatever the folder is called."""

from __future__ import annotations

import pytest

from control_plane.cluster.cluster import with_log_folder
from hocket.commands.up import log_settings
from hocket.config import load_config


@pytest.mark.parametrize("folder", ["logs", "1", "true", 'a "b" c', "/tmp/ä", "~/logs", "a\\b"])
def test_the_folder_arrives_as_it_was_given(folder: str) -> None:
    assert load_config(None, log_settings(folder)).telemetry.log_folder == folder


def test_without_it_the_configuration_decides() -> None:
    assert log_settings("") == []


def test_processes_are_given_an_absolute_folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts them elsewhere than where the user stands."""
    here, cluster = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("cluster")
    monkeypatch.chdir(here)
    config = load_config(None, log_settings("logs"))
    assert with_log_folder(config, cluster).telemetry.log_folder == str(here / "logs")
    unnamed = with_log_folder(load_config(None), cluster)
    assert unnamed.telemetry.log_folder == str(cluster / "logs")
    joined = load_config(None, ["cluster.ray_address=head:1"])
    assert with_log_folder(joined, cluster) is joined
