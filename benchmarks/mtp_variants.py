"""What `mtp.py` compares: the same requests, decoded with k drafts a step or as many as pay.

Every variant has a runner, a cache and sequences of its own, over one model. A pass decodes the
same tokens of each request in a closed loop: a seat of the batch whose request is through goes to
the next one, and when none waits, to the same one again, uncounted, so that the batch stays full to
the end. Then tokens/s = batch x tokens of a request / mean time that a request has a seat.

Outputs are exact, so a pass can be repeated step by step. The first one decides the drafts, later
ones replay them, and each step counts with the median of its times.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter

from decode import time_draft_pass, time_main_pass
from torch import Tensor

from hocket.execution.model_runner import DecodeOutput, ModelRunner
from hocket.execution.sequence import NO_GAP
from hocket.execution.sequence import Sequence as RunningSequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.scheduling.draft_controller import DraftBatch, DraftController, DraftRequest
from hocket.types import DraftCounts, RequestKey

STEPS_PER_BARE_PASS = 3
LEARNING_S = 3.0


@dataclass(frozen=True)
class Beginning:
    """A sequence behind its prompt, to come back to."""

    token_ids: tuple[int, ...]
    num_computed: int
    hidden_RH: Tensor
    num_context: int

    @staticmethod
    def of(sequence: RunningSequence) -> Beginning:
        rows = sequence.waiting
        return Beginning(
            tuple(sequence.token_ids), sequence.num_computed, rows.joined(), rows.num_context
        )

    def restore(self, sequence: RunningSequence) -> None:
        sequence.token_ids = list(self.token_ids)
        sequence.num_computed = self.num_computed
        sequence.waiting = WaitingRows(self.hidden_RH, self.num_context)
        sequence.gap = NO_GAP


@dataclass(frozen=True)
class Span:
    """What is timed: `tokens_each` tokens of each request, `batch` requests at a time."""

    batch: int
    tokens_each: int
    num_requests: int


@dataclass
class Seat:
    """A place in the batch and who has it. Not `is_counted`: again, only to fill the batch."""

    sequence: RunningSequence
    beginning: Beginning
    is_counted: bool = True
    num_done: int = 0


@dataclass
class Step:
    """`plan`: drafts by seat. `seats`: how many of them are counted; where a request ends, the
    part of the step's tokens that it still needed. `seconds`: by pass."""

    plan: list[int]
    seats: float = 0.0
    seconds: list[float] = field(default_factory=list[float])


class Variant:
    """`k` drafts a step; None: what `controller` allots, up to its policy's most."""

    def __init__(
        self,
        runner: ModelRunner,
        sequences: Sequence[RunningSequence],
        span: Span,
        k: int | None,
        controller: DraftController | None = None,
    ) -> None:
        """The sequences are behind their prompts."""
        assert (k is None) == (controller is not None), k
        self.k = k
        self.outputs: dict[RequestKey, tuple[int, ...]] = {}
        self.counts = DraftCounts()
        self.steps: list[Step] = []
        self.decide_s: list[float] = []
        self.verify_s: list[float] = []
        self.draft_s: list[float] = []
        self._runner = runner
        self._all = [(sequence, Beginning.of(sequence)) for sequence in sequences]
        self._span = span
        self._controller = controller
        self._num_steps = 0
        self._waiting = iter(self._all)
        self._seats: list[Seat] = []

    @property
    def is_done(self) -> bool:
        """Whether this pass is."""
        return not any(seat.is_counted for seat in self._seats)

    @property
    def progress(self) -> int:
        """Tokens that this pass has counted."""
        done = sum(seat.num_done * self._span.tokens_each for seat in self._seats)
        return done + sum(self._emitted(seat) for seat in self._seats if seat.is_counted)

    @property
    def num_steps(self) -> float:
        """That the mean request took; its last one in part."""
        return sum(step.seats for step in self.steps) / self._span.num_requests

    @property
    def step_s(self) -> float:
        """Of the mean step."""
        return self.seconds() * self._span.batch / sum(step.seats for step in self.steps)

    def seconds(self, number: int | None = None) -> float:
        """That all counted tokens took: in pass `number`, None: by each step's median. With the
        controller's time, by its mean: most steps keep a plan, some make one."""
        decide_s = statistics.fmean(self.decide_s) if self.decide_s else 0.0
        return sum(
            step.seats / self._span.batch * (decide_s + _chosen(step.seconds, number))
            for step in self.steps
        )

    def begin_pass(self) -> None:
        self._num_steps = 0
        self._waiting = iter(self._all)
        self._seats = []
        for request in islice(self._waiting, self._span.batch):
            self._seats.append(Seat(*request))
            self._begin(self._seats[-1])

    def warm_up(self) -> None:
        """A step and its bare passes. With a controller passes for `LEARNING_S`: it learns while a
        worker serves, not in the few steps that a pass has."""
        self.begin_pass()
        self._runner.decode([seat.sequence for seat in self._seats], self._most_drafts())
        if self._controller is not None:
            started = perf_counter()
            while perf_counter() - started < LEARNING_S:
                self.steps = []
                self.begin_pass()
                while not self.is_done:
                    self.take_step()
            self.steps, self.decide_s, self.counts = [], [], DraftCounts()
        self._time_bare_passes()
        self.verify_s, self.draft_s = [], []

    def take_step(self) -> None:
        """The next step of this pass; now and then the bare passes behind it."""
        is_first_pass = self._num_steps == len(self.steps)
        if is_first_pass:
            self.steps.append(Step(self._decide()))
        step = self.steps[self._num_steps]
        self._num_steps += 1
        sequences = [seat.sequence for seat in self._seats]
        started = perf_counter()
        outputs = self._runner.decode(sequences, step.plan)
        step.seconds.append(perf_counter() - started)
        if is_first_pass:
            self._learn(outputs)
            self._count(step, outputs)
        if self._num_steps % STEPS_PER_BARE_PASS == 0:
            self._time_bare_passes()
        for seat in self._seats:
            if self._emitted(seat) >= self._span.tokens_each:
                self._end(seat)

    def _most_drafts(self) -> list[int]:
        most = self._controller.policy.max_drafts if self._controller else self.k
        return [most or 0] * self._span.batch

    def _decide(self) -> list[int]:
        if self._controller is None:
            return self._most_drafts()
        started = perf_counter()
        keys = [seat.sequence.key for seat in self._seats]
        plan = self._controller.allot(DraftBatch(keys, self._describe))
        self.decide_s.append(perf_counter() - started)
        return plan

    def _describe(self, place: int) -> DraftRequest:
        assert self._controller is not None
        most = self._controller.policy.max_drafts
        return self._runner.draft_request(self._seats[place].sequence, most)

    def _learn(self, outputs: Sequence[DecodeOutput]) -> None:
        if self._controller is None:
            return
        started = perf_counter()
        times = self._runner.last_step
        assert times is not None, "a step that worked"
        self._controller.observe_step(times)
        for seat, output in zip(self._seats, outputs, strict=True):
            self._controller.observe(seat.sequence.key, output.num_drafted, output.num_accepted)
        self.decide_s[-1] += perf_counter() - started

    def _count(self, step: Step, outputs: Sequence[DecodeOutput]) -> None:
        for seat, output in zip(self._seats, outputs, strict=True):
            if seat.is_counted:
                emitted = len(output.token_ids)
                too_many = max(0, self._emitted(seat) - self._span.tokens_each)
                step.seats += 1.0 - too_many / emitted
                self.counts = self.counts.add_step(output.num_drafted, output.num_accepted, emitted)

    def _time_bare_passes(self) -> None:
        """Main pass over k + 1 tokens and draft pass over one token of each sequence."""
        if self.k:
            sequences = [seat.sequence for seat in self._seats]
            self.verify_s.append(time_main_pass(self._runner, sequences, self.k))
            self.draft_s.append(time_draft_pass(self._runner, sequences))

    def _emitted(self, seat: Seat) -> int:
        return seat.sequence.num_tokens - len(seat.beginning.token_ids)

    def _begin(self, seat: Seat) -> None:
        seat.beginning.restore(seat.sequence)
        if self._controller is not None:
            self._controller.forget(seat.sequence.key)

    def _end(self, seat: Seat) -> None:
        """The seat goes to the next request; where none waits, to the same one again."""
        if seat.is_counted:
            first = len(seat.beginning.token_ids)
            output = seat.sequence.token_ids[first : first + self._span.tokens_each]
            self.outputs[seat.sequence.key] = tuple(output)
            seat.num_done += 1
            following = next(self._waiting, None)
            if following is None:
                seat.is_counted = False
            else:
                seat.sequence, seat.beginning = following
        self._begin(seat)


def _chosen(seconds: Sequence[float], number: int | None) -> float:
    return statistics.median(seconds) if number is None else seconds[number]
