"""What a decode step costs: seconds of a pass by the rows in it, for drafts and for verification.

A worker measures a few points before it serves (`StepCosts.from_points`); measured steps refine
them while it does. The draft controller reads the curves as tables by row count.

A curve is seconds at fixed row counts (knots), linear between them and beyond the last. A Kalman
filter keeps their logarithms: what a step tells of some knots, it tells of the others as far as
they drift together (a slower clock, longer contexts) and lie near. A knot that was not measured for
long is uncertain, and moves fast when it is again. A step that took far longer than expected counts
as one that took a little longer, unless several in a row do: then all knots follow together.
What is read is the isotonic regression of the knots: more rows never cost less.

A row of a request that has one already costs less than a row of another request: what a request
itself adds to a verify pass is measured at start-up and kept apart from the curve.

Pure: no clock.

Shape letters: J knots.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Point = tuple[int, float]

# Four to an octave where tiles of rows show.
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192,
          256, 320, 384, 512, 768, 1024)  # fmt: skip
_LAST = len(_KNOTS) - 1
# Standard deviations, as parts of the seconds: of one step's time; of what was measured at start-up
# from the truth in service; of what is not measured any more, in the end and after a shift.
_NOISE = 0.1
_START = 0.15
_STALE = 0.3
# Part of its way to `_STALE` that uncertainty goes in a step.
_FADES = 1e-4
# Standard deviations that a step is believed at most, and how many steps beyond it to one side, one
# after another, are no hiccups but a shift.
_BELIEVED = 2.0
_HICCUPS = 5
# Of a verify pass.
_MOST_OF_REQUESTS = 0.8
# Knots move together: in this part all, in the rest less by each octave of rows between them.
_COMMON = 0.7
_OCTAVES = np.log2(np.array(_KNOTS, dtype=float))
_TOGETHER_JJ: Floats = _COMMON + (1.0 - _COMMON) * np.exp(-np.abs(_OCTAVES[:, None] - _OCTAVES))


class CostCurve:
    """Seconds of one pass as a function of its rows; never decreasing."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Raises ValueError when there are no points, or rows or seconds that are not positive."""
        if not points or any(rows < 1 or not 0 < s < math.inf for rows, s in points):
            raise ValueError(f"a cost curve needs points of rows >= 1, seconds > 0: {points}")
        measured = dict(sorted(points))
        levelled = _isotonic(list(measured.values()), [1.0] * len(measured))
        self._logs_J: Floats = np.log(_line(list(measured), levelled, np.array(_KNOTS)))
        self._covariance_JJ = _START**2 * _TOGETHER_JJ
        self._outliers = 0
        self._fit()

    def table(self, max_rows: int) -> Floats:
        """Seconds by row count; at least `max_rows` + 1 entries. A pass without rows costs what one
        row costs. Read only, and valid until the next `observe`."""
        if len(self._table) <= max_rows:
            self._table = _line(_KNOTS, self._seconds, np.arange(max(2 * max_rows, 256)))
        return self._table

    def points(self) -> tuple[Point, ...]:
        """The curve as it is read now, at its knots."""
        return tuple(zip(_KNOTS, self._seconds, strict=True))

    def observe(self, rows: Sequence[int], seconds: float, num_steps: int = 1) -> None:
        """Passes of so many rows each took `seconds` in all, in that many steps."""
        expected_s, shares_J = self._expect(rows)
        fades = _FADES * num_steps
        self._covariance_JJ *= 1.0 - fades
        self._covariance_JJ += fades * _STALE**2 * _TOGETHER_JJ
        if abs(self._outliers) > _HICCUPS:
            self._covariance_JJ += _STALE**2

        told_J = self._covariance_JJ @ shares_J
        variance = float(shares_J @ told_J) + _NOISE**2 / num_steps
        surprise = math.log(max(seconds, 1e-9) / expected_s)
        believed = min(1.0, _BELIEVED * math.sqrt(variance) / max(abs(surprise), 1e-9))
        self._logs_J += told_J * (believed * surprise / variance)
        self._covariance_JJ -= np.outer(told_J, told_J * (believed / variance))
        if believed == 1.0:
            self._outliers = 0
        else:
            before = max(self._outliers, 0) if surprise > 0 else min(self._outliers, 0)
            self._outliers = before + (1 if surprise > 0 else -1)
        self._fit()

    def _expect(self, rows: Sequence[int]) -> tuple[float, Floats]:
        """Seconds of these passes, and how much of them belongs to each knot: [J], 1 in all."""
        means, parts_s = self._means, [0.0] * len(_KNOTS)
        for num_rows in rows:
            above = min(max(bisect_left(_KNOTS, num_rows), 1), _LAST)
            low, high = _KNOTS[above - 1], _KNOTS[above]
            part = max(0.0, (num_rows - low) / (high - low))
            if part > 1.0:
                parts_s[_LAST] += (part - 1.0) * max(0.0, means[_LAST] - means[_LAST - 1])
                part = 1.0
            parts_s[above - 1] += (1.0 - part) * means[above - 1]
            parts_s[above] += part * means[above]
        expected_s = sum(parts_s)
        return expected_s, np.array(parts_s) / expected_s

    def _fit(self) -> None:
        self._means: list[float] = np.exp(self._logs_J).tolist()
        # Squared, so that many knots that nobody measured do not outweigh one that was.
        weights_J = self._covariance_JJ.diagonal() ** -2.0
        self._seconds = _isotonic(self._means, weights_J.tolist())
        self._table: Floats = np.zeros(0)


class StepTimes(NamedTuple):
    """Of one decode step: rows of each draft pass, seconds of all of them; rows of the verify pass,
    its seconds, requests in it."""

    draft_rows: Sequence[int]
    draft_s: float
    verify_rows: int
    verify_s: float
    num_requests: int


class StepCosts:
    """Costs of a decode step's two halves on one worker. `request_s`: what each request adds to the
    seconds that `verify` tells of its rows."""

    def __init__(self, draft: CostCurve, verify: CostCurve, request_s: float = 0.0) -> None:
        self.draft = draft
        self.verify = verify
        self.request_s = request_s

    @classmethod
    def from_points(
        cls, draft: Sequence[Point], verify: Sequence[Point], request_s: float = 0.0
    ) -> StepCosts:
        """From (rows, seconds) of one pass of the MTP module and of one verify pass, the latter
        without `request_s` of each request; a handful of each, from one row to as many as a full
        batch has. Raises ValueError as `CostCurve`."""
        return cls(CostCurve(draft), CostCurve(verify), request_s)

    @classmethod
    def from_steps(cls, draft: Sequence[Point], steps: Sequence[StepTimes]) -> StepCosts:
        """From verify passes of which some have as many rows as others, of fewer requests. Raises
        ValueError as `CostCurve`."""
        request_s = _request_s(steps)
        seconds_of: defaultdict[int, list[float]] = defaultdict(list)
        for step in steps:
            seconds_of[step.verify_rows].append(step.verify_s - request_s * step.num_requests)
        points = [(rows, fmean(seconds)) for rows, seconds in seconds_of.items()]
        return cls.from_points(draft, points, request_s)

    def verify_table(self, max_rows: int, num_requests: int) -> Floats:
        """Seconds of a verify pass of so many requests, as `CostCurve.table`."""
        return self.verify.table(max_rows) + self.request_s * num_requests

    def observe(self, steps: Sequence[StepTimes]) -> None:
        """Measured steps, like one another; not such that also computed prompts."""
        drafted = [step for step in steps if step.draft_rows]
        if drafted:
            rows = [rows for step in drafted for rows in step.draft_rows]
            self.draft.observe(rows, sum(step.draft_s for step in drafted), len(drafted))
        if steps:
            rows = [step.verify_rows for step in steps]
            seconds = sum(step.verify_s for step in steps)
            of_requests_s = self.request_s * sum(step.num_requests for step in steps)
            of_rows_s = max(seconds - of_requests_s, (1.0 - _MOST_OF_REQUESTS) * seconds)
            self.verify.observe(rows, of_rows_s, len(steps))


def _request_s(steps: Sequence[StepTimes]) -> float:
    """What a request adds: by least squares from pairs of steps with as many rows, of which one has
    more requests. Not negative, and of no step more than `_MOST_OF_REQUESTS`."""
    above = below = 0.0
    for one, other in combinations(steps, 2):
        if one.verify_rows == other.verify_rows:
            more = one.num_requests - other.num_requests
            above += more * (one.verify_s - other.verify_s)
            below += more**2
    most = min((_MOST_OF_REQUESTS * step.verify_s / step.num_requests for step in steps), default=0)
    return min(max(above / below, 0.0), most) if below else 0.0


def _line(knots: Sequence[int], seconds: Sequence[float], at: NDArray[np.int64]) -> Floats:
    """Linear between knots, constant below the first, and beyond the last as between the last
    two."""
    result: Floats = np.interp(at, knots, seconds)
    if len(knots) > 1:
        slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
        result += np.maximum(at - knots[-1], 0) * slope
    return result


def _isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never decreasing sequence nearest to `values` in weighted least squares: pool adjacent
    violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, longer = pools.pop()
            mean = (mean * total + other * more) / (total + more)
            total, length = total + more, length + longer
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]
