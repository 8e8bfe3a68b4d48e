"""What the autoscaler sees: one window of measurements, as values that cannot be wrong.

The metrics source (`executor.ObservationSource`) builds an `Observations`; `decide` reads it. A
figure that is not there, or not a number, is `Missing` with its reason, never zero: an idle pool
and a dead metrics server must not look alike. "Worker" is what starts and stops as one: in the
decode pool a whole expert-parallel group, whose batch is the sum over its ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """A figure that nobody could give, and why."""

    why: str


Metric = float | Missing
UNMEASURED = Missing("nothing was measured yet")
# Products and quotients of figures between these are numbers.
_LARGEST = 1e15
_SMALLEST = 1e-9


def metric(value: float | None, name: str) -> Metric:
    """A measured figure, or `Missing` for none, NaN (0/0 of an empty window), ±inf, negative, and
    what no worker can have measured."""
    if value is None:
        return Missing(f"{name} was not reported")
    if not 0 <= value <= _LARGEST or 0 < value < _SMALLEST:
        return Missing(f"{name} is {value}")
    return value


def known(newest: Metric, remembered: Metric) -> Metric:
    """The newest figure, or the remembered one where there is no new one."""
    return remembered if isinstance(newest, Missing) else newest


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Measured seconds of a decode step by batch: (requests in the batch, seconds), ascending.

    Verification of drafts is part of the step, at the draft lengths in use.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        assert self.points, "a step curve needs a point"
        for batch, seconds in self.points:
            assert batch >= 1, self.points
            assert math.isfinite(seconds), self.points
            assert seconds > 0, self.points
        for (batch, seconds), (next_batch, next_seconds) in zip(
            self.points, self.points[1:], strict=False
        ):
            assert batch < next_batch, self.points
            assert seconds <= next_seconds, self.points

    @staticmethod
    def measured(samples: Iterable[tuple[int, float]]) -> StepCurve | Missing:
        """The curve through samples in any order; noise that falls with the batch is lifted to
        the running maximum, so that a larger batch never looks faster. Unusable ones are left
        out; without any usable one there is no curve."""
        points: dict[int, float] = {}
        slowest = 0.0
        for batch, seconds in sorted(samples):
            if batch >= 1 and math.isfinite(seconds) and seconds > 0:
                slowest = max(slowest, seconds)
                points[batch] = slowest
        return StepCurve(tuple(points.items())) if points else Missing("no step was measured")

    @property
    def largest_trusted(self) -> int:
        """Requests: twice the largest measured batch; beyond it the curve says nothing."""
        return 2 * self.points[-1][0]

    def step_s(self, batch: int) -> float:
        """Seconds of a step: flat below the first point, linear between points, and on along the
        last segment beyond (one point alone: in proportion to the batch)."""
        at = bisect_right(self.points, batch, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        (left, left_s) = self.points[at - 1]
        if at < len(self.points):
            (right, right_s) = self.points[at]
        elif at == 1:
            left, left_s, right, right_s = 0, 0.0, left, left_s
        else:
            (left, left_s), (right, right_s) = self.points[-2], self.points[-1]
        return left_s + (right_s - left_s) * (batch - left) / (right - left)

    def largest_batch(self, limit_s: float, max_batch: int) -> int:
        """Most requests, up to `max_batch` and what is trusted, whose step takes at most
        `limit_s`; 0 when not even one does."""
        batches = range(1, min(max_batch, self.largest_trusted) + 1)
        return bisect_right(batches, limit_s, key=self.step_s)


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """A pool as its executor sees it.

    size: workers asked for at present, by whomever (the replicas of a group, say).
    written_size: the size that the executor itself wrote last with success, or that it found when
        it looked for the first time. Another `size` than this was written by an operator; -1: so
        was this very one.
    ready: serve now.
    starting_s: for each worker that starts or loads: seconds since it was asked for.
    draining: take nothing new, finish what they have; no longer part of `size`.
    start_up_s: what the latest start took, in seconds; 0: there was none yet.
    """

    size: int
    written_size: int
    ready: int = 0
    starting_s: tuple[float, ...] = ()
    draining: int = 0
    start_up_s: float = 0.0

    def __post_init__(self) -> None:
        assert min(self.size, self.ready, self.draining) >= 0, self
        _check(self.start_up_s, *self.starting_s)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What came through the gateways in the window.

    window_s: its length in seconds; at least a millisecond.
    requests: that arrived.
    prompt_tokens: of them that prefill has to compute: cached prefixes are taken off.
    waiting_requests: at this moment at the gateways, for want of any worker to go to.
    output_tokens_per_request: mean of the requests that ended; Missing when none did.
    """

    window_s: float
    requests: float
    prompt_tokens: float
    waiting_requests: int = 0
    output_tokens_per_request: Metric = Missing("no request has ended")

    def __post_init__(self) -> None:
        assert self.window_s >= 1e-3, self
        _check(self.window_s, self.requests, self.prompt_tokens, self.waiting_requests)


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The prefill pool, summed over its ready workers unless it says otherwise.

    waiting_requests, queued_prompt_tokens: not computed yet.
    unread_share: of the pool's blocks, held by computed prompts that decode has not read yet.
    tokens_per_s: prompt tokens that one worker computes per second of work.
    ttft_s: mean time to first token in the window; Missing when there was no first token.
    """

    waiting_requests: int = 0
    queued_prompt_tokens: float = 0
    unread_share: float = 0.0
    tokens_per_s: Metric = Missing("nothing was computed")
    ttft_s: Metric = Missing("there was no first token")

    def __post_init__(self) -> None:
        _check(self.waiting_requests, self.queued_prompt_tokens, self.unread_share)


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The decode pool, summed over its ready workers unless it says otherwise.

    running_requests: in batches now.
    waiting_requests: placed on a worker that cannot hold them yet.
    free_blocks, num_blocks: KV blocks; cached blocks that nobody uses count as free.
    blocks_per_request: mean of the requests that run.
    tokens_per_step: tokens that a request gets per step, 1 + accepted drafts; 1 without MTP.
    step_curve: of one worker.
    inter_token_s: mean time between tokens in the window.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    blocks_per_request: Metric = Missing("no request runs")
    tokens_per_step: Metric = Missing("there was no step")
    step_curve: StepCurve | Missing = Missing("there was no step")
    inter_token_s: Metric = Missing("there was no token")

    def __post_init__(self) -> None:
        _check(self.running_requests, self.waiting_requests, self.free_blocks)
        assert self.free_blocks <= self.num_blocks, self


@dataclass(frozen=True, slots=True)
class Observations:
    """One window. `now_s` is monotonic seconds, of the same clock from window to window."""

    now_s: float
    prefill_workers: PoolWorkers
    decode_workers: PoolWorkers
    arrivals: Arrivals | Missing
    prefill: PrefillLoad | Missing
    decode: DecodeLoad | Missing


def _check(*figures: float) -> None:
    for figure in figures:
        assert 0 <= figure <= _LARGEST, figures
