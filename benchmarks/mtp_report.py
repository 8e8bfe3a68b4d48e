"""What `mtp.py` found: rows of a point (workload, temperature, batch), tables, goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

ADAPTIVE = "adaptive"
LEAST_SHARE_OF_CEILING = 0.9
LEAST_GAINS = {"tiny": 1.3, "tiny-held-out": 1.3, "large-dense": 1.6, "large": 1.6}
LEAST_AGAINST_BEST = 0.97
LEAST_AGAINST_NONE = 0.98


@dataclass(frozen=True)
class Row:
    """One variant: k drafts a step, or the controller's choice. Times in milliseconds.

    All variants of a point are timed over the same tokens. `step_ms` is the mean of the steps'
    medians over the passes, `decide_ms` what of it is the controller's, `gain` the speed over that
    of k = 0. `ceiling` = AL * t_step(1) / (t_verify + k * t_draft), of the bare passes; 0.0 where
    there are none. `drafts` are the drafts of a request and step.
    """

    variant: str
    tokens_per_s: float
    step_ms: float
    gain: float
    acceptance_length: float
    acceptance_rate: float
    survival: tuple[float, ...]
    drafts: float
    decide_ms: float = 0.0
    t_verify_ms: float = 0.0
    t_draft_ms: float = 0.0
    ceiling: float = 0.0

    @property
    def share_of_ceiling(self) -> float:
        return self.gain / self.ceiling if self.ceiling else 0.0


@dataclass(frozen=True)
class Point:
    """`against_best` is the speed of adaptive over that of the constant that was fastest in this
    point; `spreads` is half of what that ratio and the one against k = 0 range over when each pass
    is taken alone. Drafts of a point that `is_synthetic` are scripted."""

    workload: str
    is_synthetic: bool
    temperature: float
    batch: int
    requests: int
    tokens_each: int
    passes: int
    rows: tuple[Row, ...]
    spreads: tuple[float, float] = (0.0, 0.0)

    @property
    def plain(self) -> Row:
        return self.rows[0]

    @property
    def adaptive(self) -> Row:
        return self.rows[-1]

    @property
    def best(self) -> Row:
        return max(self.rows[:-1], key=lambda row: row.tokens_per_s)

    @property
    def against_best(self) -> float:
        return self.adaptive.tokens_per_s / self.best.tokens_per_s

    @property
    def against_none(self) -> float:
        return self.adaptive.tokens_per_s / self.plain.tokens_per_s

    @property
    def undecided(self) -> float:
        """What both ratios would be multiplied with if deciding took no time."""
        return self.adaptive.step_ms / (self.adaptive.step_ms - self.adaptive.decide_ms)

    @property
    def drafts_are(self) -> str:
        return "SYNTHETIC" if self.is_synthetic else "its own"


HEADER = (
    f"{'drafts are':11}{'T':>3}{'batch':>6} {'variant':9}{'tok/s':>8}{'step ms':>9}{'AL':>6}"
    f"{'acc':>5}{'t_verify':>9}{'t_draft':>8}{'gain':>6}{'ceiling':>8}{'ratio':>6}  survival"
)


def format_point(point: Point) -> str:
    on_best, on_none = point.against_best - 1.0, point.against_none - 1.0
    spreads = [f" ±{spread:.1%}" if point.passes > 1 else "" for spread in point.spreads]
    free = point.against_best * point.undecided - 1.0
    adaptive = point.adaptive
    comparison = (
        f"{'':21}{adaptive.drafts:.2f} drafts a request and step, {on_best:+.1%}{spreads[0]} on "
        f"{point.best.variant} ({free:+.1%} but for {adaptive.decide_ms:.2f} ms to decide), "
        f"{on_none:+.1%}{spreads[1]} on k=0; {point.requests} x {point.tokens_each} tokens, "
        f"passes: {point.passes}"
    )
    return "\n".join([*(format_row(point, row) for row in point.rows), comparison])


def format_row(point: Point, row: Row) -> str:
    bare = f"{row.t_verify_ms:9.2f}{row.t_draft_ms:8.2f}" if row.ceiling else f"{'':17}"
    ceiling = f"{row.ceiling:8.2f}{row.share_of_ceiling:6.2f}" if row.ceiling else f"{'':14}"
    return (
        f"{point.drafts_are:11}{point.temperature:3.1f}{point.batch:6d} {row.variant:9}"
        f"{row.tokens_per_s:8.1f}{row.step_ms:9.2f}{row.acceptance_length:6.2f}"
        f"{row.acceptance_rate:5.2f}{bare}{row.gain:6.2f}{ceiling}"
        f"  {' '.join(f'{share:.2f}' for share in row.survival)}"
    ).rstrip()


def summary(points: Sequence[Point]) -> str:
    """A line for each point: tokens/s of every variant, and adaptive against the others."""
    variants = [f"{row.variant:>9}" for row in points[0].rows]
    lines = [
        f"{'workload':14}{'drafts are':11}{'T':>3}{'batch':>6}{''.join(variants)}"
        f"{'drafts':>7}{'on best':>9}{'on k=0':>8}{'deciding':>9}"
    ]
    for point in points:
        speeds = "".join(f"{row.tokens_per_s:9.1f}" for row in point.rows)
        lines.append(
            f"{point.workload:14}{point.drafts_are:11}{point.temperature:3.1f}{point.batch:6d}"
            f"{speeds}{point.adaptive.drafts:7.2f}{point.against_best - 1.0:+9.1%}"
            f"{point.against_none - 1.0:+8.1%}{1.0 - 1.0 / point.undecided:9.1%}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Goal:
    """`found` is to be at least `wanted`; `where` says in which row it was found."""

    name: str
    where: str
    wanted: float
    found: float

    @property
    def is_met(self) -> bool:
        return self.found >= self.wanted


def goals(points: Sequence[Point]) -> list[Goal]:
    """Those that the measured points can answer: at batch 1 the best gain and its share of the
    ceiling, over all points the worst of adaptive."""
    found: list[Goal] = []
    for point in points:
        if point.batch == 1:
            best, where = point.best, _place(point)
            gained = f"{where}, {best.variant}, AL {best.acceptance_length:.2f}"
            if point.workload in LEAST_GAINS:
                wanted = LEAST_GAINS[point.workload]
                found.append(Goal("gain over k=0", gained, wanted, best.gain))
            drafting = [row for row in point.rows if row.ceiling]
            if drafting:
                row = min(drafting, key=lambda row: row.share_of_ceiling)
                share, where = row.share_of_ceiling, f"{where}, the worst k: {row.variant}"
                found.append(Goal("of the ceiling", where, LEAST_SHARE_OF_CEILING, share))
    for workload in dict.fromkeys(point.workload for point in points):
        own = [point for point in points if point.workload == workload]
        found += _worst("adaptive / best constant", LEAST_AGAINST_BEST, own, _against_best)
        found += _worst("adaptive / k=0", LEAST_AGAINST_NONE, own, _against_none)
    return found


def format_goal(goal: Goal) -> str:
    verdict = "met" if goal.is_met else "MISSED"
    return f"{goal.name:25}{goal.found:6.3f}  goal {goal.wanted:.2f}  {verdict:7} {goal.where}"


def _worst(
    name: str, wanted: float, points: Sequence[Point], ratio: Callable[[Point], float]
) -> Iterator[Goal]:
    worst = min(points, key=ratio)
    missed = sum(ratio(point) < wanted for point in points)
    where = f"worst of {len(points)}, {missed} below the goal: {_place(worst)}"
    yield Goal(name, where, wanted, ratio(worst))


def _against_best(point: Point) -> float:
    return point.against_best


def _against_none(point: Point) -> float:
    return point.against_none


def _place(point: Point) -> str:
    drafts = f"drafts {point.drafts_are}"
    return f"{point.workload}, {drafts}, T={point.temperature}, batch {point.batch}"
