"""A decode worker in simulated time: requests that keep drafts with known chances, passes of known
cost. Enough to close the draft controller's loop in a test.

The work is fixed: a number of requests with their texts. Whether a token can be guessed at depth d
is drawn per request and token, so every policy meets the same luck, and throughputs compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hocket.scheduling.draft_controller import DraftController, DraftPolicy, DraftRequest
from hocket.scheduling.step_costs import StepCosts
from hocket.scheduling.survival import AcceptancePrior
from hocket.types import RequestKey

MAX_PENDING = 16
Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    """Flat as long as reading weights takes longest; in units of one main pass at one row."""
    return max(1.0, 0.7 + 0.3 * rows / 16)


def compute_bound(rows: int) -> float:
    return 0.2 + 0.1 * rows


def mtp(rows: int) -> float:
    """One layer of many."""
    return 0.06 + 0.001 * rows


@dataclass(frozen=True)
class World:
    """`chances(serial, token)`: conditional acceptance by depth of that request at that token.
    `batch(progress)`: requests at once. `slow_down(progress)`: factor on every cost."""

    chances: Callable[[int, float], tuple[float, ...]]
    verify: Cost
    draft: Cost = mtp
    # `measured(rows)`: factor by which start-up was wrong.
    batch: Callable[[float], int] = lambda progress: 8
    slow_down: Callable[[float], float] = lambda progress: 1.0
    num_tokens: int = 6000
    output_tokens: int = 150
    noise: float = 0.05
    hiccups: float = 0.002
    unit_s: float = 0.020
    measured: Callable[[int], float] = lambda rows: 1.0


@dataclass
class _Running:
    serial: int
    luck: list[float]
    position: int = 0
    pending_rows: int = 1
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = RequestKey(str(self.serial))

    @property
    def due_rows(self) -> int:
        return self.pending_rows if self.pending_rows >= MAX_PENDING else 0


@dataclass
class Run:
    """What came of it."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafts: list[int] = field(default_factory=list[int])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def simulate(world: World, policy: DraftPolicy, prior: AcceptancePrior | None = None) -> Run:
    """The whole work under one policy."""
    points = [
        (rows, world.unit_s * world.measured(rows))
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)
    ]
    costs = StepCosts.from_points(
        [(rows, unit * world.draft(rows)) for rows, unit in points],
        [(rows, unit * world.verify(rows)) for rows, unit in points],
    )
    controller = DraftController(policy, costs, prior)
    chance = random.Random(7)
    run = Run()
    running: list[_Running] = []
    num_begun = 0
    while run.tokens < world.num_tokens:
        progress = run.tokens / world.num_tokens
        while len(running) < world.batch(progress):
            draw = random.Random(num_begun)
            length = max(2, round(world.output_tokens * draw.uniform(0.5, 1.5)))
            running.append(_Running(num_begun, [draw.random() for _ in range(length)]))
            num_begun += 1
        _step(world, controller, running, run, chance)
        for request in [r for r in running if r.position >= len(r.luck)]:
            controller.forget(request.key)
            running.remove(request)
    return run


def _step(
    world: World,
    controller: DraftController,
    running: list[_Running],
    run: Run,
    chance: random.Random,
) -> None:
    progress = run.tokens / world.num_tokens
    drafts = controller.allot(
        [DraftRequest(r.key, len(r.luck) - r.position - 1, r.due_rows) for r in running]
    )
    first = [r for r, k in zip(running, drafts, strict=True) if k or r.due_rows]
    draft_rows = [sum(r.pending_rows for r in first)] if first else []
    draft_rows += [sum(k > depth for k in drafts) for depth in range(1, max(drafts))]
    verify_rows = len(running) + sum(drafts)
    unit_s = world.unit_s * world.slow_down(progress)
    draft_s = unit_s * sum(world.draft(rows) for rows in draft_rows)
    verify_s = unit_s * world.verify(verify_rows)
    # The controller sees noise; it is not counted, so that it does not decide between policies.
    noise = chance.uniform(1 - world.noise, 1 + world.noise)
    noise *= 10 if chance.random() < world.hiccups else 1
    controller.observe_step(draft_rows, noise * draft_s, verify_rows, noise * verify_s)

    for r in first:
        r.pending_rows = 0
    for r, num_drafted in zip(running, drafts, strict=True):
        chances = world.chances(r.serial, progress)
        accepted = 0
        while accepted < num_drafted and r.luck[r.position + accepted] < chances[accepted]:
            accepted += 1
        controller.observe(r.key, num_drafted, accepted)
        r.position += accepted + 1
        r.pending_rows += accepted + 1
        run.tokens += accepted + 1
    run.seconds += draft_s + verify_s
    run.steps += 1
    run.drafts.append(sum(drafts))
