"""Compiling beside the engine: shared, kept, limited; and trials of grammars that would harm it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hocket.clock import ManualClock
from hocket.errors import (
    HocketError,
    InternalError,
    InvalidRequest,
    Overloaded,
    WorkerUnavailable,
)
from hocket.execution.grammars.compiler import NUM_LANES, RETRY_S, GrammarCompiler
from hocket.execution.grammars.library import LibraryArguments
from hocket.execution.grammars.states import CompiledGrammar, GrammarState
from hocket.execution.grammars.trials import GrammarTrials, TrialFailed
from hocket.grammar_settings import GrammarSettings
from hocket.request_params import Grammar, GrammarKind
from tests.execution.grammar_texts import ALL, END, FOLDER, VOCAB_SIZE, compiled, mask

WAIT_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]


class SizedLibrary:
    """Compiles nothing; counts, and says that each grammar holds 100 bytes."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled[grammar.source] += 1
        return CompiledGrammar(grammar, None, frozenset([END]), VOCAB_SIZE, 100)

    def load(self, grammar: Grammar, serialized: str) -> CompiledGrammar:
        self.loaded[f"{grammar.source} from {serialized}"] += 1
        return CompiledGrammar(grammar, None, frozenset([END]), VOCAB_SIZE, 100)


class GatedTrials:
    """Each trial waits for the gate, then ends as `outcomes` says."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.outcomes: dict[str, HocketError | str] = {}
        self.tried: Counter[str] = Counter()
        self.is_closed = False

    def start(self) -> None: ...

    def check(self, grammar: Grammar, timeout_s: float) -> str:
        self.tried[grammar.source] += 1
        assert self.gate.wait(WAIT_S)
        outcome = self.outcomes.get(grammar.source, "")
        if isinstance(outcome, HocketError):
            raise outcome
        return outcome

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, settings: GrammarSettings) -> None:
        self.library, self.trials, self.clock = SizedLibrary(), GatedTrials(), ManualClock()
        self.compiler = GrammarCompiler(lambda: self.library, self.trials, settings, self.clock)

    def error(self, grammar: Grammar) -> BaseException | None:
        return self.compiler.compile(grammar).exception(WAIT_S)


def _regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(GrammarSettings(max_waiting=3, cache_bytes=250, max_source_bytes=20))
    yield rig
    rig.compiler.close()


def test_equal_requests_at_a_time_compile_once(rig: Rig) -> None:
    rig.trials.gate.clear()
    futures = [rig.compiler.compile(_regex("a")) for _ in range(20)]
    assert futures[0].cancel() is False  # for the others' sake
    rig.trials.gate.set()
    assert len({id(future.result(WAIT_S)) for future in futures}) == 1
    assert rig.compiler.compile(_regex("a")).result(WAIT_S) is futures[0].result()
    assert rig.library.compiled == {"a": 1}


def test_what_nobody_waits_for_any_more_leaves_the_queue(rig: Rig) -> None:
    rig.trials.gate.clear()
    begun = [rig.compiler.compile(_regex(source)) for source in "ab"]
    while len(rig.trials.tried) < 2:
        time.sleep(0.01)
    waiting = [rig.compiler.compile(_regex(source)) for source in "cdec"]
    with pytest.raises(Overloaded):
        rig.compiler.compile(_regex("f"))
    rig.compiler.abandon(_regex("c"))  # one of the two that wait for it
    assert not waiting[0].done()
    for source in "adc":  # one that is being compiled, one that waits, and the other one
        rig.compiler.abandon(_regex(source))
    assert isinstance(waiting[0].exception(WAIT_S), WorkerUnavailable)
    assert isinstance(waiting[1].exception(WAIT_S), WorkerUnavailable)
    later = rig.compiler.compile(_regex("f"))
    rig.trials.gate.set()
    for future in (*begun, waiting[2], later):
        future.result(WAIT_S)
    assert set(rig.trials.tried) == set("abef")
    assert rig.compiler.compile(_regex("c")).result(WAIT_S).grammar == _regex("c")


def test_the_kind_counts_as_well_as_the_text(rig: Rig) -> None:
    for kind in (GrammarKind.REGEX, GrammarKind.EBNF):
        assert rig.compiler.compile(Grammar(kind, "a")).result(WAIT_S).grammar.kind is kind
    assert rig.library.compiled == {"a": 2}


def test_a_slow_grammar_is_carried_over(rig: Rig) -> None:
    rig.trials.outcomes["slow"] = "what the trial made"
    rig.compiler.compile(_regex("slow")).result(WAIT_S)
    assert rig.library.loaded == {"slow from what the trial made": 1}
    assert not rig.library.compiled


def test_the_least_recently_used_is_dropped(rig: Rig) -> None:
    for source in ("a", "b", "a", "c", "a", "b"):  # two of 101 bytes fit into 250
        rig.compiler.compile(_regex(source)).result(WAIT_S)
    assert rig.library.compiled == {"a": 1, "b": 2, "c": 1}


def test_a_refusal_is_kept(rig: Rig) -> None:
    rig.trials.outcomes["("] = InvalidRequest("grammar.regex", "(", "closed")
    assert rig.error(_regex("(")) is rig.error(_regex("("))
    assert rig.trials.tried == {"(": 1}
    assert not rig.library.compiled


def test_a_trial_that_hit_a_limit_is_tried_again_later(rig: Rig) -> None:
    rig.trials.outcomes["x"] = TrialFailed("grammar.regex", "x", "one that compiles within 1 s")
    assert isinstance(rig.error(_regex("x")), InvalidRequest)
    rig.clock.advance(RETRY_S - 1)
    assert isinstance(rig.error(_regex("x")), InvalidRequest)
    assert rig.trials.tried == {"x": 1}
    rig.trials.outcomes.clear()
    rig.clock.advance(1)
    assert rig.error(_regex("x")) is None
    assert rig.trials.tried == {"x": 2}


def test_an_error_of_ours_is_not_kept(rig: Rig) -> None:
    rig.trials.outcomes["x"] = InternalError("No grammar can be tried out.")
    assert isinstance(rig.error(_regex("x")), InternalError)
    rig.trials.outcomes.clear()
    assert rig.error(_regex("x")) is None


def test_a_long_grammar_is_refused_with_its_size(rig: Rig) -> None:
    rig.compiler.compile(_regex("é" * 10)).result(WAIT_S)
    with pytest.raises(InvalidRequest, match=r"grammar\.regex is '21 bytes'.* at most 20 bytes"):
        rig.compiler.compile(_regex("é" * 10 + "x"))


def _lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "grammars"}


def test_too_many_at_a_time_are_refused_for_now(rig: Rig) -> None:
    before = _lanes()
    rig.trials.gate.clear()
    futures = [rig.compiler.compile(_regex(f"{i}")) for i in range(NUM_LANES + 3)]
    with pytest.raises(Overloaded, match="3 grammars wait"):
        rig.compiler.compile(_regex("one more"))
    assert rig.compiler.compile(_regex("0")) is futures[0]  # waits already
    assert len(_lanes() - before) == NUM_LANES
    rig.trials.gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert rig.error(_regex("one more")) is None
    assert len(_lanes() - before) == NUM_LANES


def test_closing_fails_what_is_unfinished(rig: Rig) -> None:
    rig.trials.gate.clear()
    futures = [rig.compiler.compile(_regex(f"{i}")) for i in range(NUM_LANES + 1)]
    rig.compiler.close()
    for future in futures:
        assert isinstance(future.exception(WAIT_S), WorkerUnavailable)
    assert rig.trials.is_closed
    with pytest.raises(WorkerUnavailable):
        rig.compiler.compile(_regex("a"))
    rig.trials.gate.set()  # a lane that comes back too late changes nothing


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    trials = GrammarTrials(LibraryArguments(str(FOLDER), VOCAB_SIZE, (END,), 1), 256 << 20)
    yield trials
    trials.close()


def test_what_passes_its_trial_is_compiled_as_without_one() -> None:
    compiler = GrammarCompiler.of_checkpoint(FOLDER, VOCAB_SIZE, [END], GrammarSettings())
    futures = [compiler.compile(grammar) for grammar in ALL]
    for grammar, future in zip(ALL, futures, strict=True):
        state = GrammarState(future.result(WAIT_S))
        assert mask(state).tolist() == mask(GrammarState(compiled(grammar))).tolist()
    compiler.close()


_NESTED = '{"type":"array","items":' * 300 + "{}" + "}" * 300
_CHAIN = "{" + "".join(f'"d{i}":{{"$ref":"#/$defs/d{i + 1}"}},' for i in range(20_000))


@pytest.mark.parametrize(
    ("kind", "source", "timeout_s", "limit"),
    [
        # 10 s and more, and hours for a little more of it.
        (GrammarKind.JSON_SCHEMA, _NESTED, 0.2, "compiled within 0.2 s"),
        (GrammarKind.REGEX, "a?" * 5000, 0.2, "compiled within 0.2 s"),
        # Compiles, but a first mask takes minutes.
        (GrammarKind.REGEX, "(([a-z ]{0,100}){0,100}){0,100}", 0.2, "within 0.2 s|followed in"),
        # Overflows the stack.
        (
            GrammarKind.JSON_SCHEMA,
            f'{{"$ref":"#/$defs/d0","$defs":{_CHAIN}"d20000":{{}}}}}}',
            WAIT_S,
            "within 256 MiB, and crashes nothing",
        ),
        # Takes gigabytes.
        (GrammarKind.REGEX, "a" * 3_000_000, WAIT_S, "within 256 MiB, and crashes nothing"),
    ],
    ids=["nested schema", "optional parts", "nested counts", "chain of $ref", "long word"],
)
def test_a_harmful_grammar_ends_its_trial_only(
    trials: GrammarTrials, kind: GrammarKind, source: str, timeout_s: float, limit: str
) -> None:
    assert trials.check(ALL[0], WAIT_S) == ""
    helper = trials._helper
    with pytest.raises(InvalidRequest, match=limit) as caught:
        trials.check(Grammar(kind, source), timeout_s)
    assert isinstance(caught.value, TrialFailed) or "followed" in limit
    assert trials.check(ALL[0], WAIT_S) == ""
    assert trials._helper is helper


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (GrammarKind.EBNF, "root ::= root", "can go on from"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "can go on from"),
        (GrammarKind.EBNF, 'root ::= "a" x\nx ::= x "b"', "can go on from"),
        (GrammarKind.EBNF, "root ::= x*\nx ::= x x | y x | [a-z]+\ny ::= y y | [a-z]*", "followed"),
        # What xgrammar would pass over with a warning.
        (GrammarKind.REGEX, "a$b", "'\\$' should be at the end of the regex"),
        (GrammarKind.JSON_SCHEMA, '{"allOf": [{}, {}]}', "allOf with multiple options"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"oneOf": [{"type": "integer"}, {"type": "integer", "maximum": 10}]}',
            "oneOf with overlapping",
        ),
        (GrammarKind.JSON_SCHEMA, '{"type": "number", "multipleOf": 0.5}', "multipleOf is not"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://x/y"}', "URI should either be"),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "string", "pattern": "^a(?=b)$"}',
            "Lookahead assertion is not supported",
        ),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "string", "pattern": "^a$", "maxLength": 1}',
            "pattern combined with minLength/maxLength",
        ),
    ],
)
def test_a_trial_finds_what_only_walking_or_a_warning_shows(
    trials: GrammarTrials, kind: GrammarKind, source: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"grammar\.{kind.value} is .*{reason}"):
        trials.check(Grammar(kind, source), WAIT_S)


def test_a_helper_that_dies_is_replaced(trials: GrammarTrials) -> None:
    trials.check(ALL[1], WAIT_S)
    helper = trials._helper
    assert helper is not None
    os.kill(helper.pid, signal.SIGKILL)
    helper.wait()
    assert trials.check(ALL[1], WAIT_S) == ""


@pytest.mark.parametrize("is_whole_group", [False, True])
def test_a_helper_that_is_killed_during_a_trial_costs_nobody_an_answer(
    trials: GrammarTrials, is_whole_group: bool
) -> None:
    """Whether its child, which is at the grammar, goes with it or answers yet."""
    slow = Grammar(GrammarKind.REGEX, "(a?b?c?){400}")
    trials.check(ALL[1], WAIT_S)
    helper = trials._helper
    assert helper is not None

    def kill() -> None:
        if is_whole_group:
            os.killpg(helper.pid, signal.SIGKILL)
        else:
            os.kill(helper.pid, signal.SIGKILL)

    killer = threading.Timer(0.05, kill)
    killer.start()
    while killer.is_alive():
        trials.check(slow, WAIT_S)
    helper.wait()
    trials.check(slow, WAIT_S)
    assert trials._helper is not helper


def test_closed_trials_fail() -> None:
    closed = GrammarTrials(LibraryArguments(str(FOLDER), VOCAB_SIZE, (END,), 1), 1 << 28)
    closed.close()
    with pytest.raises(InternalError, match="No grammar can be tried out"):
        closed.check(ALL[0], WAIT_S)


_WORKER = f"""
import sys
from hocket.execution.grammars.compiler import GrammarCompiler
from hocket.grammar_settings import GrammarSettings
from hocket.request_params import Grammar, GrammarKind

compiler = GrammarCompiler.of_checkpoint({str(FOLDER)!r}, 4096, [1], GrammarSettings())
assert "xgrammar" not in sys.modules and compiler._trials._helper is None
compiler.compile(Grammar(GrammarKind.REGEX, "[a-z]+")).result(120)
compiler.compile(Grammar(GrammarKind.REGEX, "a?" * 5000))
print(compiler._trials._helper.pid, flush=True)
"""


def test_a_worker_loads_nothing_before_and_ends_without_waiting_for_a_trial() -> None:
    """Its helper ends with it, although nobody closed anything."""
    command = [sys.executable, "-c", _WORKER]
    done = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=250, check=True
    )
    helper = int(done.stdout)
    deadline = threading.Event()
    for _ in range(600):
        if not Path(f"/proc/{helper}").exists():
            return
        deadline.wait(0.1)
    pytest.fail(f"the helper process {helper} outlived its worker by a minute")
