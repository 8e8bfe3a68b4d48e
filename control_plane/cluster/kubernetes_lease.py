"""Who may resize: of several launchers, the one that holds the Lease.

`KubernetesExecutor` renews it with every look at the cluster and asks `is_held` before it writes.
All writes are compare-and-set on the Lease's version, so of two takers one fails. Clocks of
different machines are never compared: a Lease counts as abandoned when its record has not changed
for its whole duration by our own monotonic clock, as in Kubernetes' own leader election.
"""

from __future__ import annotations

import copy
import logging
from datetime import UTC, datetime
from typing import Any

from control_plane.cluster.kubernetes_api import KubernetesApi, ObjectName
from hocket.clock import Clock
from hocket.errors import ResizeRefused

_log = logging.getLogger(__name__)

_DURATION_S = 15
# The holder stops to act this long before others may take over: a write may be on its way.
_MARGIN_S = 5.0


class KubernetesLease:
    """One candidate's view of the Lease. Methods raise what `KubernetesApi` raises, but only
    `renew` and `release` call it. Not for several threads at once."""

    def __init__(self, api: KubernetesApi, lease: ObjectName, identity: str, clock: Clock) -> None:
        """`identity` must differ from that of every other process, restarts included."""
        self._api = api
        self._lease = lease
        self._identity = identity
        self._clock = clock
        self._held_until_s = clock.now()
        self._seen: tuple[object, ...] = ()
        self._seen_at_s = 0.0
        self._holder = ""

    @property
    def holder(self) -> str:
        """Who holds it, as far as is known; "" for nobody."""
        return self._holder

    def is_held(self) -> bool:
        """Whether we hold it now, and for long enough to write."""
        return self._clock.now() < self._held_until_s

    def renew(self) -> None:
        """One try to take or renew it; see `is_held` afterwards."""
        now = self._clock.now()
        found = self._api.read_lease(self._lease)
        spec = found.spec
        self._holder = (spec and spec.holder_identity) or ""
        if self._holder not in ("", self._identity) and not self._is_abandoned(spec, now):
            self._lose()
            return
        has_changed_hands = self._holder != self._identity
        wanted = self._record(found, has_changed_hands)
        try:
            self._api.replace_lease(self._lease, wanted)
        except ResizeRefused:
            # Another candidate was faster, or our own record is newer than what we have read.
            _log.info("%s: another candidate wrote first", self._lease)
            self._lose()
            return
        if has_changed_hands:
            _log.info("%s: taken by %s", self._lease, self._identity)
        self._holder = self._identity
        # Counted from before the call: the others count from when they see the change.
        self._held_until_s = now + _DURATION_S - _MARGIN_S

    def release(self) -> None:
        """Lets the next one take it at once."""
        self._lose()
        found = self._api.read_lease(self._lease)
        if found.spec and found.spec.holder_identity == self._identity:
            freed = copy.copy(found)
            freed.spec = copy.copy(found.spec)
            freed.spec.holder_identity = ""
            self._api.replace_lease(self._lease, freed)

    def _lose(self) -> None:
        self._held_until_s = self._clock.now()

    def _is_abandoned(self, spec: Any, now: float) -> bool:
        """Whether the record of another holder has not changed for as long as it is good for."""
        record = (spec.holder_identity, spec.acquire_time, spec.renew_time)
        if record != self._seen:
            self._seen, self._seen_at_s = record, now
        return now - self._seen_at_s >= (spec.lease_duration_seconds or _DURATION_S)

    def _record(self, found: Any, has_changed_hands: bool) -> Any:
        """The Lease with us as its holder, on top of the version that was read."""
        from kubernetes.client import V1LeaseSpec

        old = found.spec or V1LeaseSpec()
        # For people who look at it; nothing here compares it with another clock.
        now = datetime.now(UTC)
        wanted = copy.copy(found)
        wanted.spec = V1LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=_DURATION_S,
            acquire_time=now if has_changed_hands else old.acquire_time,
            renew_time=now,
            lease_transitions=(old.lease_transitions or 0) + has_changed_hands,
        )
        return wanted
