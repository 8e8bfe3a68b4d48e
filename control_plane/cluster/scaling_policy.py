"""From configuration to what `decide` is told to keep, and how large pools may become."""

from __future__ import annotations

from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from hocket import environment
from hocket.autoscaler_settings import PoolScaleSettings
from hocket.config import Config, DecodeSettings, PrefillSettings
from hocket.errors import ConfigError
from hocket.types import Role

# A local Ray puts all workers on this machine.
_LOCAL_WORKERS_PER_CPU = 8


def pool_settings(config: Config, role: Role) -> PrefillSettings | DecodeSettings:
    """[prefill] or [decode]."""
    return config.prefill if role is Role.PREFILL else config.decode


def scale_settings(config: Config, role: Role) -> PoolScaleSettings:
    """[autoscaler.prefill] or [autoscaler.decode]."""
    return config.autoscaler.prefill if role is Role.PREFILL else config.autoscaler.decode


def num_ranks(config: Config, role: Role) -> int:
    """Processes of one worker."""
    return config.decode.group_size if role is Role.DECODE else 1


def most_workers(config: Config, role: Role) -> int:
    """The largest size that a pool may be asked to have. On a local Ray also half of what this
    machine may run; never less than the configuration starts with."""
    most = scale_settings(config, role).max_workers
    if not config.cluster.ray_address:
        most = min(most, _local_processes() // 2 // num_ranks(config, role))
    return max(most, pool_settings(config, role).workers)


def check_local_workers(config: Config) -> None:
    """Raises ConfigError for a slip that would bury this machine under processes."""
    most = _local_processes()
    cores = environment.num_cpus()
    ranks = config.decode.group_size
    num_workers = config.prefill.workers + config.decode.workers * ranks
    way_out = "Join a cluster with cluster.ray_address."
    if num_workers > most:
        times = f" x {ranks} (decode.group_size)" if ranks > 1 else ""
        raise ConfigError(
            f"prefill.workers + decode.workers{times} is {num_workers}; a local Ray starts at most "
            f"{most} on {cores} cores. {way_out}",
            field="prefill.workers",
        )
    for role in Role:
        largest = scale_settings(config, role).max_workers
        if config.autoscaler.enabled and largest > most_workers(config, role):
            raise ConfigError(
                f"autoscaler.{role.value}.max_workers is {largest}; of a local Ray on {cores} "
                f"cores a pool gets at most {most_workers(config, role)}. {way_out}",
                field=f"autoscaler.{role.value}.max_workers",
            )


def targets_of(config: Config) -> Targets:
    """What the autoscaler has to keep."""
    scale = config.autoscaler
    return Targets(
        ttft_s=scale.ttft_s,
        inter_token_s=scale.inter_token_s,
        queue_drain_s=scale.queue_drain_s,
        max_batch=config.decode.max_batch * config.decode.group_size,
    )


def limits_of(config: Config) -> Limits:
    """How sizes may change."""
    scale = config.autoscaler
    return Limits(
        prefill=_pool_limits(config, Role.PREFILL),
        decode=_pool_limits(config, Role.DECODE),
        up_window_s=scale.up_window_s,
        down_window_s=scale.down_window_s,
        start_limit_s=scale.start_limit_s,
        trial_after_s=scale.trial_after_s,
        operator_hold_s=scale.operator_hold_s,
    )


def _pool_limits(config: Config, role: Role) -> PoolLimits:
    scale, most = scale_settings(config, role), most_workers(config, role)
    return PoolLimits(
        min_workers=min(scale.min_workers, most),
        max_workers=most,
        max_step_up=scale.max_step_up,
        max_step_down=scale.max_step_down,
        max_starting=scale.max_starting,
    )


def _local_processes() -> int:
    return _LOCAL_WORKERS_PER_CPU * environment.num_cpus()
