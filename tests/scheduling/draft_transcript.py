"""Transcripts of draft decisions: lines that begin with "> " are told to a simulated worker, the
others say what its controller decided.

    > worker max_drafts=4 verify=memory draft=layer target=2:60      first, or to begin again;
                                       with k=3 instead of max_drafts: not adaptive
    > join chat 8 0.8,0.7,0.6            eight requests, with their acceptance by position
    > text chat 0.1                      from now on theirs is this
    > leave chat
    > slow_down 2                        all passes take twice as long
    > run 100 20                         steps, and how many of them make a line of the answer

A line has the steps, the mean drafts per step and request of each kind, tokens per second and the
steps that were probes. To accept new answers: `python -m tests.scheduling.draft_transcript`, then
read the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hocket.scheduling.draft_controller import DraftPolicy, SpeedTarget
from tests.scheduling.draft_world import (
    Chances,
    Cost,
    SimulatedRequest,
    SimulatedWorker,
    memory_bound,
    one_layer,
)

FOLDER = Path(__file__).parent / "draft_transcripts"
COSTS: dict[str, Cost] = {
    "memory": memory_bound,
    "layer": one_layer,
    "linear": lambda rows: 0.6 + 0.05 * rows,
    "dear": lambda rows: 0.5,
}


@dataclass
class Kind:
    """Requests with the same chances."""

    chances: Chances
    requests: list[SimulatedRequest] = field(default_factory=list[SimulatedRequest])

    def now(self, progress: float) -> Chances:
        return self.chances


class Story:
    """One worker and what is told to it."""

    def __init__(self) -> None:
        self._worker: SimulatedWorker | None = None
        self._kinds: dict[str, Kind] = {}
        self._num_joined = 0

    def tell(self, verb: str, *words: str) -> list[str]:
        """What it answers."""
        return getattr(self, f"_{verb}")(*words) or []

    def _worker_of(self) -> SimulatedWorker:
        assert self._worker is not None, "a story begins with a worker"
        return self._worker

    def _worker_is(self, *words: str) -> None:
        values = dict(word.split("=") for word in words if not word.startswith("target="))
        targets = [word.removeprefix("target=").split(":") for word in words if ":" in word]
        policy = DraftPolicy(
            int(values.get("k", values.get("max_drafts", 4))),
            adaptive="k" not in values,
            targets=tuple(SpeedTarget(int(most), float(speed)) for most, speed in targets),
        )
        verify, draft = COSTS[values["verify"]], COSTS[values.get("draft", "layer")]
        self._worker = SimulatedWorker(policy, verify, draft)
        self._kinds.clear()
        self._num_joined = 0

    def _join(self, name: str, number: str, chances: str) -> None:
        kind = self._kinds.setdefault(name, Kind(_chances(chances)))
        for _ in range(int(number)):
            self._num_joined += 1
            kind.requests.append(SimulatedRequest(self._num_joined, kind.now, 10**6))
        self._worker_of().running += kind.requests[-int(number) :]

    def _text(self, name: str, chances: str) -> None:
        self._kinds[name].chances = _chances(chances)

    def _leave(self, name: str) -> None:
        worker, kind = self._worker_of(), self._kinds.pop(name)
        for request in kind.requests:
            worker.controller.forget(request.key)
        worker.running = [r for r in worker.running if r not in kind.requests]

    def _slow_down(self, factor: str) -> None:
        self._worker_of().slow_down = float(factor)

    def _run(self, steps: str, per_line: str) -> list[str]:
        worker = self._worker_of()
        lines: list[str] = []
        for first in range(0, int(steps), int(per_line)):
            num_steps = min(int(per_line), int(steps) - first)
            tokens, seconds = worker.tokens, worker.seconds
            probes = worker.controller.snapshot().probes
            before = {name: _drafts(kind) for name, kind in self._kinds.items()}
            for _ in range(num_steps):
                worker.step()
            shares = [
                f"{name} {(_drafts(kind) - before[name]) / num_steps / len(kind.requests):.1f}"
                for name, kind in self._kinds.items()
            ]
            speed = (worker.tokens - tokens) / (worker.seconds - seconds)
            span = f"{worker.steps - num_steps + 1}-{worker.steps}"
            line = f"{span:>9}  {'  '.join(shares)}  {speed:.0f} tokens/s"
            probes = worker.controller.snapshot().probes - probes
            lines.append(line + (f", {probes} probes" if probes > 1 else ", a probe" * probes))
        return lines


def replay(text: str) -> str:
    """The transcript with the answers of today."""
    story = Story()
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith(("#", "> ")):
            continue
        if lines and lines[-1][0] != line[0]:
            lines.append("")
        lines.append(line)
        if line.startswith("> "):
            verb, *words = line[2:].split()
            lines += story.tell("worker_is" if verb == "worker" else verb, *words)
    return "\n".join(lines) + "\n"


def _drafts(kind: Kind) -> int:
    return sum(request.num_drafts for request in kind.requests)


def _chances(text: str) -> Chances:
    """The last one holds for all further positions."""
    chances = [float(word) for word in text.split(",")]
    return tuple(chances + chances[-1:] * (8 - len(chances)))


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(replay(path.read_text()))
