"""What `kv_transfer.py` measured: points, and rows of its table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One case over one transport, the ways taken in turn `rounds` times.

    Seconds by way: the median, and the 10th percentile, which other load on the machine hardly
    touches. Ways: `memcpy`; `raw`, one NIXL transfer; `raw_cut`, raw NIXL one TCP message at a time
    (TCP only); `hocket`, a READ per chunk; `whole`, one READ. Hocket's include the fence.
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

    def ratio(self, way: str, ours: str = "hocket", *, quiet: bool = False) -> float:
        """How fast one of ours is beside `way`: above 1 it is faster. 0 where there is no `way`."""
        seconds = self.quiet_s if quiet else self.median_s
        return seconds.get(way, 0.0) / seconds[ours]


HEADER = (
    f"{'':31}{'------ median us ------':^46}{'':7}{'--- / raw ---':^19}{'--- / rule --':^19}\n"
    f"{'via':5}{'blocks':>7}{'KiB each':>9} {'layout':9}{'memcpy':>10}{'raw':>9}{'rule':>9}"
    f"{'chunks':>9}{'whole':>9}{'GB/s':>7}"
    f"{'chunks':>7}{'whole':>6}{'quiet':>6}{'chunks':>7}{'whole':>6}{'quiet':>6}{'/memcpy':>8}"
)


def format_point(point: Point) -> str:
    times = [point.median_s.get(way) for way in ("memcpy", "raw", "raw_cut", "hocket", "whole")]
    widths = (10, 9, 9, 9, 9)
    cells = (
        f"{'-' if seconds is None else format(seconds * 1e6, '.0f'):>{width}}"
        for seconds, width in zip(times, widths, strict=True)
    )
    ratios = [
        (point.ratio(way), point.ratio(way, "whole"), point.ratio(way, "whole", quiet=True))
        for way in ("raw", "raw_cut")
    ]
    shown = "".join(
        f"{format(ratio, '.2f') if ratio else '-':>{width}}"
        for three in ratios
        for ratio, width in zip(three, (7, 6, 6), strict=True)
    )
    return (
        f"{point.transport:5}{point.num_blocks:7d}{point.block_bytes / 1024:9.0f} {point.layout:9}"
        f"{''.join(cells)}{point.gb_per_s:7.2f}{shown}{point.ratio('memcpy'):8.2f}"
    )


@dataclass(frozen=True)
class HandOff:
    """A whole hand-off, tables and Export stream included; medians in seconds.

    Decode's stream was open before the prompt was computed: from `announced`, when the chunk's
    message reached decode's engine, or from `computed`, prefill's last byte, to the publication of
    all blocks. `late`: the prompt waited; from the start of the import, the stream's opening
    included.
    """

    transport: str
    num_blocks: int
    block_bytes: int
    announced_s: float
    computed_s: float
    late_s: float


HAND_OFF_HEADER = (
    f"{'via':5}{'blocks':>7}{'KiB each':>9}{'announced ms':>14}{'computed ms':>13}{'late ms':>9}"
)


def format_hand_off(hand_off: HandOff) -> str:
    return (
        f"{hand_off.transport:5}{hand_off.num_blocks:7d}{hand_off.block_bytes / 1024:9.0f}"
        f"{hand_off.announced_s * 1e3:14.2f}{hand_off.computed_s * 1e3:13.2f}"
        f"{hand_off.late_s * 1e3:9.2f}"
    )
