"""What `decode.py` is asked and what it answers: options, measured points, table rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What to measure; `steps` is timed decode steps per point, `accuracy` of injected drafts."""

    batches: tuple[int, ...]
    drafts: tuple[int, ...]
    steps: int
    accuracy: float
    temperature: float
    dtype: str
    is_invariant: bool


@dataclass(frozen=True)
class Point:
    """One engine at one batch size. Times are medians in milliseconds, speeds in tokens/s.

    `t_step_1` is a whole plain step, `t_verify` and `t_draft` are the bare passes (main model and
    sampling over k + 1 tokens, MTP module and sampling over 1 token a sequence); `ceiling` is
    AL * t_step_1 / (t_verify + k * t_draft).
    """

    engine: str
    batch: int
    k: int = 0
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    acceptance_length: float = 1.0
    acceptance_rate: float = 0.0
    survival: tuple[float, ...] = ()
    t_step_1_ms: float = 0.0
    t_verify_ms: float = 0.0
    t_draft_ms: float = 0.0
    gain: float = 1.0
    ceiling: float = 1.0
    prefill_tokens_per_s: float = 0.0
    hocket_step_ms: float = 0.0
    """Of transformers' points: Hocket's plain step, taken in turn with theirs."""

    @property
    def share_of_ceiling(self) -> float:
        return self.gain / self.ceiling


HEADER = (
    f"{'engine':13}{'batch':>6}{'k':>3}{'tok/s':>9}{'step ms':>9}{'AL':>6}{'acc':>6}"
    f"{'t_step(1)':>10}{'t_verify':>9}{'t_draft':>8}{'gain':>6}{'ceiling':>8}{'ratio':>6}"
)


def format_point(point: Point) -> str:
    row = (
        f"{point.engine:13}{point.batch:6d}{point.k:3d}{point.tokens_per_s:9.1f}"
        f"{point.step_ms:9.2f}{point.acceptance_length:6.2f}{point.acceptance_rate:6.2f}"
    )
    if point.hocket_step_ms:
        lead = point.step_ms / point.hocket_step_ms
        return f"{row}   hocket in turn: {point.hocket_step_ms:.2f} ms, {lead:.2f}x"
    if point.k == 0:
        return row
    return row + (
        f"{point.t_step_1_ms:10.2f}{point.t_verify_ms:9.2f}{point.t_draft_ms:8.2f}"
        f"{point.gain:6.2f}{point.ceiling:8.2f}{point.share_of_ceiling:6.2f}"
    )
