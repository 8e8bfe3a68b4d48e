"""A signal ends `up` and `demo` in order, whatever it lands in."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from hocket.commands.up import Interrupted, Signals, interruptible


def _send(number: signal.Signals = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name), interruptible():
        _send(number)
    assert signal.getsignal(number) is before


def test_code_that_makes_another_error_of_it_does_not_hide_it() -> None:
    def convert() -> None:
        try:
            _send()
        except Interrupted as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(Interrupted, match="SIGINT"), interruptible():
        convert()


def test_code_that_swallows_it_does_not_hide_it() -> None:
    reached: list[str] = []

    def swallow(signals: Signals) -> None:
        try:
            _send(signal.SIGTERM)
        except Interrupted:
            reached.append("swallowed")
        signals.check()
        reached.append("went on")

    with pytest.raises(Interrupted, match="SIGTERM"), interruptible() as signals:
        swallow(signals)
    assert reached == ["swallowed"]


def test_a_block_that_ends_well_after_a_signal_was_interrupted_all_the_same() -> None:
    def swallow() -> None:
        with suppress(Interrupted):
            _send()

    with pytest.raises(Interrupted), interruptible():
        swallow()


def test_a_handler_that_somebody_else_put_there_is_taken_back() -> None:
    def be_robbed(signals: Signals) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signals.install()
        _send(signal.SIGTERM)

    with pytest.raises(Interrupted), interruptible() as signals:
        be_robbed(signals)


def test_what_rays_own_handler_makes_of_a_signal_is_understood() -> None:
    with pytest.raises(Interrupted, match="SIGTERM"), interruptible():
        raise SystemExit(signal.SIGTERM)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(ValueError, match="mine"), interruptible():
        raise ValueError("mine")
    with interruptible() as signals:
        assert isinstance(signals, Signals)
