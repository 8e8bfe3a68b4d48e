"""From readings of counters to the observations of a window.

A `Reading` is what gateway and registry said at one moment: counters since the start of each
process, and how full the workers are. `Windows` keeps the readings that came before, takes
differences, and gathers the curve of decode step times. It reads no clock and does no I/O;
`control_plane.cluster.readings` does the reading. What a restart, a silence or a missing worker
leaves unknown is `Missing`, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.autoscaler.observations import (
    Arrivals,
    DecodeLoad,
    Metric,
    Missing,
    Observations,
    PoolWorkers,
    PrefillLoad,
    StepCurve,
    metric,
)
from hocket.types import Load, Role, WorkerDescription

# A step time is forgotten when it is older than this: what runs in a batch changes.
_CURVE_S = 600.0
_SHORTEST_WINDOW_S = 1e-3


@dataclass(frozen=True, slots=True)
class GatewayCounts:
    """What a gateway has counted since the start of its process, which `life` names.

    requests, prompt_tokens: that arrived. first_tokens, first_token_s: requests that got one, and
    the sum of their TTFTs. later_tokens, later_token_s: tokens after the first one, and the sum of
    the times between them. ended_requests, output_tokens: requests that ended well, their tokens.
    cached_tokens: prompt tokens of them that were not computed.
    """

    life: str
    requests: int = 0
    prompt_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    later_tokens: int = 0
    later_token_s: float = 0.0
    ended_requests: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A pool as its executor sees it, and the names of its ready workers."""

    workers: PoolWorkers
    ready: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment. `registered`: every rank of every worker, with its load."""

    now_s: float
    gateway: GatewayCounts | Missing
    registered: Sequence[WorkerDescription] | Missing
    prefill: PoolReading
    decode: PoolReading


@dataclass(frozen=True, slots=True)
class _Step:
    """Mean decode step of one worker in one window."""

    at_s: float
    batch: int
    num_steps: int
    seconds: float


class Windows:
    """The readings so far. `observe` takes the next one."""

    def __init__(self) -> None:
        self._gateway: tuple[float, GatewayCounts] | None = None
        self._loads: dict[tuple[str, int], Load] = {}
        self._steps: list[_Step] = []

    def observe(self, reading: Reading) -> Observations:
        """The window between the last reading and this one. Counters of a process that was not
        there then count from the next window on."""
        gateway, window_s = self._gateway_window(reading)
        prefill = _registered(reading.registered, Role.PREFILL, reading.prefill)
        decode = _registered(reading.registered, Role.DECODE, reading.decode)
        observations = Observations(
            now_s=reading.now_s,
            prefill_workers=reading.prefill.workers,
            decode_workers=reading.decode.workers,
            arrivals=_arrivals(gateway, window_s),
            prefill=prefill if isinstance(prefill, Missing) else self._prefill(prefill, gateway),
            decode=(
                decode
                if isinstance(decode, Missing)
                else self._decode(decode, gateway, reading.now_s)
            ),
        )
        if not isinstance(reading.registered, Missing):
            self._loads = {(w.worker_id, w.epoch): w.load for w in reading.registered}
        return observations

    def _gateway_window(self, reading: Reading) -> tuple[GatewayCounts | Missing, float]:
        """What the gateway counted since it was heard last, and how long ago that was."""
        now = reading.gateway
        if isinstance(now, Missing):
            return now, 0.0
        before, self._gateway = self._gateway, (reading.now_s, now)
        if before is None:
            return Missing("the first window begins"), 0.0
        at_s, counts = before
        window_s = reading.now_s - at_s
        if counts.life != now.life:
            return Missing("the gateway was started again"), 0.0
        if window_s < _SHORTEST_WINDOW_S:
            return Missing(f"a window of {window_s} s"), 0.0
        return _difference(counts, now), window_s

    def _prefill(
        self, workers: Mapping[str, list[WorkerDescription]], gateway: GatewayCounts | Missing
    ) -> PrefillLoad:
        loads = [rank.load for ranks in workers.values() for rank in ranks]
        windows = self._load_windows(rank for ranks in workers.values() for rank in ranks)
        computed = sum(load.computed_prompt_tokens for load in windows)
        busy_s = sum(load.busy_s for load in windows)
        num_blocks = sum(load.num_blocks for load in loads)
        unread = sum(load.unread_blocks for load in loads)
        ttft_s: Metric = Missing("there was no first token")
        if isinstance(gateway, Missing):
            ttft_s = gateway
        elif gateway.first_tokens:
            ttft_s = metric(gateway.first_token_s / gateway.first_tokens, "the TTFT")
        speed: Metric = Missing("nothing was computed")
        if computed and busy_s > 0:
            speed = metric(computed / busy_s, "the prefill speed")
        return PrefillLoad(
            waiting_requests=sum(load.waiting_requests for load in loads),
            queued_prompt_tokens=sum(load.queued_prompt_tokens for load in loads),
            unread_share=unread / num_blocks if num_blocks else 0.0,
            tokens_per_s=speed,
            ttft_s=ttft_s,
        )

    def _decode(
        self,
        workers: Mapping[str, list[WorkerDescription]],
        gateway: GatewayCounts | Missing,
        now_s: float,
    ) -> DecodeLoad:
        loads = [rank.load for ranks in workers.values() for rank in ranks]
        emitted = members = 0
        self._steps = [step for step in self._steps if step.at_s > now_s - _CURVE_S]
        for ranks in workers.values():
            windows = self._load_windows(ranks)
            emitted += sum(load.emitted_tokens for load in windows)
            members += sum(load.decode_batch_sum for load in windows)
            self._note_step(windows, now_s)
        inter_token_s: Metric = Missing("there was no token")
        if isinstance(gateway, Missing):
            inter_token_s = gateway
        elif gateway.later_tokens:
            apart_s = gateway.later_token_s / gateway.later_tokens
            inter_token_s = metric(apart_s, "the inter-token time")
        free = sum(load.free_blocks for load in loads)
        num_blocks = sum(load.num_blocks for load in loads)
        running = sum(load.running_requests for load in loads)
        tokens_per_step: Metric = Missing("there was no step")
        if members:
            tokens_per_step = metric(emitted / members, "tokens per step")
        blocks: Metric = Missing("no request runs")
        if running:
            blocks = metric((num_blocks - free) / running, "blocks per request")
        return DecodeLoad(
            running_requests=running,
            waiting_requests=sum(load.waiting_requests for load in loads),
            free_blocks=free,
            num_blocks=num_blocks,
            blocks_per_request=blocks,
            tokens_per_step=tokens_per_step,
            step_curve=self._curve(),
            inter_token_s=inter_token_s,
        )

    def _load_windows(self, ranks: Iterable[WorkerDescription]) -> list[Load]:
        """What each life counted since the last reading; of a new one nothing is known yet."""
        found: list[Load] = []
        for rank in ranks:
            before = self._loads.get((rank.worker_id, rank.epoch))
            if before is not None:
                found.append(_load_difference(before, rank.load))
        return found

    def _note_step(self, windows: Sequence[Load], now_s: float) -> None:
        """Ranks of a group step together: its batch is the sum of theirs, its step the longest."""
        num_steps = max((load.decode_steps for load in windows), default=0)
        step_s = max((load.decode_step_s for load in windows), default=0.0)
        batch = sum(load.decode_batch_sum for load in windows)
        if num_steps and batch and step_s > 0:
            mean = max(1, round(batch / num_steps))
            self._steps.append(_Step(now_s, mean, num_steps, step_s / num_steps))

    def _curve(self) -> StepCurve | Missing:
        """Mean step time by batch, each window with the weight of its steps."""
        steps: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for step in self._steps:
            steps[step.batch] = steps.get(step.batch, 0) + step.num_steps
            spent_s = step.num_steps * step.seconds
            seconds[step.batch] = seconds.get(step.batch, 0.0) + spent_s
        return StepCurve.measured((batch, seconds[batch] / steps[batch]) for batch in steps)


def _arrivals(gateway: GatewayCounts | Missing, window_s: float) -> Arrivals | Missing:
    if isinstance(gateway, Missing):
        return gateway
    output: Metric = Missing("no request has ended")
    if gateway.ended_requests:
        output = metric(gateway.output_tokens / gateway.ended_requests, "tokens per request")
    return Arrivals(
        window_s=window_s,
        requests=gateway.requests,
        prompt_tokens=max(0, gateway.prompt_tokens - gateway.cached_tokens),
        output_tokens_per_request=output,
    )


def _registered(
    registered: Sequence[WorkerDescription] | Missing, role: Role, pool: PoolReading
) -> dict[str, list[WorkerDescription]] | Missing:
    """The ranks of every ready worker, by its name; Missing when not all of them are registered."""
    if isinstance(registered, Missing):
        return registered
    found: dict[str, list[WorkerDescription]] = {name: [] for name in sorted(pool.ready)}
    for rank in registered:
        name = rank.group or rank.worker_id
        if rank.role is role and name in found and not rank.is_draining:
            found[name].append(rank)
    absent = [name for name, ranks in found.items() if not _is_whole(ranks)]
    if absent:
        return Missing(f"{', '.join(absent)}: not in the registry")
    return found


def _is_whole(ranks: Sequence[WorkerDescription]) -> bool:
    return bool(ranks) and len(ranks) == ranks[0].group_size


def _difference(before: GatewayCounts, now: GatewayCounts) -> GatewayCounts:
    return GatewayCounts(
        life=now.life,
        requests=now.requests - before.requests,
        prompt_tokens=now.prompt_tokens - before.prompt_tokens,
        first_tokens=now.first_tokens - before.first_tokens,
        first_token_s=now.first_token_s - before.first_token_s,
        later_tokens=now.later_tokens - before.later_tokens,
        later_token_s=now.later_token_s - before.later_token_s,
        ended_requests=now.ended_requests - before.ended_requests,
        output_tokens=now.output_tokens - before.output_tokens,
        cached_tokens=now.cached_tokens - before.cached_tokens,
    )


def _load_difference(before: Load, now: Load) -> Load:
    """Counters only."""
    return Load(
        busy_s=now.busy_s - before.busy_s,
        computed_prompt_tokens=now.computed_prompt_tokens - before.computed_prompt_tokens,
        decode_steps=now.decode_steps - before.decode_steps,
        decode_step_s=now.decode_step_s - before.decode_step_s,
        decode_batch_sum=now.decode_batch_sum - before.decode_batch_sum,
        emitted_tokens=now.emitted_tokens - before.emitted_tokens,
    )
