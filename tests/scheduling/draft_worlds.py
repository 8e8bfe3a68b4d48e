"""Worlds in which adaptive drafts are compared with every constant number of them.

`python -m tests.scheduling.draft_worlds` prints, for each, the best constant number and the
throughput of adaptive drafts relative to it and to no drafts, learning included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hocket.scheduling.draft_controller import DraftPolicy
from tests.scheduling.draft_world import Chances, World, compute_bound, memory_bound, simulate

MAX_DRAFTS = 4
EASY: Chances = (0.9, 0.85, 0.82, 0.8)
USUAL: Chances = (0.75, 0.65, 0.6, 0.55)
HARD: Chances = (0.3, 0.2, 0.1, 0.1)
NEVER: Chances = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Comparison:
    """Throughputs over the whole run; `constant[k]` that of k drafts for everyone."""

    adaptive: float
    constant: tuple[float, ...]

    @property
    def to_best(self) -> float:
        return self.adaptive / max(self.constant)

    @property
    def to_none(self) -> float:
        return self.adaptive / self.constant[0]


def compare(world: World) -> Comparison:
    def tokens_per_s(policy: DraftPolicy) -> float:
        worker = simulate(world, policy)
        return worker.tokens / worker.seconds

    numbers = range(MAX_DRAFTS + 1)
    constant = [tokens_per_s(DraftPolicy(number, adaptive=False)) for number in numbers]
    return Comparison(tokens_per_s(DraftPolicy(MAX_DRAFTS)), tuple(constant))


def _slow_then_normal(progress: float) -> float:
    return 2.0 if 0.3 < progress < 0.6 else 1.0


def _of(batch: int) -> Callable[[float], int]:
    return lambda progress: batch


def _every(chances: Chances) -> Callable[[int, float], Chances]:
    return lambda serial, progress: chances


TEXTS: dict[str, Callable[[int, float], Chances]] = {
    "easy": _every(EASY),
    "usual": _every(USUAL),
    "useless": _every(NEVER),
    "mixed": lambda serial, progress: EASY if serial % 2 else HARD,
    "hard_then_easy": lambda serial, progress: HARD if progress < 0.5 else EASY,
    "easy_then_hard": lambda serial, progress: EASY if progress < 0.5 else HARD,
}
COSTS = {"memory": memory_bound, "compute": compute_bound}
NUM_TOKENS = {1: 2_000, 8: 8_000, 64: 30_000}


def _worlds() -> dict[str, World]:
    worlds: dict[str, World] = {}
    for bound, verify in COSTS.items():
        for text, chances in TEXTS.items():
            for batch, num_tokens in NUM_TOKENS.items():
                world = World(chances, verify, batch=_of(batch), num_tokens=num_tokens)
                worlds[f"{bound}-{text}-{batch}"] = world
        grows = World(
            TEXTS["usual"],
            verify,
            batch=lambda progress: max(1, round(64 ** (1 - abs(2 * progress - 1)))),
            num_tokens=12_000,
        )
        worlds[f"{bound}-usual-1_to_64_to_1"] = grows
    for batch in (8, 64):
        usual, mixed = (worlds[f"memory-{text}-{batch}"] for text in ("usual", "mixed"))
        worlds[f"slow_for_a_while-{batch}"] = replace(mixed, slow_down=_slow_then_normal)
        worlds[f"ever_slower-{batch}"] = replace(usual, slow_down=lambda progress: 1 + progress)
        worlds[f"noisy-{batch}"] = replace(usual, noise=0.2, hiccups=0.02)
    return worlds


WORLDS = _worlds()


if __name__ == "__main__":
    for name, world in WORLDS.items():
        found = compare(world)
        best = found.constant.index(max(found.constant))
        print(f"{name:28} k={best}  best {found.to_best:.3f}  none {found.to_none:.3f}", flush=True)
