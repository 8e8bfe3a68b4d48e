"""What `acceptance.py` found at one temperature and top-p: figures, a table row, what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DIFFERENCE = 0.01


@dataclass(frozen=True)
class Point:
    """Drafts of one depth, 0 for the first of a step. All chances are means over `num_drafts`
    drafts that a step reached; `*_error` are standard errors.

    `optimum`, `coupled`, `bound` and `argmax` are computed from the logged logits, `simulated`
    draws NumPy's noise for them, `sampled` goes through the sampler with fresh seeds, `engine` is
    counted. `slack` is the least of coupled - bound and of optimum - coupled at any one position.
    """

    k: int
    depth: int
    temperature: float
    top_p: float
    num_drafts: int
    optimum: float
    coupled: float
    bound: float
    argmax: float
    slack: float
    simulated: float
    simulated_error: float
    sampled: float
    sampled_error: float
    engine: float
    engine_error: float


HEADER = (
    f"{'k':>2}{'depth':>6}{'T':>5}{'top-p':>6}{'drafts':>7}{'optimum':>8}{'coupled':>8}{'bound':>7}"
    f"{'argmax':>7}{'simulated':>10}{'sampler':>8}{'engine':>8}{'±':>7}{'z':>6}"
)


def format_point(point: Point) -> str:
    p = point
    return (
        f"{p.k:2d}{p.depth:6d}{p.temperature:5.1f}{p.top_p:6.2f}{p.num_drafts:7d}"
        f"{p.optimum:8.4f}{p.coupled:8.4f}{p.bound:7.3f}{p.argmax:7.3f}{p.simulated:10.4f}"
        f"{p.sampled:8.4f}{p.engine:8.4f}{p.engine_error:7.4f}"
        f"{(p.engine - p.coupled) / p.engine_error:6.1f}"
    )


def faults(points: list[Point]) -> list[str]:
    """What must not be: a broken bound, or a simulation or the engine away from the chance."""
    found: list[str] = []
    for p in points:
        name = f"k={p.k} depth {p.depth} T={p.temperature} top-p={p.top_p}"
        if p.slack < -1e-9:
            found.append(f"{name}: a position breaks a bound by {-p.slack}")
        for what, value, error in (
            ("simulation", p.simulated, p.simulated_error),
            ("sampler", p.sampled, p.sampled_error),
            ("engine", p.engine, p.engine_error),
        ):
            if abs(value - p.coupled) > MAX_DIFFERENCE + 3.0 * error:
                found.append(f"{name}: {what} {value:.4f} ±{error:.4f}, chance {p.coupled:.4f}")
    return found
