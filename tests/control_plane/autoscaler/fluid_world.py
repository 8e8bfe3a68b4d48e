"""A serving system as a fluid: enough physics to close the autoscaler's loop in a test.

Requests flow through a prefill queue into decode batches; workers take `start_up_s` to load and
`drain_s` to drain. One `window` is one observation, one decision and its execution.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from control_plane.autoscaler.decide import Decision, decide
from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
    StepCurve,
)
from control_plane.autoscaler.policy import Limits, Targets
from control_plane.autoscaler.state import State

CURVE = StepCurve(((1, 0.030), (16, 0.040), (64, 0.100)))
BLOCKS_PER_WORKER = 4096


@dataclass
class FluidPool:
    """Workers that start and drain; what an executor would do."""

    size: int
    start_up_s: float
    drain_s: float = 60.0
    written_size: int = field(init=False)
    starting_s: list[float] = field(default_factory=list[float])
    draining_s: list[float] = field(default_factory=list[float])
    ready: int = 0
    killed_while_starting: int = 0

    def __post_init__(self) -> None:
        self.ready = self.written_size = self.size

    def resize(self, size: int, *, by_operator: bool = False) -> None:
        self.starting_s += [0.0] * (size - self.size)
        for _ in range(self.size - size):
            if self.ready:
                self.ready -= 1
                self.draining_s.append(0.0)
            else:
                self.starting_s.remove(min(self.starting_s))
                self.killed_while_starting += 1
        self.size = size
        if not by_operator:
            self.written_size = size

    def advance(self, seconds: float) -> None:
        older = [age + seconds for age in self.starting_s]
        self.starting_s = [age for age in older if age < self.start_up_s]
        self.ready += len(older) - len(self.starting_s)
        draining = [age + seconds for age in self.draining_s]
        self.draining_s = [age for age in draining if age < self.drain_s]

    def workers(self) -> PoolWorkers:
        return PoolWorkers(
            size=self.size,
            written_size=self.written_size,
            ready=self.ready,
            starting_s=tuple(self.starting_s),
            draining=len(self.draining_s),
            start_up_s=self.start_up_s,
        )


@dataclass
class FluidWorld:
    """Both pools under a load that a test sets."""

    targets: Targets
    limits: Limits
    prefill: FluidPool
    decode: FluidPool
    window_s: float = 15.0
    requests_per_s: float = 0.0
    prompt_tokens: float = 1000.0
    output_tokens: float = 200.0
    tokens_per_s: float = 10_000.0
    tokens_per_step: float = 2.5
    step_overhead_s: float = 0.0
    has_metrics: bool = True
    now_s: float = 0.0
    at_gateway: float = 0.0
    queued: float = 0.0
    handed_over: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    state: State = field(default_factory=State)

    def window(self) -> tuple[Observations, Decision]:
        self.now_s += self.window_s
        self.prefill.advance(self.window_s)
        self.decode.advance(self.window_s)
        observations = self._observe()
        decision = decide(observations, self.targets, self.limits, self.state)
        self.state = decision.state
        for pool, size in (
            (self.prefill, decision.sizes.prefill),
            (self.decode, decision.sizes.decode),
        ):
            if size != pool.size:
                pool.resize(size)
        return observations, decision

    def _observe(self) -> Observations:
        arrived = self.requests_per_s * self.window_s
        prefill = self._run_prefill(arrived)
        decode = self._run_decode()
        arrivals = Arrivals(
            self.window_s,
            arrived,
            arrived * self.prompt_tokens,
            round(self.at_gateway),
            self.output_tokens if self.running else Missing("no request has ended"),
        )
        gone = Missing("the metrics source does not answer")
        return Observations(
            self.now_s,
            self.prefill.workers(),
            self.decode.workers(),
            arrivals if self.has_metrics else gone,
            prefill if self.has_metrics else gone,
            decode if self.has_metrics else gone,
        )

    def _run_prefill(self, arrived: float) -> PrefillLoad:
        self.handed_over = 0.0
        if not (self.prefill.ready and self.decode.ready):
            self.at_gateway += arrived
            return PrefillLoad()
        self.queued += (self.at_gateway + arrived) * self.prompt_tokens
        self.at_gateway = 0.0
        speed = self.prefill.ready * self.tokens_per_s
        done = min(self.queued, speed * self.window_s)
        self.queued -= done
        self.handed_over = done / self.prompt_tokens
        if not done:
            return PrefillLoad()
        ttft_s = self.queued / speed + self.prompt_tokens / self.tokens_per_s
        waiting = round(self.queued / self.prompt_tokens)
        return PrefillLoad(waiting, self.queued, 0.0, self.tokens_per_s, ttft_s)

    def _run_decode(self) -> DecodeLoad:
        ready, most = self.decode.ready, self.targets.max_batch * self.decode.ready
        apart_s = 0.0
        num_steps = round(self.window_s * 2)
        for _ in range(num_steps):
            self.waiting += self.handed_over / num_steps
            joining = min(self.waiting, max(0.0, most - self.running))
            self.waiting -= joining
            self.running += joining
            if self.running and ready:
                step_s = CURVE.step_s(max(1, round(self.running / ready))) + self.step_overhead_s
                apart_s = step_s / self.tokens_per_step
                self.running -= min(self.running, 0.5 * self.running / apart_s / self.output_tokens)
                self.running = self.running if self.running > 0.01 else 0.0
        if not apart_s:
            return DecodeLoad(0, 0, ready * BLOCKS_PER_WORKER, ready * BLOCKS_PER_WORKER)
        blocks = ready * BLOCKS_PER_WORKER
        each = -(-(self.prompt_tokens + self.output_tokens) // 64)
        used = min(blocks, round(self.running * each))
        return DecodeLoad(
            round(self.running),
            round(self.waiting),
            blocks - used,
            blocks,
            each,
            self.tokens_per_step,
            CURVE,
            apart_s,
        )
