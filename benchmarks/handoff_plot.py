"""Draws a run of `handoff.py`: what a hand-off adds to the wait for the second token.

python benchmarks/handoff_plot.py results/handoff.json ../docs/images/handoff.svg
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

_COLOURS = {"streaming": "#1f6f8b", "whole": "#e8876a"}
_LABELS = {"streaming": "blocks cross meanwhile", "whole": "all cross at the end"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes the plot as SVG: one panel per transport."""
    transports = list(dict.fromkeys(point["transport"] for point in results["waits"]))
    figure, panels = pyplot.subplots(
        1, len(transports), sharey=True, squeeze=False, figsize=(8, 3.4), layout="constrained"
    )
    tokens = sorted({point["prompt_tokens"] for point in results["waits"]})
    for axes, transport in zip(panels[0], transports, strict=True):
        for mode, colour in _COLOURS.items():
            points = [
                point
                for point in results["waits"]
                if (point["transport"], point["mode"]) == (transport, mode)
            ]
            added_ms = {point["prompt_tokens"]: point["added_s"] * 1e3 for point in points}
            axes.plot(
                *zip(*sorted(added_ms.items()), strict=True),
                marker="o",
                color=colour,
                label=_LABELS[mode],
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in tokens])
        axes.set_title(transport, fontsize=10)
        axes.set_xlabel("prompt tokens")
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("added before the 2nd token, ms")
    panels[0][0].legend(loc="upper left", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
