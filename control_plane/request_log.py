"""The one log line that a gateway writes of each request, when it is over.

`request_flow` keeps a `RequestRecord` while it serves and ends it once. The line has figures and
names only: never a prompt, never a token. Workers' lines of the same request carry the same id
with a suffix (`hocket.logs.about`), so that a search for the id finds them all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from control_plane.router.snapshot import Placement
from control_plane.validation import MAX_REQUEST_ID_LENGTH

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request so far. `output_tokens`: of all choices. `attempts`: pairs of
    workers that it was placed on, each choice by itself; `prefill_worker` and `decode_worker` are
    the latest pair. Times are seconds from arrival. `is_answered`: its last message is on the way.
    """

    request_id: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    attempts: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    is_answered: bool = False

    def placed(self, placement: Placement) -> None:
        """Notes a pair of workers that it goes to."""
        self.attempts += 1
        self.prefill_worker = placement.prefill.worker_id
        self.decode_worker = placement.decode.worker_id

    def ended(self, outcome: str, total_s: float, fault: str = "") -> None:
        """Writes the line. `outcome` is "OK" or the error's reason, `fault` the error in words,
        without anything that the client sent."""
        if not logger.isEnabledFor(logging.INFO):
            return
        extra: dict[str, Any] = {
            # One that is too long was refused for it.
            "request_id": self.request_id[:MAX_REQUEST_ID_LENGTH],
            "outcome": outcome,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "total_s": round(total_s, 6),
            "attempts": self.attempts,
        }
        if self.first_token_s is not None:
            extra["first_token_s"] = round(self.first_token_s, 6)
        if self.attempts:
            extra |= {"prefill_worker": self.prefill_worker, "decode_worker": self.decode_worker}
        if fault:
            extra["fault"] = fault
        logger.info("request ended", extra=extra)
