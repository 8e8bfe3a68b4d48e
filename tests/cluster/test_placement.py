"""What Ray is asked for, as far as it can be told without starting Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.cluster.ray_runtime import RayRuntime, bundle_of, temporary_folder
from hocket.config import PlacementSettings, load_config
from hocket.errors import ConfigError, InternalError


def test_a_bundle_holds_what_the_placement_asks_for_and_nothing_else() -> None:
    placement = PlacementSettings(num_cpus=2.0, num_gpus=0.0, resources={"nvlink": 1.0})
    assert bundle_of(placement) == {"CPU": 2.0, "nvlink": 1.0}
    assert bundle_of(PlacementSettings(num_gpus=1.0)) == {"CPU": 0.1, "GPU": 1.0}


def test_a_bundle_is_never_empty() -> None:
    assert bundle_of(PlacementSettings(num_cpus=0.0)) == {"CPU": 0.001}


def test_labels_are_refused_where_no_node_has_any(tmp_path: Path) -> None:
    config = load_config(None, ['decode.placement.labels={"hocket.pool"="decode"}'])
    with pytest.raises(ConfigError, match=r"decode\.placement\.labels.*ray_address"):
        RayRuntime(config, tmp_path, verbose=False)


def test_a_ray_that_does_not_come_up_is_an_error_of_ours_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        InternalError, match=r"did not start.*timed out during startup.*Start again"
    ):
        RayRuntime(load_config(None, []), tmp_path, verbose=False)


def test_ray_gets_a_short_path_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 90)
    folder = temporary_folder()
    try:
        assert len(str(folder)) < 40
        assert folder.is_dir()
    finally:
        folder.rmdir()
