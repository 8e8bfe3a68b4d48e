"""What one decision hands to the next. An empty `State()` is always a safe start: sizes stay as
found until the windows have been seen through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from control_plane.autoscaler.observations import UNMEASURED, Metric
from control_plane.autoscaler.sizing import DecodeSpeed


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A size asked for at a time, before windows and steps."""

    at_s: float
    size: int


@dataclass(frozen=True, slots=True)
class Hold:
    """An operator wrote this size, seen first at this time."""

    size: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Floor:
    """A size that a measured latency asks for beyond what the formulae say.

    size: not less than this; 0: nothing is asked for.
    need: the need, in workers, when it was set.
    missed_since_s: when the latency target began to be missed; inf: it is not.
    tried_s: the latency before the newest worker of it; 0: no trial runs.
    windows: that it was seen at work in.
    is_futile: the last trial was without effect.
    """

    size: int = 0
    need: float = 0.0
    missed_since_s: float = math.inf
    tried_s: float = 0.0
    windows: int = 0
    is_futile: bool = False


@dataclass(frozen=True, slots=True)
class PoolState:
    """Of one pool. `hold` is empty when nobody but the autoscaler has written a size."""

    history: tuple[Recommendation, ...] = ()
    hold: tuple[Hold, ...] = ()
    floor: Floor = Floor()


@dataclass(frozen=True, slots=True)
class State:
    """Of both pools, and the newest figures about workers: they outlive windows without work."""

    prefill: PoolState = PoolState()
    decode: PoolState = PoolState()
    prefill_tokens_per_s: Metric = UNMEASURED
    decode_speed: DecodeSpeed = field(default_factory=DecodeSpeed)
