"""Draws a run of `autoscale.py`: offered load, sizes of both pools, time to first token.

python benchmarks/autoscale_plot.py results/autoscale.json ../docs/images/autoscale.svg
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# Text stays text, and the same run gives the same file.
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "hocket"

from matplotlib import pyplot  # noqa: E402

_COLOURS = {"prefill": "#1f6f8b", "decode": "#5b8c5a"}
_MEDIAN_S = 10.0


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes the plot as SVG."""
    samples, requests = _changes(results["samples"]), results["requests"]
    figure, (load, prefill, decode, first) = pyplot.subplots(
        4, 1, sharex=True, figsize=(8, 7), height_ratios=(1, 1, 1, 1.6), layout="constrained"
    )
    at_s = [sample["at_s"] for sample in samples]
    clients = [sample["clients"] for sample in samples]
    load.fill_between(at_s, clients, step="post", color="#d9d9d9")
    load.set_ylabel("clients")
    _draw_pool(prefill, "prefill", samples)
    _draw_pool(decode, "decode", samples)
    good = [request for request in requests if not request["fault"]]
    asked_s = [request["asked_s"] for request in good]
    ttft_s = [request["ttft_s"] for request in good]
    first.scatter(asked_s, ttft_s, s=7, color="#8a8a8a", alpha=0.6, linewidths=0)
    middles, medians = running_median(good)
    first.plot(middles, medians, color="#333333", label=f"median of {_MEDIAN_S:.0f} s")
    first.set_ylabel("TTFT, s")
    first.set_xlabel("seconds")
    first.legend(loc="upper right", fontsize=8)
    for axes in (load, prefill, decode, first):
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
    failed = len(requests) - len(good)
    figure.suptitle(f"{len(requests)} requests, {failed} failed", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _changes(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples that differ from the one before them, and the last one."""
    kept = samples[:1]
    for sample in samples[1:]:
        if sample | {"at_s": 0} != kept[-1] | {"at_s": 0} or sample is samples[-1]:
            kept.append(sample)
    return kept


def _draw_pool(axes: Any, pool: str, samples: list[dict[str, Any]]) -> None:
    """Workers that are ready, and beside them those that start and those that drain."""
    at_s = [sample["at_s"] for sample in samples]
    size, ready, _, draining = zip(*(sample[pool] for sample in samples), strict=True)
    leaving = [number + more for number, more in zip(ready, draining, strict=True)]
    axes.fill_between(at_s, ready, leaving, step="post", color="#e8b4a8", label="draining")
    axes.fill_between(at_s, ready, step="post", color=_COLOURS[pool], alpha=0.8, label="ready")
    axes.step(at_s, size, where="post", color="#333333", linestyle=":", label="asked for")
    axes.set_ylabel(pool)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower center", ncols=3, fontsize=8)


def running_median(requests: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The median TTFT of the requests asked in each stretch of time, and the stretches' middles."""
    by_stretch: dict[int, list[float]] = {}
    for request in requests:
        by_stretch.setdefault(int(request["asked_s"] // _MEDIAN_S), []).append(request["ttft_s"])
    stretches = sorted(by_stretch)
    middles = [(stretch + 0.5) * _MEDIAN_S for stretch in stretches]
    return middles, [statistics.median(by_stretch[stretch]) for stretch in stretches]


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
