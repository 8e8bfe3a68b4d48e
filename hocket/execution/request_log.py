"""A worker's log lines on requests: one when a leg ends here, with how it ended.

Told by the server with the events of every turn, on its event loop. The lines carry the request's
id and attempt, never a prompt or a token. Hand-offs are for those who debug; one that failed and
is computed again is logged where that is decided (`decode_workers/engine.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hocket.errors import InvalidRequest
from hocket.logs import about
from hocket.types import Begun, Event, Failed, Finished, Joined, Role

_logger = logging.getLogger(__name__)


def log_events(role: Role, events: Sequence[Event]) -> None:
    """Writes the lines of what happened to requests in one turn of a worker of this role."""
    for event in events:
        match event:
            case Finished(key, reason, usage):
                outcome = "handed off" if reason is None else reason.value
                extra = about(key) | {"leg": role.value, "outcome": outcome}
                extra |= {
                    "prompt_tokens": usage.prompt_tokens,
                    "output_tokens": usage.output_tokens,
                }
                _logger.info("leg ended", extra=extra)
            case Failed(key):
                # The message of an invalid request quotes what the client sent: not for logs.
                is_quoting = event.reason == InvalidRequest.reason
                fault = dict(event.metadata).get("field", "") if is_quoting else event.message
                extra = about(key) | {"leg": role.value, "outcome": event.reason}
                _logger.info("leg ended", extra=extra | {"fault": fault})
            case Joined(key):
                extra = about(key) | {"bytes": event.imported_bytes, "transport": event.transport}
                _logger.debug("joined", extra=extra | {"recomputed": event.recomputed})
            case Begun(key):
                _logger.debug("begun", extra=about(key) | {"slot": event.export.slot})
            case _:
                pass
