"""A decode worker in simulated time: requests that keep drafts with known chances, passes of known
cost. Enough to close the draft controller's loop in a test.

Whether a token can be guessed at depth d is drawn per request and token, so all policies meet the
same luck, and over the same work (`simulate`) their throughputs compare.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hocket.scheduling.draft_controller import (
    DraftBatch,
    DraftController,
    DraftPolicy,
    DraftRequest,
)
from hocket.scheduling.step_costs import StepCosts, StepTimes
from hocket.types import RequestKey

MOST_PENDING = 16
UNIT_S = 0.020
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)

# Conditional acceptance by depth.
Chances = tuple[float, ...]
# Of one pass by its rows, in units of a verify pass with one.
Cost = Callable[[int], float]


def memory_bound(rows: int) -> float:
    """Flat as long as reading the weights takes longest: up to 16 rows."""
    return max(1.0, 0.7 + 0.3 * rows / 16)


def compute_bound(rows: int) -> float:
    return 0.2 + 0.1 * rows


def one_layer(rows: int) -> float:
    """An MTP module beside a deep model."""
    return 0.06 + 0.001 * rows


def batch_of(requests: Sequence[tuple[RequestKey, DraftRequest]]) -> DraftBatch:
    return DraftBatch([key for key, _ in requests], lambda place: requests[place][1])


@dataclass
class SimulatedRequest:
    """Has `num_tokens` to emit, and luck with each."""

    serial: int
    chances: Callable[[float], Chances]
    num_tokens: int
    pending_rows: int = 1
    position: int = 0
    num_drafts: int = 0
    key: RequestKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = RequestKey(str(self.serial))
        self._draw = random.Random(self.serial)
        self._luck: list[float] = []

    @property
    def has_ended(self) -> bool:
        return self.position >= self.num_tokens

    @property
    def cap(self) -> int:
        return self.num_tokens - self.position - 1

    def verify(self, num_drafts: int, progress: float) -> int:
        """Advances by one step; the drafts that were accepted."""
        while len(self._luck) < self.position + num_drafts:
            self._luck.append(self._draw.random())
        chances, accepted = self.chances(progress), 0
        while accepted < num_drafts and self._luck[self.position + accepted] < chances[accepted]:
            accepted += 1
        self.pending_rows = (0 if num_drafts else self.pending_rows) + accepted + 1
        if self.pending_rows > MOST_PENDING:
            self.pending_rows = max(MOST_PENDING // 2, accepted + 1)
        self.position += accepted + 1
        self.num_drafts += num_drafts
        return accepted


class SimulatedWorker:
    """Its controller sees each step's time with some noise; `seconds` is without, so that luck with
    noise does not decide between policies. `slow_down` is a factor on all times."""

    def __init__(
        self,
        policy: DraftPolicy,
        verify: Cost,
        draft: Cost = one_layer,
        noise: float = 0.0,
        hiccups: float = 0.0,
        mismeasured: Cost = lambda rows: 1.0,
    ) -> None:
        self._verify, self._draft = verify, draft
        self._noise, self._hiccups = noise, hiccups
        points = [(rows, UNIT_S * mismeasured(rows)) for rows in ROWS]
        costs = StepCosts.from_points(
            [(rows, unit_s * draft(rows)) for rows, unit_s in points],
            [(rows, unit_s * verify(rows)) for rows, unit_s in points],
        )
        self.controller = DraftController(policy, costs)
        self.running: list[SimulatedRequest] = []
        self.slow_down = 1.0
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self._draw = random.Random(7)

    def step(self, progress: float = 0.0) -> None:
        requests = self.running
        drafts = self.controller.allot(
            batch_of([(r.key, DraftRequest(r.cap, r.pending_rows)) for r in requests])
        )
        waiting = sum(r.pending_rows for r, k in zip(requests, drafts, strict=True) if k)
        draft_rows = [waiting] if waiting else []
        draft_rows += [sum(k > depth for k in drafts) for depth in range(1, max(drafts))]
        verify_rows = len(requests) + sum(drafts)
        unit_s = UNIT_S * self.slow_down
        draft_s = unit_s * sum(map(self._draft, draft_rows))
        verify_s = unit_s * self._verify(verify_rows)
        noise = self._draw.uniform(1.0 - self._noise, 1.0 + self._noise)
        noise *= 10.0 if self._draw.random() < self._hiccups else 1.0
        measured_s = (noise * draft_s, noise * verify_s)
        times = StepTimes(draft_rows, measured_s[0], verify_rows, measured_s[1], len(requests))
        self.controller.observe_step(times)
        for request, num_drafts in zip(requests, drafts, strict=True):
            accepted = request.verify(num_drafts, progress)
            self.controller.observe(request.key, num_drafts, accepted)
            self.tokens += accepted + 1
            if request.has_ended:
                self.controller.forget(request.key)
        self.running = [r for r in requests if not r.has_ended]
        self.seconds += draft_s + verify_s
        self.steps += 1


@dataclass(frozen=True)
class World:
    """What is the same for all policies. `chances(serial, progress)` of a request at that share of
    the work, `batch(progress)` requests at once, `slow_down(progress)`; the rest as above."""

    chances: Callable[[int, float], Chances]
    verify: Cost
    draft: Cost = one_layer
    batch: Callable[[float], int] = lambda progress: 8
    slow_down: Callable[[float], float] = lambda progress: 1.0
    mismeasured: Cost = lambda rows: 1.0
    num_tokens: int = 6000
    noise: float = 0.05
    hiccups: float = 0.002


def simulate(world: World, policy: DraftPolicy) -> SimulatedWorker:
    """The worker after all work was done under one policy."""
    worker = SimulatedWorker(
        policy, world.verify, world.draft, world.noise, world.hiccups, world.mismeasured
    )
    num_begun = 0
    while worker.tokens < world.num_tokens:
        progress = worker.tokens / world.num_tokens
        while len(worker.running) < world.batch(progress):
            length = random.Random(num_begun).randint(75, 225)
            chances = _of_request(world, num_begun)
            worker.running.append(SimulatedRequest(num_begun, chances, length))
            num_begun += 1
        worker.slow_down = world.slow_down(progress)
        worker.step(progress)
    return worker


def _of_request(world: World, serial: int) -> Callable[[float], Chances]:
    return lambda progress: world.chances(serial, progress)
