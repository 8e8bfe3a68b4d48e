"""The autoscaler's one decision: from a window of observations to the sizes of both pools.

    needs (sizing) → thresholds → floors from measured latency (trials) → start-ups → windows
    → steps and limits

An operator's size stops the chain, and so does a missing figure: then the size stays. Everything
that shaped a size is among the reasons. The loop that holds the leader lock calls `decide`, logs
the reasons and gives the sizes to a `PoolExecutor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from control_plane.autoscaler import sizing
from control_plane.autoscaler.observations import (
    UNMEASURED,
    Arrivals,
    DecodeLoad,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
    known,
)
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from control_plane.autoscaler.sizing import DecodeSpeed, Need
from control_plane.autoscaler.stabilise import (
    is_starting,
    remembered,
    with_starts,
    with_steps,
    with_thresholds,
    with_windows,
)
from control_plane.autoscaler.state import Hold, PoolState, Recommendation, State
from control_plane.autoscaler.trials import Latency, try_more
from hocket.types import Role

# Decode has read too little when finished prompts hold this share of prefill's blocks.
_BLOCKED_SHARE = 0.4
# A wait below this share of the target is not what a TTFT is missed for.
_SHORT_WAIT = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers of each pool."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that shaped the size of a pool, in words and numbers."""

    role: Role
    text: str

    def __str__(self) -> str:
        return f"{self.role.value}: {self.text}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Sizes to ask for, why, and the state for the next decision."""

    sizes: Sizes
    reasons: tuple[Reason, ...]
    state: State


@dataclass(frozen=True, slots=True)
class _Pool:
    """One pool in one decision. `wants_one`: there is work somewhere, so it must not be empty."""

    role: Role
    workers: PoolWorkers
    need: Need | Missing
    latency: Latency
    wants_one: bool
    notes: tuple[str, ...] = ()


def decide(observations: Observations, targets: Targets, limits: Limits, state: State) -> Decision:
    """The sizes of both pools for one window. Pure and total: raises nothing for any observation.

    Sizes are within the limits, move by at most one step, never shrink on a missing figure, and
    grow with the load: at the same state, workers and latencies, more requests of the same kind
    never give fewer workers.
    """
    state = replace(
        state,
        prefill_tokens_per_s=_prefill_speed(observations, state),
        decode_speed=_decode_speed(observations, state.decode_speed),
    )
    now_s = observations.now_s
    prefill = _prefill(observations, targets, limits, state)
    decode = _decode(observations, targets, limits, state)
    prefill_size, prefill_state, said = _resize(
        prefill, state.prefill, limits, limits.prefill, now_s
    )
    decode_size, decode_state, also = _resize(decode, state.decode, limits, limits.decode, now_s)
    reasons = [Reason(Role.PREFILL, text) for text in said]
    reasons += [Reason(Role.DECODE, text) for text in also]
    state = replace(state, prefill=prefill_state, decode=decode_state)
    return Decision(Sizes(prefill_size, decode_size), tuple(reasons), state)


def _prefill(observations: Observations, targets: Targets, limits: Limits, state: State) -> _Pool:
    arrivals, load = observations.arrivals, observations.prefill
    workers = observations.prefill_workers
    notes: list[str] = []
    no_help, ttft_s = "", UNMEASURED
    if isinstance(arrivals, Missing) or isinstance(load, Missing):
        need = _missing(arrivals, load)
    else:
        is_blocked = load.unread_share >= _BLOCKED_SHARE
        drain_s = math.inf if is_blocked else _drain_s(workers, targets, limits)
        need = sizing.prefill_need(arrivals, load, state.prefill_tokens_per_s, targets, drain_s)
        queued = f"{load.queued_prompt_tokens:,.0f} queued tokens left out"
        if load.queued_prompt_tokens and is_blocked:
            notes.append(f"{queued}: decode has yet to read {load.unread_share:.0%} of the blocks")
        elif load.queued_prompt_tokens and math.isinf(drain_s):
            notes.append(f"{queued}: {len(workers.starting_s)} starting already")
        ttft_s = load.ttft_s
        no_help = _prefill_no_help(load, workers, targets, state, is_blocked)
    latency = Latency("TTFT", ttft_s, targets.ttft_s, _unreachable(need) or no_help)
    return _Pool(Role.PREFILL, workers, need, latency, _has_work(observations), tuple(notes))


def _prefill_no_help(
    load: PrefillLoad, workers: PoolWorkers, targets: Targets, state: State, is_blocked: bool
) -> str:
    """Why more prefill workers cannot lower the TTFT."""
    if is_blocked:
        return "prefill waits for decode"
    speed = state.prefill_tokens_per_s
    if not isinstance(speed, Missing) and speed > 0 and workers.ready:
        wait_s = load.queued_prompt_tokens / (speed * workers.ready)
        if wait_s < _SHORT_WAIT * targets.ttft_s:
            return f"more workers cannot help, the queue is {wait_s:.2f} s long"
    return ""


def _decode(observations: Observations, targets: Targets, limits: Limits, state: State) -> _Pool:
    arrivals, load = observations.arrivals, observations.decode
    workers = observations.decode_workers
    notes: list[str] = []
    no_help, apart_s = "", UNMEASURED
    if isinstance(arrivals, Missing) or isinstance(load, Missing):
        need = _missing(arrivals, load)
    else:
        drain_s = _drain_s(workers, targets, limits)
        need = sizing.decode_need(arrivals, load, state.decode_speed, targets, drain_s)
        waiting = load.waiting_requests + arrivals.waiting_requests
        if waiting and math.isinf(drain_s):
            notes.append(f"{waiting} waiting left out: {len(workers.starting_s)} starting already")
        apart_s = load.inter_token_s
        if load.running_requests <= workers.ready:
            no_help = f"more workers cannot help, {load.running_requests} requests run"
    no_help = _unreachable(need) or no_help
    latency = Latency("inter-token time", apart_s, targets.inter_token_s, no_help)
    return _Pool(Role.DECODE, workers, need, latency, _has_work(observations), tuple(notes))


def _resize(
    pool: _Pool, state: PoolState, limits: Limits, own: PoolLimits, now_s: float
) -> tuple[int, PoolState, list[str]]:
    """The size of one pool, its next state and its reasons."""
    workers = pool.workers
    size = min(max(workers.size, own.min_workers), own.max_workers)
    said: list[str] = []
    if size != workers.size:
        limits_said = f"{own.min_workers} to {own.max_workers}"
        said.append(f"{workers.size} is outside of the limits {limits_said}")
    history = remembered(state.history, size, now_s, limits)
    hold, words = _operator(workers, size, state.hold, limits, now_s)
    if words:
        said.append(words)
        held = PoolState((*history, Recommendation(now_s, size)), hold, state.floor)
        return size, held, [*said, f"stays at {size}"]

    wanted, floor = size, state.floor
    if isinstance(pool.need, Missing):
        said.append(f"held: {pool.need.why}")
    else:
        said.append(pool.need.why)
        if pool.need.unreachable:
            said.append(pool.need.unreachable)
        said += pool.notes
        wanted = with_thresholds(pool.need.workers, size, limits)
        if wanted <= size:
            need = pool.need.workers
            floor, words = try_more(floor, pool.latency, need, workers, limits, now_s)
            said.append("" if pool.need.unreachable else words)
        wanted = max(wanted, floor.size)
    if pool.wants_one and wanted == 0:
        wanted = 1
        said.append("one at least: there is work")
    wanted, words = with_starts(wanted, size, workers, limits)
    said.append(words)
    # After with_starts: what has just loaded gets a whole down window to be of use.
    recommended = Recommendation(now_s, wanted)
    wanted, words = with_windows(wanted, size, history, now_s, limits)
    said.append(words)
    wanted, words = with_steps(wanted, size, workers, own)
    said.append(words)
    said.append(f"stays at {size}" if wanted == size else f"{size} → {wanted}")
    next_state = PoolState((*history, recommended), hold, floor)
    return wanted, next_state, [words for words in said if words]


def _operator(
    workers: PoolWorkers, size: int, hold: tuple[Hold, ...], limits: Limits, now_s: float
) -> tuple[tuple[Hold, ...], str]:
    """The hold after this window, and what to say while it lasts ("" when there is none). A size
    outside of the limits, from which `size` differs, is not held. An expired hold is kept, so that
    the same edit is not taken for a new one."""
    if workers.written_size == workers.size or size != workers.size:
        return (), ""
    if not hold or hold[0].size != workers.size:
        hold = (Hold(workers.size, now_s),)
    left_s = hold[0].since_s + limits.operator_hold_s - now_s
    if left_s <= 0:
        return hold, ""
    return hold, f"an operator set {workers.size}: kept for another {left_s:.0f} s"


def _has_work(observations: Observations) -> bool:
    """Whether anything arrives, waits or runs anywhere: then neither pool may be empty, and both
    start at the same time."""
    arrivals, prefill, decode = observations.arrivals, observations.prefill, observations.decode
    work = 0.0
    if isinstance(arrivals, Arrivals):
        work += arrivals.requests + arrivals.waiting_requests
    if isinstance(prefill, PrefillLoad):
        work += prefill.waiting_requests + prefill.queued_prompt_tokens
    if isinstance(decode, DecodeLoad):
        work += decode.running_requests + decode.waiting_requests
    return work > 0


def _drain_s(workers: PoolWorkers, targets: Targets, limits: Limits) -> float:
    """Seconds to clear a backlog in: infinite while workers that will clear it start."""
    if is_starting(workers, limits):
        return math.inf
    return max(targets.queue_drain_s, workers.start_up_s)


def _missing(*parts: object) -> Missing:
    reasons = dict.fromkeys(part.why for part in parts if isinstance(part, Missing))
    return Missing("; ".join(reasons))


def _unreachable(need: Need | Missing) -> str:
    return "" if isinstance(need, Missing) else need.unreachable


def _prefill_speed(observations: Observations, state: State) -> float | Missing:
    load = observations.prefill
    newest = load if isinstance(load, Missing) else load.tokens_per_s
    return known(newest, state.prefill_tokens_per_s)


def _decode_speed(observations: Observations, speed: DecodeSpeed) -> DecodeSpeed:
    load, arrivals, ready = (
        observations.decode,
        observations.arrivals,
        observations.decode_workers.ready,
    )
    if not isinstance(arrivals, Missing):
        newest = arrivals.output_tokens_per_request
        speed = replace(speed, output_tokens=known(newest, speed.output_tokens))
    if isinstance(load, Missing):
        return speed
    curve = load.step_curve
    blocks = load.num_blocks / ready if ready and load.num_blocks else speed.blocks_per_worker
    return replace(
        speed,
        step_curve=speed.step_curve if isinstance(curve, Missing) else curve,
        tokens_per_step=known(load.tokens_per_step, speed.tokens_per_step),
        blocks_per_worker=blocks,
        blocks_per_request=known(load.blocks_per_request, speed.blocks_per_request),
    )
