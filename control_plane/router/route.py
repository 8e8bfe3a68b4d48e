"""Routing in three verbs: filter, score, pick. Snapshots and a need in, a pair of workers out.

Pure: `pool.WorkerPool` keeps the state, `request_flow` acts on the placement. Only workers of
equal fingerprint and of neighbouring protocol versions pair; among several such groups the one with
the best pair wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from control_plane.router import filters, scorers
from control_plane.router.snapshot import Need, Placement, WorkerSnapshot
from hocket.errors import HocketError, InvalidRequest, WorkerUnavailable
from hocket.types import Fingerprint, Role, WorkerDescription

Scorer = Callable[[WorkerSnapshot, Need], float]
Choose = Callable[[Sequence[WorkerSnapshot], Need, int], Placement]
"""Of these workers, for this need, the placement; see `choose_pair` and `choose_whole`."""

# Workers that an error message names one by one.
_NAMED_REASONS = 8


def choose_pair(workers: Sequence[WorkerSnapshot], need: Need, rotation: int = 0) -> Placement:
    """The best prefill and decode worker that can pair.

    `rotation` is any number that differs from call to call: it spreads ties.

    Raises:
        WorkerUnavailable: nobody can take it now; says why for each worker.
        InvalidRequest: no worker that is there could ever hold it.
    """
    prefill = _candidates(workers, Role.PREFILL, filters.fits_prefill, need)
    decode = _candidates(workers, Role.DECODE, filters.fits_decode, need)
    prefill_of, decode_of = _by_kind(prefill), _by_kind(decode)
    kinds = [(p, d) for p in prefill_of for d in decode_of if p.can_pair(d)]
    if not kinds:
        raise _no_pair(prefill[0], decode[0])

    pairs: list[tuple[float, Placement]] = []
    for of_prefill, of_decode in kinds:
        cost, first = pick(prefill_of[of_prefill], scorers.queued_prefill, need, rotation)
        filled, second = pick(decode_of[of_decode], scorers.filled_decode, need, rotation)
        placement = Placement(first.worker, second.worker, first.cached_tokens)
        pairs.append((filled + cost / max(need.prompt_tokens, 1), placement))
    return min(pairs, key=lambda pair: pair[0])[1]


def difference(one: WorkerDescription, other: WorkerDescription) -> str:
    """Why two workers cannot pair, with both values; "" when they can."""
    found = one.fingerprint.difference(other.fingerprint)
    if abs(one.protocol_version - other.protocol_version) > 1:
        versions = f"protocol_version: {one.protocol_version} != {other.protocol_version}"
        found = f"{found}, {versions}" if found else versions
    return found


def choose_whole(workers: Sequence[WorkerSnapshot], need: Need, rotation: int = 0) -> Placement:
    """The best decode worker for a whole request. Raises as `choose_pair` does."""
    decode = _candidates(workers, Role.DECODE, filters.fits_decode, need)
    _, best = pick(decode, scorers.whole, need, rotation)
    return Placement(best.worker, best.worker, best.cached_tokens)


def pick(
    candidates: Sequence[WorkerSnapshot], scorer: Scorer, need: Need, rotation: int
) -> tuple[float, WorkerSnapshot]:
    """The lowest score and who has it; of several, ordered by name, the rotation-th."""
    scored = [(scorer(candidate, need), candidate) for candidate in candidates]
    best = min(score for score, _ in scored)
    ties = sorted((c for score, c in scored if score == best), key=lambda c: c.name)
    return best, ties[rotation % len(ties)]


def can_serve(workers: Sequence[WorkerSnapshot], choose: Choose = choose_pair) -> bool:
    """Whether the smallest request would find its workers: the gateway's health."""
    try:
        choose(workers, Need(prompt_tokens=1, max_tokens=1), 0)
    except HocketError:
        return False
    return True


def _candidates(
    workers: Sequence[WorkerSnapshot], role: Role, fits: filters.Filter, need: Need
) -> list[WorkerSnapshot]:
    """The workers of a role that may serve the request; at least one."""
    of_role = [snapshot for snapshot in workers if snapshot.worker.role is role]
    available, reasons = filters.split(of_role, filters.AVAILABLE, need)
    fitting, misfits = filters.split(available, (fits,), need)
    if fitting:
        return fitting
    if misfits and not reasons:
        limit = f"what a {role.value} worker holds: {next(iter(misfits.values()))}"
        value = f"{need.prompt_tokens} + {need.max_tokens} tokens"
        raise InvalidRequest("prompt + stopping.max_tokens", value, limit)
    raise _nobody(role, reasons | misfits)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What decides on whether workers can pair."""

    fingerprint: Fingerprint
    protocol_version: int

    def can_pair(self, other: _Kind) -> bool:
        """Versions N and N-1 understand each other."""
        is_near = abs(self.protocol_version - other.protocol_version) <= 1
        return is_near and self.fingerprint == other.fingerprint


def _by_kind(candidates: Sequence[WorkerSnapshot]) -> dict[_Kind, list[WorkerSnapshot]]:
    groups: dict[_Kind, list[WorkerSnapshot]] = {}
    for candidate in candidates:
        worker = candidate.worker
        kind = _Kind(worker.fingerprint, worker.protocol_version)
        groups.setdefault(kind, []).append(candidate)
    return groups


def _nobody(role: Role, reasons: Mapping[str, str]) -> WorkerUnavailable:
    if not reasons:
        return WorkerUnavailable(f"no {role.value} worker is registered", role=role.value)
    named = [f"{name} {reason}" for name, reason in sorted(reasons.items())]
    more = len(named) - _NAMED_REASONS
    text = "; ".join(named[:_NAMED_REASONS]) + (f"; and {more} more" if more > 0 else "")
    return WorkerUnavailable(
        f"no {role.value} worker can take the request: {text}", role=role.value
    )


def _no_pair(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> WorkerUnavailable:
    found = difference(prefill.worker, decode.worker)
    return WorkerUnavailable(
        "no prefill worker can pair with a decode worker; for example "
        f"{prefill.name} and {decode.name} differ in {found}",
        difference=found,
    )
