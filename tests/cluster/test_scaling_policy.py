"""How large pools may become, and what is refused at the start."""

from __future__ import annotations

import pytest

from control_plane.cluster.scaling_policy import (
    check_local_workers,
    limits_of,
    most_workers,
    targets_of,
)
from hocket import environment
from hocket.config import Config, load_config
from hocket.errors import ConfigError
from hocket.types import Role


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_cpus", lambda: 2)


def config(*overrides: str) -> Config:
    return load_config(None, list(overrides))


def test_a_local_pool_gets_half_of_what_the_machine_may_run() -> None:
    assert most_workers(config(), Role.DECODE) == 8
    assert most_workers(config("autoscaler.decode.max_workers=3"), Role.DECODE) == 3
    assert most_workers(config("autoscaler.decode.max_workers=100"), Role.DECODE) == 8
    joined = config("autoscaler.decode.max_workers=100", "cluster.ray_address=auto")
    assert most_workers(joined, Role.DECODE) == 100


def test_a_group_counts_with_all_its_ranks() -> None:
    assert most_workers(config("decode.group_size=4"), Role.DECODE) == 2
    assert most_workers(config("decode.group_size=4"), Role.PREFILL) == 8


def test_the_size_that_the_configuration_starts_with_is_always_allowed() -> None:
    many = config("decode.workers=12", "autoscaler.decode.max_workers=2")
    assert most_workers(many, Role.DECODE) == 12
    assert limits_of(many).decode.max_workers == 12


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["decode.workers=16"], r"prefill\.workers \+ decode\.workers is 17"),
        (["decode.workers=8", "decode.group_size=2"], r"x 2 \(decode\.group_size\) is 17"),
        (
            ["autoscaler.enabled=true", "autoscaler.prefill.max_workers=9"],
            r"autoscaler\.prefill\.max_workers is 9.*at most 8",
        ),
    ],
)
def test_a_slip_that_would_bury_the_machine_is_refused(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_local_workers(config(*overrides))


def test_the_same_limits_are_no_error_while_the_autoscaler_is_off() -> None:
    check_local_workers(config("autoscaler.prefill.max_workers=9"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["prefill.workers=9"], r"prefill\.workers is 9; it must be from 1 to 8"),
        (["autoscaler.decode.min_workers=2"], r"decode\.workers is 1; it must be from 2 to 8"),
        (
            ["autoscaler.decode.min_workers=4", "autoscaler.decode.max_workers=3"],
            r"autoscaler\.decode\.min_workers is 4.*at most",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_named(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config("autoscaler.enabled=true", *overrides)


def test_targets_and_limits_are_the_configured_ones() -> None:
    made = config(
        "autoscaler.ttft_s=0.5",
        "autoscaler.inter_token_s=0.02",
        "autoscaler.down_window_s=60",
        "autoscaler.decode.max_step_up=2",
        "decode.max_batch=16",
        "decode.group_size=2",
    )
    targets, limits = targets_of(made), limits_of(made)
    assert (targets.ttft_s, targets.inter_token_s, targets.max_batch) == (0.5, 0.02, 32)
    assert (limits.down_window_s, limits.decode.max_step_up) == (60, 2)
    assert limits.prefill.max_step_up == 4
