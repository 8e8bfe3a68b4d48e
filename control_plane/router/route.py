"""Routing in three verbs: filter, score, pick. Snapshots and a need in, a pair of workers out.

Pure: `pool.WorkerPool` keeps the state, `request_flow` acts on the placement. Only workers of
equal fingerprint pair; among several fingerprints the one with the best pair wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from control_plane.router import filters, scorers
from control_plane.router.snapshot import Need, Placement, WorkerSnapshot
from hocket.errors import HocketError, InvalidRequest, WorkerUnavailable
from hocket.types import Fingerprint, Role

Scorer = Callable[[WorkerSnapshot, Need], float]
Choose = Callable[[Sequence[WorkerSnapshot], Need, int], Placement]
"""Of these workers, for this need, the placement; see `choose_pair` and `choose_whole`."""

# Workers that an error message names one by one.
_NAMED_REASONS = 8


def choose_pair(workers: Sequence[WorkerSnapshot], need: Need, rotation: int = 0) -> Placement:
    """The best prefill and decode worker of equal fingerprint.

    `rotation` is any number that differs from call to call: it spreads ties.

    Raises:
        WorkerUnavailable: nobody can take it now; says why for each worker.
        InvalidRequest: no worker that is there could ever hold it.
    """
    prefill = _candidates(workers, Role.PREFILL, filters.fits_prefill, need)
    decode = _candidates(workers, Role.DECODE, filters.fits_decode, need)
    prefill_of, decode_of = _by_fingerprint(prefill), _by_fingerprint(decode)
    shared = [fingerprint for fingerprint in prefill_of if fingerprint in decode_of]
    if not shared:
        raise _no_pair(prefill[0], decode[0])

    pairs: list[tuple[float, Placement]] = []
    for fingerprint in shared:
        cost, first = pick(prefill_of[fingerprint], scorers.queued_prefill, need, rotation)
        filled, second = pick(decode_of[fingerprint], scorers.filled_decode, need, rotation)
        placement = Placement(first.worker, second.worker)
        pairs.append((filled + cost / max(need.prompt_tokens, 1), placement))
    return min(pairs, key=lambda pair: pair[0])[1]


def choose_whole(workers: Sequence[WorkerSnapshot], need: Need, rotation: int = 0) -> Placement:
    """The best decode worker for a whole request. Raises as `choose_pair` does."""
    decode = _candidates(workers, Role.DECODE, filters.fits_decode, need)
    _, best = pick(decode, scorers.whole, need, rotation)
    return Placement(best.worker, best.worker)


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


def _by_fingerprint(
    candidates: Sequence[WorkerSnapshot],
) -> dict[Fingerprint, list[WorkerSnapshot]]:
    groups: dict[Fingerprint, list[WorkerSnapshot]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.worker.fingerprint, []).append(candidate)
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
    difference = prefill.worker.fingerprint.difference(decode.worker.fingerprint)
    return WorkerUnavailable(
        "no prefill worker has the fingerprint of a decode worker; for example "
        f"{prefill.name} and {decode.name} differ in {difference}",
        difference=difference,
    )
