"""Trials: when a measured latency is above its target although the formulae see enough workers.

The formulae do not know everything (long tails, slow hosts, other tenants). After `trial_after_s`
one more worker is tried; if the latency falls by `min_gain`, it stays and the next is tried; if
not, it goes, and nothing more is tried until the load has grown by a quarter or the target is met
with room. So a target that no size reaches does not cost the whole of max_workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from control_plane.autoscaler.observations import Metric, Missing, PoolWorkers
from control_plane.autoscaler.policy import Limits
from control_plane.autoscaler.state import Floor

# A target is missed only above this multiple of it, and met with room below the other one.
_MISSED = 1.1
_ROOM = 0.7
# Multiples of the need at which a verdict is forgotten.
_GROWN = 1.25
_SHRUNK = 0.5
# Windows with a new worker before it is judged: their means still hold requests from before it.
_SETTLING_WINDOWS = 2


@dataclass(frozen=True, slots=True)
class Latency:
    """A measured mean against its target, in seconds.

    name: "TTFT" or "inter-token time".
    no_help: why more workers cannot lower it at present; "": they may.
    """

    name: str
    measured_s: Metric
    target_s: float
    no_help: str


def try_more(
    floor: Floor, latency: Latency, need: float, workers: PoolWorkers, limits: Limits, now_s: float
) -> tuple[Floor, str]:
    """The floor after this window, and what to say about it ("" for nothing)."""
    if floor.need and need < _SHRUNK * floor.need:
        return Floor(), ""
    measured_s = latency.measured_s
    is_settled = not workers.starting_s and workers.ready >= workers.size
    if isinstance(measured_s, Missing) or not is_settled:
        return floor, ""
    if measured_s < _ROOM * latency.target_s:
        return Floor(), ""
    if measured_s <= _MISSED * latency.target_s:
        return Floor(floor.size, floor.need, is_futile=floor.is_futile), ""
    missed = f"{latency.name} is {measured_s:.3g} s, target {latency.target_s:.3g} s"
    floor = replace(floor, missed_since_s=min(floor.missed_since_s, now_s))
    if latency.no_help:
        return floor, f"{missed}: {latency.no_help}"
    if floor.tried_s and workers.size >= floor.size:
        if floor.windows < _SETTLING_WINDOWS:
            return replace(
                floor, windows=floor.windows + 1
            ), f"{missed}: worker {floor.size} is new"
        if measured_s > floor.tried_s * (1 - limits.min_gain):
            verdict = f"{missed}: out of reach, worker {floor.size} has not lowered it from "
            verdict += f"{floor.tried_s:.3g} s"
            return Floor(floor.size - 1, need, now_s, is_futile=True), verdict
        floor = Floor(floor.size, need, floor.missed_since_s)
    if floor.tried_s:
        return floor, ""
    if floor.is_futile and need <= _GROWN * floor.need:
        return floor, f"{missed}: more workers were tried without effect"
    if now_s - floor.missed_since_s < limits.trial_after_s:
        return floor, f"{missed}, for {now_s - floor.missed_since_s:.0f} s"
    trial = Floor(workers.size + 1, need, floor.missed_since_s, measured_s)
    return trial, f"{missed}: one more worker is tried"
