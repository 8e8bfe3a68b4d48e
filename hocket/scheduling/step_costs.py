"""What a decode step costs: seconds of a pass by the rows in it, for drafts and for verification.

A worker measures a few points before it serves (`StepCosts.from_points`); measured steps refine
them while it does. The draft controller reads the curves as tables by row count.

A curve has knots at fixed row counts. Each holds the logarithm of the seconds measured there, as an
exponentially weighted mean over steps; what is read is the isotonic regression of these (more rows
never cost less), linear between knots and beyond the last. Three rules keep it sane online:

    a step that took far longer than expected counts as one that took a little longer
    a knot that was not measured for long moves fast when it is again
    it also follows what happens at fewer rows, so a drift (longer contexts, a slower clock) does
    not make more rows look dear or cheap; at fewer rows than are measured nothing moves, so
    whatever became slower makes the controller look there, and learn

Pure: no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Point = tuple[int, float]

# Quarter powers of two at most: CUDA graphs and row tiles step about there.
_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Steps over which a mean forgets.
_MEMORY_STEPS = 64.0
# What points measured at start-up weigh, in steps.
_START_WEIGHT = 8.0
# Most of a deviation (a logarithm) that one step is believed, and most that it moves a knot by.
_BELIEVED = 0.25
_MOST_GAIN = 0.3


class CostCurve:
    """Seconds of one pass as a function of its rows; never decreasing."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Raises ValueError when there are no points, or rows or seconds that are not positive."""
        if not points or any(rows < 1 or not 0 < s < math.inf for rows, s in points):
            raise ValueError(f"a cost curve needs points of rows >= 1, seconds > 0: {points}")
        measured = dict(sorted(points))
        at = np.array(list(measured), dtype=float)
        seconds = _isotonic(np.array(list(measured.values())), np.ones(len(at)))
        self._knots = np.array(_KNOTS, dtype=float)
        self._logs: Floats = np.log(_line(at, seconds, self._knots))
        self._weights = np.full(len(_KNOTS), _START_WEIGHT)
        self._table = np.zeros(0)
        self._fit()

    def table(self, max_rows: int) -> Floats:
        """Seconds by row count; at least `max_rows` + 1 entries, that of 0 rows being 0.0. Read
        only, and valid until the next `observe`."""
        if len(self._table) <= max_rows:
            size = max(2 * max_rows, 256)
            self._table = _line(self._knots, self._seconds, np.arange(size + 1, dtype=float))
            self._table[0] = 0.0
        return self._table

    def points(self) -> tuple[Point, ...]:
        """The curve as it is read now, at its knots."""
        return tuple(zip(_KNOTS, self._seconds.tolist(), strict=True))

    def observe(self, rows: Sequence[int], seconds: float) -> None:
        """Passes of so many rows each took `seconds` in all."""
        at = np.clip(np.array(rows, dtype=float), 1.0, None)
        expected = _line(self._knots, np.exp(self._logs), at).sum()
        surprise = math.log(max(seconds, 1e-9) / expected)
        surprise = min(max(surprise, -_BELIEVED), _BELIEVED)

        share = self._shares(at)
        self._weights *= 1.0 - 1.0 / _MEMORY_STEPS
        gain = np.minimum(share / (self._weights + share + 1e-9), _MOST_GAIN)
        last = int(np.flatnonzero(share)[-1])
        staleness = np.maximum(0.0, 1.0 - self._weights[last + 1 :] / _START_WEIGHT)
        gain[last + 1 :] = gain[last] * staleness
        self._logs += gain * surprise
        self._weights += share
        self._fit()

    def _shares(self, at: Floats) -> Floats:
        """How much of an observation belongs to each knot; sums to 1."""
        above = np.clip(np.searchsorted(self._knots, at), 1, len(self._knots) - 1)
        low, high = self._knots[above - 1], self._knots[above]
        part = np.clip((at - low) / (high - low), 0.0, 1.0)
        share = np.bincount(above, part, minlength=len(self._knots))
        share += np.bincount(above - 1, 1.0 - part, minlength=len(self._knots))
        return share / len(at)

    def _fit(self) -> None:
        self._seconds = _isotonic(np.exp(self._logs), self._weights + 1e-6)
        self._table = self._table[:0]


class StepCosts:
    """Costs of a decode step's two halves on one worker."""

    def __init__(self, draft: CostCurve, verify: CostCurve) -> None:
        self.draft = draft
        self.verify = verify

    @classmethod
    def from_points(cls, draft: Sequence[Point], verify: Sequence[Point]) -> StepCosts:
        """From (rows, seconds) of one pass of the MTP module and of one verify pass; a handful of
        each, from one row to as many as a full batch has. Raises ValueError as `CostCurve`."""
        return cls(CostCurve(draft), CostCurve(verify))

    def observe(
        self, draft_rows: Sequence[int], draft_s: float, verify_rows: int, verify_s: float
    ) -> None:
        """One measured step. `draft_rows`: rows of each draft pass, which took `draft_s` in all;
        empty when there was none. Steps that also computed prompts are not to be told."""
        if draft_rows:
            self.draft.observe(draft_rows, draft_s)
        if verify_rows:
            self.verify.observe([verify_rows], verify_s)


def _line(knots: Floats, seconds: Floats, at: Floats) -> Floats:
    """Linear between knots, constant below the first, and beyond the last as between the last
    two."""
    result: Any = np.interp(at, knots, seconds)
    if len(knots) > 1:
        slope = (seconds[-1] - seconds[-2]) / (knots[-1] - knots[-2])
        result = result + np.maximum(at - knots[-1], 0.0) * slope
    return result


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """The never decreasing sequence nearest to `values` in weighted least squares: pool adjacent
    violators."""
    if bool((values[1:] >= values[:-1]).all()):
        return values
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, length = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, more, longer = pools.pop()
            mean = (mean * total + other * more) / (total + more)
            total, length = total + more, length + longer
        pools.append((mean, total, length))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
