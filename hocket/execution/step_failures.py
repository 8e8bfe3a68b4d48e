"""What happens when a model step raises: its requests fail, the worker lives, up to a point.

A runner leaves its sequences as they were when a step raises, so one bad step costs only the
requests that were in it. But a broken device, or a bug that meets every step, must not leave a
worker that is up and fails everything: then the error goes on, the engine ends, and the supervisor
starts a new process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from hocket.errors import GroupLost, HocketError, InternalError

MAX_FAILED_STEPS_IN_A_ROW = 3

Outcome = TypeVar("Outcome")

_logger = logging.getLogger(__name__)


class StepFailures:
    """Watches one kind of step of one engine: prompts that compute do not excuse decoding."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def run(
        self, step: Callable[[], Outcome], on_failure: Callable[[HocketError], None]
    ) -> Outcome | None:
        """The step's outcome; None when it raised and `on_failure` was told.

        Raises what the step raised when the device or the rank's group is lost, or at the third
        failure in a row.
        """
        try:
            outcome = step()
        except Exception as error:
            self._in_a_row += 1
            is_lost = isinstance(error, (torch.AcceleratorError, GroupLost))
            if is_lost or self._in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
                raise
            _logger.exception("A model step failed; the requests in it fail, the worker goes on.")
            on_failure(_as_hocket_error(error))
            return None
        self._in_a_row = 0
        return outcome


def _as_hocket_error(error: Exception) -> HocketError:
    if isinstance(error, HocketError):
        return error
    return InternalError(f"The model step failed: {type(error).__name__}: {error}")
