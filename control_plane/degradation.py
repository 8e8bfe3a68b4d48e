"""What still works, but not as it should, is said: counted each time, warned of once a minute.

`request_run` tells what it notices of its workers. A warning names the workers, so it is worth one
line per pair of them and minute, not one per request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from control_plane.router.snapshot import Placement
from hocket.telemetry import GatewayMetrics

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


class Degradation:
    """The silent faults of one gateway's workers."""

    def __init__(self, metrics: GatewayMetrics, now: Callable[[], float]) -> None:
        """`now` is the event loop's clock."""
        self._metrics = metrics
        self._now = now
        self._warned_s: dict[tuple[str, ...], float] = {}

    def recomputed(self, placement: Placement, why: str) -> None:
        """Decode computed a prompt again that prefill had computed."""
        self._metrics.recomputed.inc()
        pair = (placement.prefill.worker_id, placement.decode.worker_id)
        if self._is_due("recomputed", *pair):
            text = "%s computes prompts again, because their KV does not come over from %s: %s"
            logger.warning(text, pair[1], pair[0], why or "it does not say why")

    def found(self, placement: Placement, cached_tokens: int) -> None:
        """What who read the prompt found of it in its cache, beside what the router counted on."""
        promised = placement.promised_tokens
        if not promised or cached_tokens:
            return
        self._metrics.broken_promises.inc()
        worker_id = placement.prefill.worker_id
        if self._is_due("promise", worker_id):
            text = "%s should have had %d tokens of a prompt cached and had none"
            logger.warning(text, worker_id, promised)

    def _is_due(self, *what: str) -> bool:
        """Whether the last warning of this is a minute old; if so, this is the next one."""
        now = self._now()
        if now - self._warned_s.get(what, -WARN_EVERY_S) < WARN_EVERY_S:
            return False
        # Workers come and go: what is old is forgotten with the first warning after it.
        self._warned_s = {w: s for w, s in self._warned_s.items() if now - s < WARN_EVERY_S}
        self._warned_s[what] = now
        return True
