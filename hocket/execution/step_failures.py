"""What happens when a model step raises: its requests fail, the worker lives, up to a point.

Where only some requests are at fault, only they fail: those that computed NaN (`Damaged`), or one
whose own input makes its step impossible (`RequestFault`). The step did nothing, and the others can
repeat it.

A runner leaves its sequences as they were when a step raises, so one bad step costs only the
requests that were in it. But a broken device, or a bug that meets every step, must not leave a
worker that is up and fails everything: then the error goes on, the engine ends, and the supervisor
starts a new process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import torch

from hocket.errors import GroupLost, HocketError, InternalError
from hocket.types import RequestKey

MAX_FAILED_STEPS_IN_A_ROW = 3

Outcome = TypeVar("Outcome")

_logger = logging.getLogger(__name__)


class RequestFault(Exception):
    """One request cannot take this step, for the reason that `error` gives."""

    def __init__(self, key: RequestKey, error: HocketError) -> None:
        super().__init__(f"{key}: {error}")
        self.key = key
        self.error = error


class Damaged(InternalError):
    """Some sequences of a step computed NaN.

    Other workers may do better: what was handed over to this one may be at fault.
    """

    is_retryable = True

    def __init__(self, keys: frozenset[RequestKey]) -> None:
        super().__init__("the model computed NaN; its weights or a hand-off are damaged")
        self.keys = keys


class StepFailures:
    """Watches one kind of step of one engine: prompts that compute do not excuse decoding."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def run(
        self,
        step: Callable[[], Outcome],
        keys: Seq[RequestKey],
        on_failure: Callable[[list[RequestKey], HocketError], None],
    ) -> Outcome | None:
        """The step's outcome; None when it raised, and `on_failure` was told who of its requests
        `keys` ends, and why.

        Raises what the step raised when the device or the rank's group is lost, or at the third
        failure in a row; a request's own fault is none of the worker's.
        """
        try:
            outcome = step()
        except RequestFault as fault:
            on_failure([fault.key], fault.error)
            return None
        except Exception as error:
            self._in_a_row += 1
            is_lost = isinstance(error, (torch.AcceleratorError, GroupLost))
            if is_lost or self._in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
                raise
            _logger.exception("A model step failed; the requests in it fail, the worker goes on.")
            failed = error.keys if isinstance(error, Damaged) else keys
            on_failure([key for key in keys if key in failed], _as_hocket_error(error))
            return None
        self._in_a_row = 0
        return outcome


def _as_hocket_error(error: Exception) -> HocketError:
    if isinstance(error, HocketError):
        return error
    return InternalError(f"The model step failed: {type(error).__name__}: {error}")
