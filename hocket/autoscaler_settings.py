"""The [autoscaler] table of the configuration: whether, how far and how fast sizes of pools change.

`hocket.config` has all other tables, and loads this one with them.
`control_plane.cluster.scaling_policy` turns it into what the autoscaler's decision takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hocket.toml_tables import at_least, between, wrong


@dataclass(frozen=True, slots=True)
class PoolScaleSettings:
    """[autoscaler.prefill], [autoscaler.decode]: how one pool may change. An operator's sizes
    (`hocket scale`) keep to min_workers and max_workers too, whether `enabled` or not.

    min_workers, max_workers: the size is always between them.
    max_step_up, max_step_down: workers per decision.
    max_starting: workers that start at the same time.
    """

    min_workers: int = between(1, 4096, 1)
    max_workers: int = between(1, 4096, 8)
    max_step_up: int = between(1, 4096, 4)
    max_step_down: int = between(1, 4096, 1)
    max_starting: int = between(1, 4096, 8)


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """[autoscaler]: whether and how the sizes of both pools follow the load.

    enabled: off, sizes change only by `hocket scale`.
    interval_s: time between decisions, and the window that each looks at.
    ttft_s, inter_token_s: mean seconds to keep: to the first token, and between later ones.
    queue_drain_s: a backlog should be gone within this time.
    up_window_s, down_window_s: a pool grows (shrinks) only as far as every recommendation of this
        long asked for.
    trial_after_s: a target must be missed for this long before one more worker is tried.
    start_limit_s: a worker that has been starting for longer is stuck: nothing grows meanwhile.
    operator_hold_s: how long the autoscaler keeps an operator's size.
    drain_s: time that the requests of a worker get when its pool shrinks.
    prefill, decode: limits of each pool.
    """

    enabled: bool = False
    interval_s: float = at_least(0.2, 10.0)
    ttft_s: float = at_least(0.001, 2.0)
    inter_token_s: float = at_least(0.0001, 0.05)
    queue_drain_s: float = at_least(0.1, 30.0)
    up_window_s: float = at_least(0, 30.0)
    down_window_s: float = at_least(0, 300.0)
    trial_after_s: float = at_least(0, 120.0)
    start_limit_s: float = at_least(1, 900.0)
    operator_hold_s: float = at_least(0, 3600.0)
    drain_s: float = at_least(0, 600.0)
    prefill: PoolScaleSettings = field(default_factory=PoolScaleSettings)
    decode: PoolScaleSettings = field(default_factory=PoolScaleSettings)


def check_pool(name: str, workers: int, scale: PoolScaleSettings) -> None:
    """Raises ConfigError when the pool `name` cannot start with so many workers."""
    if scale.min_workers > scale.max_workers:
        limit = f"at most autoscaler.{name}.max_workers ({scale.max_workers})"
        raise wrong(f"autoscaler.{name}.min_workers", scale.min_workers, limit)
    if not scale.min_workers <= workers <= scale.max_workers:
        limit = f"from {scale.min_workers} to {scale.max_workers} (autoscaler.{name})"
        raise wrong(f"{name}.workers", workers, limit)
