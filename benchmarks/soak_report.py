"""What a run of `soak.py` has shown: counts, growth of memory, and everything that is wrong.

Pure: a `Record` comes in, words and figures go out; an empty list of faults is what the exit code 0
stands for. benchmarks/README.md says how to read the table.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soak_load import Outcome, Try, Wish
from soak_watch import Kill, Memory, Rest

from hocket.types import FinishReason

# A kill explains failures until its worker is back, and this much longer.
AFTERMATH_S = 5.0
# Of a process's life, in requests of the whole run: what warms up, and what a slope needs then.
WARM_UP_REQUESTS = 1000
JUDGED_REQUESTS = 1400
MAX_SAMPLES = 200
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Expected:
    """What the engine in one process answers."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Record:
    """Everything that is judged. `expected[i]` belongs to `wishes[i]` and `outcomes[i]`."""

    wishes: Sequence[Wish]
    outcomes: Sequence[Outcome]
    expected: Sequence[Expected]
    kills: Sequence[Kill]
    memories: Sequence[Memory]
    rest: Rest
    seconds: float
    max_mib_per_1000: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Resident memory of one process over its life; `mib_per_1000` requests after its warm-up, None
    when it did not live long enough to tell."""

    name: str
    process_id: int
    requests: int
    first_mib: float
    last_mib: float
    mib_per_1000: float | None


def growth(memory: Memory) -> Growth:
    """The slope is the median of the slopes between all pairs of samples: a step counts little."""
    first, last = memory.samples[0], memory.samples[-1]
    warm = [s for s in memory.samples if s[0] >= first[0] + WARM_UP_REQUESTS]
    warm = warm[:: -(-len(warm) // MAX_SAMPLES)] if warm else []
    slope = None
    if warm and warm[-1][0] - warm[0][0] >= JUDGED_REQUESTS:
        slopes = [
            (b[1] - a[1]) / 2**20 / (b[0] - a[0]) * 1000
            for a, b in itertools.combinations(warm, 2)
            if b[0] - a[0] >= JUDGED_REQUESTS / 4
        ]
        slope = round(statistics.median(slopes), 3)
    return Growth(
        memory.name,
        memory.process_id,
        last[0] - first[0],
        round(first[1] / 2**20, 1),
        round(last[1] / 2**20, 1),
        slope,
    )


def is_explained(one: Try, kills: Sequence[Kill]) -> bool:
    """Whether a worker was away while a try that failed was under way."""
    return any(
        kill.at_s <= one.ended_s
        and (kill.back_s is None or one.began_s <= kill.back_s + AFTERMATH_S)
        for kill in kills
    )


def faults(record: Record) -> list[str]:
    """What is wrong, a line each; nothing is wrong when there is none."""
    found = [f"left at rest: {what}" for what in record.rest.left]
    for wish, outcome, expected in zip(
        record.wishes, record.outcomes, record.expected, strict=True
    ):
        found += _faults_of(wish, outcome, expected, record.kills)
    for one in map(growth, record.memories):
        # Ray remembers every actor that it has started; kills are starts, requests are not.
        is_judged = not (record.kills and one.name == "gcs_server")
        slope = one.mib_per_1000 if is_judged else None
        if slope is not None and slope > record.max_mib_per_1000:
            found.append(
                f"memory: {one.name} ({one.process_id}) grows by {one.mib_per_1000} MiB per 1,000 "
                f"requests, limit {record.max_mib_per_1000}"
            )
    found += [f"{kill.worker_id} never came back" for kill in record.kills if kill.back_s is None]
    return found


def _faults_of(
    wish: Wish, outcome: Outcome, expected: Expected, kills: Sequence[Kill]
) -> list[str]:
    """Of one request: ends otherwise than it may, or says anything that the engine does not."""
    name = f"request {wish.number}"
    found: list[str] = []
    for one in outcome.tries:
        told = tuple(one.token_ids)
        if told != expected.token_ids[: len(told)]:
            at = next(i for i, t in enumerate(told) if (t,) != expected.token_ids[i : i + 1])
            found.append(f"{name} ({one.end}): token {at} of {len(told)} is another one")
        elif one.end == "completed" and (told, one.finish_reason, one.output_tokens) != (
            expected.token_ids,
            expected.finish_reason,
            len(expected.token_ids),
        ):
            found.append(
                f"{name}: {len(told)} tokens, {one.output_tokens} counted, {one.finish_reason}; "
                f"expected {len(expected.token_ids)}, {expected.finish_reason}"
            )
        if one.end == "failed" and not one.is_retryable:
            found.append(f"{name} failed for good: {one.reason}: {one.error}")
        elif one.end == "failed" and not is_explained(one, kills):
            found.append(f"{name} failed without a kill: {one.reason}: {one.error}")
        if one.end == "cancelled" and wish.cancel is None:
            found.append(f"{name} ended without a finish")
    if outcome.end not in ("completed", "cancelled"):
        found.append(f"{name} was never answered, {len(outcome.tries)} tries")
    return found


def summary(record: Record) -> dict[str, Any]:
    """For people and for the JSON file."""
    tries = [one for outcome in record.outcomes for one in outcome.tries]
    failed = [one for one in tries if one.end == "failed"]
    by_reason = Counter(one.reason for one in failed)
    wrong = faults(record)
    return {
        "requests": len(record.wishes),
        "completed": sum(outcome.end == "completed" for outcome in record.outcomes),
        "cancelled": sum(outcome.end == "cancelled" for outcome in record.outcomes),
        "tries_failed": len(failed),
        "tries_failed_by_reason": dict(by_reason.most_common()),
        "failure_examples": {
            reason: next(one.error for one in failed if one.reason == reason)
            for reason in by_reason
        },
        "tokens_compared": sum(len(one.token_ids) for one in tries),
        "kills": [asdict(kill) for kill in record.kills],
        "seconds": round(record.seconds, 1),
        "seconds_to_rest": record.rest.waited_s,
        "left_at_rest": list(record.rest.left),
        "memory": [asdict(growth(memory)) for memory in record.memories],
        "hand_off_counters": {k: v for k, v in sorted(record.rest.counters.items()) if v},
        "faults": wrong,
    }


def table(told: dict[str, Any]) -> str:
    """The summary for the terminal."""
    reasons = ", ".join(f"{n} {reason}" for reason, n in told["tries_failed_by_reason"].items())
    lines = [
        f"{told['requests']} requests in {told['seconds']:.0f} s: {told['completed']} completed, "
        f"{told['cancelled']} cancelled by us; {len(told['kills'])} workers killed",
        f"{told['tokens_compared']} tokens compared with the engine in one process",
        f"tries that failed and were made again: {told['tries_failed']} ({reasons or 'none'})",
        f"at rest after {told['seconds_to_rest']} s: "
        + ("; ".join(told["left_at_rest"]) or "nothing left anywhere"),
        f"{'resident memory':18}{'requests':>9}{'first MiB':>11}{'last MiB':>10}{'MiB/1000':>10}",
    ]
    for one in told["memory"]:
        slope = "-" if one["mib_per_1000"] is None else f"{one['mib_per_1000']:.2f}"
        lines.append(
            f"  {one['name']:16}{one['requests']:9}{one['first_mib']:11.1f}"
            f"{one['last_mib']:10.1f}{slope:>10}"
        )
    wrong = told["faults"]
    lines += [f"WRONG: {fault}" for fault in wrong[:_SHOWN]]
    if len(wrong) > _SHOWN:
        lines.append(f"WRONG: and {len(wrong) - _SHOWN} more")
    return "\n".join(lines)
