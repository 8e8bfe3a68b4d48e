"""How many workers a load needs, in workers and fractions of them; no memory, no thresholds.

`decide` calls `prefill_need` and `decode_need`, then `stabilise` turns needs into sizes. Both
needs grow with every part of the load (arrivals, queues, running requests, blocks in use), which
tests/control_plane/autoscaler checks. Every need carries its arithmetic in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from control_plane.autoscaler.observations import (
    UNMEASURED,
    Arrivals,
    DecodeLoad,
    Metric,
    Missing,
    PrefillLoad,
    StepCurve,
)
from control_plane.autoscaler.policy import Targets


@dataclass(frozen=True, slots=True)
class Need:
    """workers: that the load keeps busy at the planned utilisation; a fraction, 0 without load.
    why: the arithmetic, with units.
    unreachable: why no number of workers reaches the target; "" when some does.
    """

    workers: float
    why: str
    unreachable: str = ""


IDLE = Need(0.0, "no load")


def prefill_need(
    arrivals: Arrivals, load: PrefillLoad, tokens_per_s: Metric, targets: Targets, drain_s: float
) -> Need | Missing:
    """Prefill workers for the prompts that arrive and those that queue.

    With a arriving prompt tokens/s, a worker that computes m of them per second and prompts of p
    tokens on average, one prompt takes s = p / m seconds alone. A worker busy for the share u of
    its time makes it wait  s (1 + c²) / 2 · u / (1 - u)  first (Pollaczek-Khinchine, M/G/1, c² the
    `prompt_spread`; Kleinrock, Queueing Systems I, 5.6): each worker as its own queue with random
    arrivals, which errs to the safe side, since the router picks the emptiest. For a mean TTFT of
    T the wait may be w = T - s, hence

        u = w / (w + s (1 + c²) / 2), within [min_utilisation, max_utilisation]
        need = a / (m u) + max(0, queued - a w) / (m max(drain_s, w))

    a w tokens queue even when all is well (Little's law); only what is above them is a backlog, to
    be gone within `drain_s` (inf: left out, since workers for it start already, or prefill waits
    for decode). s ≥ T: no number of workers reaches the target.

    Returns Missing when there is load, but no speed known to divide it by.
    """
    rate = arrivals.prompt_tokens / arrivals.window_s
    queued = load.queued_prompt_tokens
    if rate == 0 and queued == 0:
        return IDLE
    if isinstance(tokens_per_s, Missing) or tokens_per_s == 0:
        return Missing("no prefill speed is known yet")
    prompt_tokens = arrivals.prompt_tokens / arrivals.requests if arrivals.requests else 0.0
    alone_s = prompt_tokens / tokens_per_s
    wait_s = max(0.0, targets.ttft_s - alone_s)
    delay_s = alone_s * (1 + targets.prompt_spread) / 2
    busy = wait_s / (wait_s + delay_s) if wait_s else 0.0
    busy = min(max(busy, targets.min_utilisation), targets.max_utilisation)
    excess = max(0.0, queued - rate * wait_s)
    drain_s = max(drain_s, wait_s)
    workers = rate / (tokens_per_s * busy) + excess / (tokens_per_s * drain_s)
    why = (
        f"needs {workers:.2f}: {rate:,.0f} prompt tokens/s, {tokens_per_s:,.0f} per worker, "
        f"{busy:.0%} busy (a prompt of {prompt_tokens:,.0f} alone takes {alone_s:.2f} s, target "
        f"{targets.ttft_s:.2f} s)"
    )
    if excess and math.isfinite(drain_s):
        why += f", and {excess:,.0f} queued tokens to clear in {drain_s:.0f} s"
    unreachable = ""
    if wait_s == 0:
        unreachable = (
            f"a TTFT of {targets.ttft_s:.2f} s is out of reach: an idle worker takes "
            f"{alone_s:.2f} s; sized for throughput"
        )
    return Need(workers, why, unreachable)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """What one decode worker does, measured now or earlier; see `DecodeLoad` for units.

    blocks_per_worker: KV blocks.
    output_tokens: per request.
    """

    step_curve: StepCurve | Missing = UNMEASURED
    tokens_per_step: Metric = UNMEASURED
    blocks_per_worker: Metric = UNMEASURED
    blocks_per_request: Metric = UNMEASURED
    output_tokens: Metric = UNMEASURED


def decode_need(
    arrivals: Arrivals, load: DecodeLoad, speed: DecodeSpeed, targets: Targets, drain_s: float
) -> Need | Missing:
    """Decode workers for the requests that run and wait, and for those that arrive.

    A step over a batch of b requests takes t(b) seconds and gives each of them g tokens (1 +
    accepted drafts), so tokens come t(b) / g apart. A worker may therefore run

        B = the largest b ≤ max_batch with t(b) ≤ g · target

    requests, where its t is trusted. In it one with n output tokens stays d = n · t(B) / g seconds,
    so of r arriving per second r d run at once (Little's law). Those that wait are to be gone
    within `drain_s` seconds (inf: left out, workers for them start already), which takes
    d / drain_s places for each of them:

        need = max(r d, running + waiting · min(1, d / drain_s)) / B

    and not less than the KV blocks of these requests need. Where even one request is too slow
    (t(1) > g · target) no number of workers helps: B is then the largest batch, for throughput.
    g is the present one. The draft controller drafts less in larger batches; t and g then show it.

    Returns Missing when there is load, but no step time or acceptance known to size it by.
    """
    waiting = load.waiting_requests + arrivals.waiting_requests
    used_blocks = load.num_blocks - load.free_blocks
    if not (arrivals.requests or load.running_requests or waiting or used_blocks):
        return IDLE
    curve, gain = speed.step_curve, speed.tokens_per_step
    if isinstance(curve, Missing) or isinstance(gain, Missing) or gain == 0:
        return Missing("no decode step time or acceptance is known yet")
    batch = curve.largest_batch(targets.inter_token_s * gain, targets.max_batch)
    unreachable = ""
    if batch == 0:
        batch = min(targets.max_batch, curve.largest_trusted)
        unreachable = (
            f"{_ms(targets.inter_token_s)} between tokens are out of reach: one request alone "
            f"takes {_ms(curve.step_s(1) / gain)}; sized for throughput"
        )
    requests = _at_once(arrivals, load, speed, curve.step_s(batch) / gain, drain_s)
    workers = requests / batch
    why = (
        f"needs {workers:.2f}: {requests:.1f} requests at once ({load.running_requests} run, "
        f"{waiting} wait), {batch} per worker ({_ms(curve.step_s(batch))} a step, {gain:.2f} "
        f"tokens a step, target {_ms(targets.inter_token_s)})"
    )
    blocks = float(used_blocks)
    if not isinstance(speed.blocks_per_request, Missing):
        blocks = max(blocks, requests * speed.blocks_per_request)
    if not isinstance(speed.blocks_per_worker, Missing) and speed.blocks_per_worker > 0:
        holders = blocks / (speed.blocks_per_worker * targets.max_kv_use)
        if holders > workers:
            workers = holders
            why = (
                f"needs {workers:.2f}: {blocks:,.0f} KV blocks, {speed.blocks_per_worker:,.0f} "
                f"per worker, at most {targets.max_kv_use:.0%} full"
            )
    return Need(workers, why, unreachable)


def _at_once(
    arrivals: Arrivals, load: DecodeLoad, speed: DecodeSpeed, apart_s: float, drain_s: float
) -> float:
    """Requests that decode has to run at the same time when tokens come `apart_s` apart."""
    waiting = load.waiting_requests + arrivals.waiting_requests
    if isinstance(speed.output_tokens, Missing):
        return float(load.running_requests + (waiting if math.isfinite(drain_s) else 0))
    stay_s = speed.output_tokens * apart_s
    here = load.running_requests + waiting * min(1.0, stay_s / drain_s)
    return max(here, arrivals.requests / arrivals.window_s * stay_s)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
