"""A turn that fails does not end what repeats it."""

from __future__ import annotations

import logging
import threading

import pytest

from control_plane.cluster.repeating import Repeating


def test_turns_go_on_after_one_that_failed_and_a_fault_that_lasts_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes = iter(["broken"] * 3 + ["", "broken", "otherwise"])
    is_over = threading.Event()

    def turn() -> None:
        outcome = next(outcomes, None)
        if outcome is None:
            is_over.set()
        elif outcome:
            raise ValueError(outcome)

    repeating = Repeating("supervisor", 0.001, turn)
    with caplog.at_level(logging.ERROR):
        repeating.start()
        assert is_over.wait(5.0)
        repeating.stop()
        repeating.stop()
    assert [record.exc_info[1].args[0] for record in caplog.records if record.exc_info] == [  # pyright: ignore[reportOptionalMemberAccess]
        "broken",
        "broken",
        "otherwise",
    ]


def test_one_that_was_never_started_can_be_stopped() -> None:
    Repeating("scaling", 1.0, lambda: None).stop()
