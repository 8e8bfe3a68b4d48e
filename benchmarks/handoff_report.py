"""What `handoff.py` measured: waits, READs, and rows of its tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """One request. Seconds: from its start to its first token (`prefill_s`), from the first token
    to the second (`second_s`), and the median step of decode after that (`step_s`)."""

    transport: str
    mode: str
    prompt_tokens: int
    prefill_s: float
    second_s: float
    step_s: float

    @property
    def added_s(self) -> float:
        """What the hand-off adds between the first token and the second."""
        return self.second_s - self.step_s

    @property
    def share(self) -> float:
        """Of the prefill's time."""
        return self.added_s / self.prefill_s


@dataclass(frozen=True)
class WaitPoint:
    """All requests of one length in one mode over one transport; medians."""

    transport: str
    mode: str
    prompt_tokens: int
    rounds: int
    prefill_s: float
    second_s: float
    step_s: float
    added_s: float
    share: float


def wait_points(waits: Sequence[Wait]) -> list[WaitPoint]:
    """In the order in which the cases came first."""
    cases = dict.fromkeys((w.transport, w.mode, w.prompt_tokens) for w in waits)
    points: list[WaitPoint] = []
    for case in cases:
        same = [w for w in waits if (w.transport, w.mode, w.prompt_tokens) == case]
        points.append(
            WaitPoint(
                *case,
                rounds=len(same),
                prefill_s=statistics.median(w.prefill_s for w in same),
                second_s=statistics.median(w.second_s for w in same),
                step_s=statistics.median(w.step_s for w in same),
                added_s=statistics.median(w.added_s for w in same),
                share=statistics.median(w.share for w in same),
            )
        )
    return points


WAIT_HEADER = (
    f"{'via':5}{'tokens':>7} {'mode':10}{'rounds':>7}{'prefill ms':>12}{'1st-2nd ms':>12}"
    f"{'step ms':>9}{'added ms':>10}{'/ prefill':>11}"
)


def format_wait(point: WaitPoint) -> str:
    return (
        f"{point.transport:5}{point.prompt_tokens:7} {point.mode:10}{point.rounds:7}"
        f"{point.prefill_s * 1e3:12.1f}{point.second_s * 1e3:12.2f}{point.step_s * 1e3:9.2f}"
        f"{point.added_s * 1e3:10.2f}{point.share:11.2%}"
    )


@dataclass(frozen=True)
class ReadPoint:
    """The READ of one hand-off over one transport; the ways taken in turn `rounds` times.

    Median and 10th percentile (`quiet_s`) of seconds by way. `memcpy`; `raw`: one plain NIXL
    transfer; `raw_cut`: plain NIXL one TCP message at a time (TCP only); `bare` and `fenced`: our
    agent, the posting thread polls, without and with the READ of the epoch; `hocket`: our importer,
    with its thread and its fence; `checked`: the same, and every block's checksum is compared;
    `sums`: the exporter's part of that, computing them.
    """

    transport: str
    num_blocks: int
    block_bytes: int
    layout: str
    rounds: int
    median_s: dict[str, float]
    quiet_s: dict[str, float]

    @property
    def gb_per_s(self) -> float:
        return self.num_blocks * self.block_bytes / self.median_s["hocket"] / 1e9

    def ratio(self, way: str, *, quiet: bool = False) -> float:
        """How fast ours is beside `way`: above 1 it is faster; 0 where there is no such way."""
        seconds = self.quiet_s if quiet else self.median_s
        return seconds.get(way, 0.0) / seconds["hocket"]

    def cost(self, way: str, beside: str) -> float:
        """What `way` takes more than `beside`, in seconds."""
        return self.quiet_s[way] - self.quiet_s[beside]


READ_HEADER = (
    f"{'via':5}{'blocks':>7}{'MiB':>7} {'layout':10}{'GB/s':>6}{'/memcpy':>9}{'/raw':>6}"
    f"{'quiet':>7}{'/rule':>7}{'quiet':>7}{'fence us':>10}{'of READ':>9}{'verify us':>11}"
    f"{'of READ':>9}{'sums us':>9}"
)


def format_read(point: ReadPoint) -> str:
    whole = point.quiet_s["hocket"]
    fence_s, check_s = point.cost("fenced", "bare"), point.cost("checked", "hocket")
    rule = [point.ratio("raw_cut"), point.ratio("raw_cut", quiet=True)]
    shown = "".join(f"{format(ratio, '.2f') if ratio else '-':>7}" for ratio in rule)
    mib = point.num_blocks * point.block_bytes / 2**20
    return (
        f"{point.transport:5}{point.num_blocks:7}{mib:7.1f} {point.layout:10}"
        f"{point.gb_per_s:6.2f}{point.ratio('memcpy'):9.2f}{point.ratio('raw'):6.2f}"
        f"{point.ratio('raw', quiet=True):7.2f}{shown}{fence_s * 1e6:10.0f}{fence_s / whole:9.1%}"
        f"{check_s * 1e6:11.0f}{check_s / whole:9.1%}{point.quiet_s['sums'] * 1e6:9.0f}"
    )
