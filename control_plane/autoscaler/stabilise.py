"""From needs to calm sizes: thresholds, windows, start-ups, steps. All functions grow with their
first argument, so that more load never means fewer workers.

Windows work as in Kubernetes' HorizontalPodAutoscaler (`behavior.stabilizationWindowSeconds`): a
pool grows to the smallest size that was asked for in the whole up window, and shrinks to the
largest one in the down window.
"""

from __future__ import annotations

import math

from control_plane.autoscaler.observations import PoolWorkers
from control_plane.autoscaler.policy import Limits, PoolLimits
from control_plane.autoscaler.state import Recommendation

# Keeps 3.0000000001 workers, an artefact of floats, from becoming 4.
_ROUNDING = 1e-6
# Above every max_workers.
_MANY = 1e9


def with_thresholds(need: float, size: int, limits: Limits) -> int:
    """The size for a need: larger when the load is above up_threshold of the capacity, smaller
    when the smaller pool would be at most at down_threshold, else the present one."""
    grown = _whole(need / limits.up_threshold)
    if grown > size:
        return _whole(need)
    return min(size, _whole(need / limits.down_threshold))


def remembered(
    history: tuple[Recommendation, ...], size: int, now_s: float, limits: Limits
) -> tuple[Recommendation, ...]:
    """What of the history still counts. After a start, or a gap longer than the windows, the
    present size stands in, so that one window alone never shrinks a pool."""
    longest_s = max(limits.up_window_s, limits.down_window_s)
    recent = tuple(entry for entry in history if entry.at_s > now_s - longest_s)
    return recent or (Recommendation(now_s, size),)


def with_windows(
    wanted: int, size: int, history: tuple[Recommendation, ...], now_s: float, limits: Limits
) -> tuple[int, str]:
    """The size that the windows let through, and what to say when it is not `wanted`."""
    if wanted > size:
        # Nothing serves at all: waiting for certainty would only lengthen the cold start.
        window_s, choose = (limits.up_window_s if size else 0.0), min
    else:
        window_s, choose = limits.down_window_s, max
    in_window = [entry.size for entry in history if entry.at_s > now_s - window_s]
    stable = choose([wanted, *in_window])
    stable = max(stable, size) if wanted > size else min(stable, size)
    if stable == wanted:
        return stable, ""
    return stable, f"{wanted} is not asked for during all of {window_s:.0f} s"


def is_starting(workers: PoolWorkers, limits: Limits) -> bool:
    """Whether a worker starts that is not stuck."""
    return any(seconds <= limits.start_limit_s for seconds in workers.starting_s)


def with_starts(wanted: int, size: int, workers: PoolWorkers, limits: Limits) -> tuple[int, str]:
    """No shrinking while workers start as they should, no growing while some are stuck."""
    stuck = sum(seconds > limits.start_limit_s for seconds in workers.starting_s)
    if stuck and wanted > size:
        return size, f"no growth: {stuck} starting for more than {limits.start_limit_s:.0f} s"
    if is_starting(workers, limits) and wanted < size:
        return size, f"no shrinking: {len(workers.starting_s) - stuck} starting"
    return wanted, ""


def with_steps(wanted: int, size: int, workers: PoolWorkers, pool: PoolLimits) -> tuple[int, str]:
    """Bounds one decision: steps, starts at the same time, and room beside draining workers."""
    starts = max(0, pool.max_starting - len(workers.starting_s))
    room = max(0, pool.max_workers - workers.draining - size)
    highest = size + min(pool.max_step_up, starts, room)
    lowest = max(pool.min_workers, size - pool.max_step_down)
    if wanted > highest:
        if room < min(pool.max_step_up, starts):
            beside = f", {workers.draining} draining" if workers.draining else ""
            return highest, f"{wanted} is beyond the limit of {pool.max_workers}{beside}"
        return highest, f"{wanted} in steps: {pool.max_step_up} at most, {starts} may start now"
    if wanted < lowest:
        if lowest == pool.min_workers:
            return lowest, f"{wanted} is below the minimum of {pool.min_workers}"
        return lowest, f"{wanted} in steps of at most {pool.max_step_down}"
    return wanted, ""


def _whole(workers: float) -> int:
    return math.ceil(min(workers, _MANY) - _ROUNDING)
