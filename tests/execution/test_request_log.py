"""A worker's lines on requests: an id in each, and nothing that a client sent."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hocket.errors import InvalidRequest, WorkerUnavailable
from hocket.execution.request_log import log_events
from hocket.rpc.status import failed_from_error
from hocket.types import (
    Begun,
    Event,
    ExportHandle,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    RequestKey,
    Role,
    Tokens,
    Usage,
)

KEY = RequestKey("mine.0123456789ab", attempt=1)
HANDLE = ExportHandle("prefill-0", 1, "a:1", 7, 3, Fingerprint("w", "kv", 64, "f", "n"), 2)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    def log(*events: Event, level: int = logging.INFO) -> list[dict[str, Any]]:
        caplog.set_level(level)
        caplog.clear()
        log_events(Role.DECODE, events)
        return [vars(record) for record in caplog.records]

    return log


def test_a_leg_that_ends_leaves_one_line_with_its_request(logged: Any) -> None:
    events = (
        Begun(KEY, HANDLE),
        Joined(KEY, 4096, "tcp"),
        Tokens(KEY, 0, (1, 2)),
        Finished(KEY, FinishReason.LENGTH, Usage(9, 2)),
    )
    (line,) = logged(*events)
    assert (line["request_id"], line["attempt"]) == ("mine.0123456789ab", 1)
    assert (line["leg"], line["outcome"]) == ("decode", "length")
    assert (line["prompt_tokens"], line["output_tokens"]) == (9, 2)
    assert len(logged(*events, level=logging.DEBUG)) == 3, "hand-offs are for those who debug"


def test_a_leg_that_is_handed_off_says_so(logged: Any) -> None:
    (line,) = logged(Finished(KEY, None, Usage(9, 1)))
    assert line["outcome"] == "handed off"


def test_a_failure_has_its_reason_but_quotes_no_client(logged: Any) -> None:
    lost = failed_from_error(KEY, WorkerUnavailable("the rank died"))
    wrong = failed_from_error(KEY, InvalidRequest("token_ids[3]", 99999, "at most 4095"))
    first, second = logged(lost, wrong)
    assert (first["outcome"], first["fault"]) == ("WORKER_UNAVAILABLE", "the rank died")
    assert (second["outcome"], second["fault"]) == ("INVALID_REQUEST", "token_ids[3]")
    assert "99999" not in str(second)
