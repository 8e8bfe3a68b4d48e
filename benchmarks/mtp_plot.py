"""Draws a run of `mtp.py`: tokens per second by batch, for each k and for as many as pay.

python benchmarks/mtp_plot.py results/mtp.json ../docs/images/mtp.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# Text stays text, and the same run gives the same file.
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "hocket"

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import NullFormatter, StrMethodFormatter  # noqa: E402

_CONSTANTS = pyplot.get_cmap("GnBu")
_ADAPTIVE = "#d1495b"


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes the plot as SVG: a column per workload, tokens/s above, gains over k = 0 below; of the
    lowest temperature that was measured."""
    temperature = min(point["temperature"] for point in results["points"])
    points = [point for point in results["points"] if point["temperature"] == temperature]
    workloads = list(dict.fromkeys(point["workload"] for point in points))
    figure, panels = pyplot.subplots(
        2,
        len(workloads),
        squeeze=False,
        sharex="col",
        figsize=(1.5 + 2.6 * len(workloads), 5.2),
        layout="constrained",
    )
    for column, workload in enumerate(workloads):
        own = [point for point in points if point["workload"] == workload]
        for axes, quantity in zip(panels[:, column], ("tokens_per_s", "gain"), strict=True):
            _draw_panel(axes, own, quantity)
        panels[0][column].set_yscale("log")
        panels[0][column].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panels[0][column].yaxis.set_minor_formatter(NullFormatter())
        title = f"{workload}\n(synthetic drafts)" if own[0]["is_synthetic"] else f"{workload}\n"
        panels[0][column].set_title(title, fontsize=10)
        panels[1][column].set_xlabel("batch")
    panels[0][0].set_ylabel("tokens/s")
    panels[1][0].set_ylabel("gain over k = 0")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"temperature {temperature:g}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_panel(axes: Axes, points: list[dict[str, Any]], quantity: str) -> None:
    batches = [point["batch"] for point in points]
    variants = [row["variant"] for row in points[0]["rows"]]
    for index, variant in enumerate(variants):
        values = [point["rows"][index][quantity] for point in points]
        if index == 0:
            axes.plot(batches, values, color="#888888", linestyle="--", label=variant)
        elif index < len(variants) - 1:
            colour = _CONSTANTS(0.35 + 0.65 * index / (len(variants) - 2))
            axes.plot(batches, values, color=colour, marker="o", markersize=2.5, label=variant)
        else:
            axes.plot(batches, values, color=_ADAPTIVE, linewidth=2, marker="o", label=variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
