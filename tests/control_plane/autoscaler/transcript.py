"""Transcripts: lines that begin with "> " are told to the world, the others are what it answered.

    > pools prefill=1 decode=1 start_up_s=120      first; both pools as they are
    > limits min_workers=0 max_workers=8           of both pools; before pools
    > targets ttft_s=2.0 inter_token_s=0.025       before pools
    > world requests_per_s=4 has_metrics=0         any figure of the world
    > operator decode=5                            somebody else writes a size
    > release decode                               and gives it back
    > run 600                                      seconds
    > swing 900 75 8 10                            the same, with requests_per_s 8 and 10 in turn,
                                                   75 s each, beginning with the latter

A window is printed when it is the first or last of a run, or changes a size; of a swing only the
last and those that change a size. To accept new
answers: `python -m tests.control_plane.autoscaler.transcript`, then read the difference.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

from control_plane.autoscaler.decide import Decision
from control_plane.autoscaler.observations import Observations, PoolWorkers
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from tests.control_plane.autoscaler.fluid_world import FluidPool, FluidWorld

FOLDER = Path(__file__).parent / "transcripts"


def replay(text: str) -> tuple[str, FluidWorld]:
    """The transcript with the answers of today, and the world at its end."""
    limits, targets = Limits(up_window_s=0.0), Targets(inter_token_s=0.025)
    world: FluidWorld | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("> "):
            if line.startswith("#"):
                lines.append(line)
            continue
        lines += ["", line] if lines and not lines[-1].startswith("> ") else [line]
        verb, *words = line[2:].split()
        values = {
            name: float(value)
            for name, _, value in (word.partition("=") for word in words)
            if value
        }
        if verb == "limits":
            pool = replace(PoolLimits(), **{name: int(value) for name, value in values.items()})
            limits = replace(limits, prefill=pool, decode=pool)
        elif verb == "calm":
            limits = replace(limits, **values)
        elif verb == "targets":
            targets = replace(targets, **values)
        elif verb == "pools":
            start_up_s = values["start_up_s"]
            prefill, decode = int(values["prefill"]), int(values["decode"])
            world = FluidWorld(
                targets, limits, FluidPool(prefill, start_up_s), FluidPool(decode, start_up_s)
            )
        else:
            assert world is not None, line
            lines += _tell(world, verb, words, values)
    assert world is not None
    return "\n".join(lines) + "\n", world


def _tell(world: FluidWorld, verb: str, words: list[str], values: dict[str, float]) -> list[str]:
    if verb == "world":
        for name, value in values.items():
            assert hasattr(world, name), name
            setattr(world, name, value)
        return []
    if verb == "operator":
        for name, value in values.items():
            getattr(world, name).resize(int(value), by_operator=True)
        return []
    if verb == "release":
        pool: FluidPool = getattr(world, words[0])
        pool.written_size = pool.size
        return []
    assert verb in ("run", "swing"), verb
    windows = round(float(words[0]) / world.window_s)
    lines: list[str] = []
    for number in range(windows):
        if verb == "swing":
            turn = int((number * world.window_s) // float(words[1])) % 2
            world.requests_per_s = float(words[3 - turn])
        before = (world.prefill.size, world.decode.size)
        observations, decision = world.window()
        after = (decision.sizes.prefill, decision.sizes.decode)
        if number == windows - 1 or (number == 0 and verb == "run") or before != after:
            lines += _told(observations, decision)
    return lines


def _told(observations: Observations, decision: Decision) -> list[str]:
    minutes, seconds = divmod(round(observations.now_s), 60)
    pools = f"prefill {_pool(observations.prefill_workers)}, "
    pools += f"decode {_pool(observations.decode_workers)}"
    lines = [f"{minutes}:{seconds:02d}  {pools}"]
    for role in ("prefill", "decode"):
        *why, verdict = (r.text for r in decision.reasons if r.role.value == role)
        text = f"{role} {verdict}: {'; '.join(why)}"
        indent = " " * 6
        lines += textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent + "  ")
    return lines


def _pool(workers: PoolWorkers) -> str:
    text = f"{workers.ready} ready"
    if workers.starting_s:
        text += f" + {len(workers.starting_s)} starting"
    if workers.draining:
        text += f" + {workers.draining} draining"
    return text


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(replay(path.read_text())[0])
