"""The guards in the engines and between gateway and workers, each with the scenario that fails
without it."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.output import Output
from decode_workers.scheduler import DecodeScheduler
from hocket.rpc.session import SessionServer
from hocket.rpc.session_client import SessionClient
from hocket.scheduling.import_ownership import ImportOwnership
from prefill_workers.engine import PrefillEngine
from prefill_workers.scheduler import PrefillScheduler
from tests.scenarios import test_engines as engines
from tests.scenarios import test_sessions as sessions
from tests.scenarios.guards import Guard, around, assert_the_scenario_needs_it, replacing

# Between gateway and workers.


def take_repeated_command(real: Any, self: Any, session: Any, command: Any) -> None:
    if 0 < command.sequence <= session.received_commands:
        session.received_commands = command.sequence - 1
    real(self, session, command)


def take_repeated_batch(real: Any, self: Any, batch: Any) -> None:
    if 0 < batch.sequence <= self._received_events:
        self._received_events = batch.sequence - 1
    real(self, batch)


def start_again(real: Any, self: Any, session: Any, start: Any) -> None:
    self._owners.clear()
    real(self, session, start)


def add_without_looking(self: Any, tokens: Any) -> None:
    self._append(tokens.token_ids, tokens.logprobs)


SESSION_GUARDS = {
    "dedup: commands": Guard(
        around(SessionServer, "_take", take_repeated_command),
        sessions.test_a5_commands_that_a_gateway_repeats_are_taken_once,
    ),
    "dedup: events": Guard(
        around(SessionClient, "_take", take_repeated_batch),
        sessions.test_a5_events_that_a_worker_tells_twice_are_taken_once,
    ),
    "dedup: starts": Guard(
        around(SessionServer, "_take_start", start_again),
        sessions.test_a6_an_attempt_that_is_started_twice_never_runs_twice,
    ),
    "dedup: tokens of both legs": Guard(
        replacing(Output, "add", add_without_looking),
        sessions.test_a5_tokens_that_both_legs_tell_are_taken_once,
    ),
}


@pytest.mark.parametrize("guard", SESSION_GUARDS)
def test_a_sessions_scenario_fails_without(guard: str) -> None:
    chosen = SESSION_GUARDS[guard]
    assert_the_scenario_needs_it(chosen, chosen.scenario)


# In the engines.


def start_without_exports(real: Any, self: Any, *args: Any) -> None:
    """Nothing is known of what is exported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self._exports, "keys", list)
        real(self, *args)


ENGINE_GUARDS = {
    "dedup: an attempt that waits for prefill": Guard(
        replacing(PrefillScheduler, "__contains__", lambda *_: False),
        engines.test_a6_an_attempt_that_waits_for_prefill_is_not_started_twice,
    ),
    "dedup: an attempt that is exported": Guard(
        around(PrefillEngine, "_start", start_without_exports),
        engines.test_a6_an_attempt_that_is_exported_is_not_started_twice,
    ),
    "dedup: an attempt that decode has": Guard(
        replacing(DecodeScheduler, "__contains__", lambda *_: False),
        engines.test_a6_an_attempt_that_decode_has_is_not_started_twice,
    ),
    "fence, seen by a client": Guard(
        replacing(ImportOwnership, "_is_fenced", lambda *_: True),
        engines.test_a8_bytes_of_blocks_taken_back_during_a_read_reach_no_client,
    ),
}


@pytest.mark.parametrize("guard", ENGINE_GUARDS)
def test_an_engines_scenario_fails_without(
    make_pair: Any, make_request: Any, reference: Any, guard: str
) -> None:
    chosen = ENGINE_GUARDS[guard]
    assert_the_scenario_needs_it(
        chosen, lambda: chosen.scenario(make_pair, make_request, reference)
    )
