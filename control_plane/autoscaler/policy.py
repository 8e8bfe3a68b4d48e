"""What the operator wants: latencies to keep, and how far and how fast sizes may move.

Configuration becomes `Targets` and `Limits`; `sizing` reads the former, `decide` the latter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Targets:
    """Means over a window; whoever wants a percentile sets a lower mean.

    ttft_s, inter_token_s: seconds to the first token, and between tokens after it.
    queue_drain_s: seconds within which a backlog should be gone; longer while a start takes
        longer, because a worker that comes when it is gone anyway would come in vain.
    prompt_spread: squared coefficient of variation of prompt lengths; 0: all equal, 1: exponential.
    max_utilisation: most of a prefill worker's time to plan with, however loose the TTFT target.
    min_utilisation: least of it: a tight target costs at most 1 / min_utilisation of the work.
    max_kv_use: most of a decode worker's blocks to plan with.
    max_batch: requests that one decode worker may run at once.
    """

    ttft_s: float = 2.0
    inter_token_s: float = 0.05
    queue_drain_s: float = 30.0
    prompt_spread: float = 1.0
    max_utilisation: float = 0.85
    min_utilisation: float = 0.5
    max_kv_use: float = 0.9
    max_batch: int = 64

    def __post_init__(self) -> None:
        assert min(self.ttft_s, self.inter_token_s, self.queue_drain_s) > 0, self
        assert 0 < self.min_utilisation <= self.max_utilisation <= 1, self
        assert 0 < self.max_kv_use <= 1, self
        assert self.max_batch >= 1, self
        assert self.prompt_spread >= 0, self


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How one pool may change.

    min_workers, max_workers: the size is always between them; draining workers count towards
        max_workers while they last.
    max_step_up, max_step_down: workers per decision.
    max_starting: workers that start at the same time.
    """

    min_workers: int = 1
    max_workers: int = 8
    max_step_up: int = 4
    max_step_down: int = 1
    max_starting: int = 8

    def __post_init__(self) -> None:
        assert 0 <= self.min_workers <= self.max_workers, self
        assert self.max_workers >= 1, self
        assert min(self.max_step_up, self.max_step_down, self.max_starting) >= 1, self


@dataclass(frozen=True, slots=True)
class Limits:
    """How both pools may change.

    up_threshold: load over capacity above which a pool grows.
    down_threshold: load over capacity that a smaller pool may have; below up_threshold, so that
        there is a band in which nothing happens.
    up_window_s, down_window_s: a pool grows (shrinks) only as far as every recommendation of this
        long asked for.
    start_limit_s: a worker that has been starting for longer is stuck.
    trial_after_s: a latency target must be missed for this long before one more worker is tried.
    min_gain: share by which one more worker must lower a latency to be worth keeping.
    operator_hold_s: how long an operator's size is kept.
    """

    prefill: PoolLimits = PoolLimits()
    decode: PoolLimits = PoolLimits()
    up_threshold: float = 1.1
    down_threshold: float = 0.8
    up_window_s: float = 30.0
    down_window_s: float = 300.0
    start_limit_s: float = 900.0
    trial_after_s: float = 120.0
    min_gain: float = 0.05
    operator_hold_s: float = 3600.0

    def __post_init__(self) -> None:
        assert 0 < self.down_threshold < self.up_threshold, self
        assert min(self.up_window_s, self.down_window_s, self.operator_hold_s) >= 0, self
        assert self.trial_after_s >= 0, self
        assert self.start_limit_s > 0, self
        assert 0 < self.min_gain < 1, self
