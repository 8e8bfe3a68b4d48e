"""Compiles the grammars of requests beside the engine: tried out, limited, each one once.

A worker's `grammar_requests` asks it before a request is admitted, and gets a future. Two threads
take the grammars in turn through `trials.py` and `library.py`; what they make is kept for
the next request with the same grammar, and so is why one was refused. xgrammar is imported, and
the process for trials started, with the first grammar.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hocket.clock import Clock, SystemClock
from hocket.environment import num_cpus
from hocket.errors import HocketError, InternalError, InvalidRequest, Overloaded, WorkerUnavailable
from hocket.execution.grammars.library import GrammarLibrary, LibraryArguments
from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.grammars.trials import GrammarTrials, TrialFailed
from hocket.grammar_settings import GrammarSettings
from hocket.request_params import Grammar

NUM_LANES = 2
"""Grammars that are compiled at a time."""
RETRY_S = 60.0
"""For so long a grammar whose trial hit a limit is not tried again: the machine may be busy."""

_logger = logging.getLogger(__name__)


class Library(Protocol):
    """What compiles; see `GrammarLibrary`."""

    def compile(self, grammar: Grammar) -> CompiledGrammar: ...

    def load(self, grammar: Grammar, serialized: str) -> CompiledGrammar: ...


class Trials(Protocol):
    """What is asked before; see `GrammarTrials`."""

    def start(self) -> None: ...

    def check(self, grammar: Grammar, timeout_s: float) -> str: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Entry:
    future: Future[CompiledGrammar]
    num_bytes: int
    num_waiting: int = 0
    has_begun: bool = False
    is_finished: bool = False
    expires_at_s: float = float("inf")


class GrammarCompiler:
    """Compiled grammars of one checkpoint. Its methods may be called from any thread."""

    def __init__(
        self,
        make_library: Callable[[], Library],
        trials: Trials,
        settings: GrammarSettings,
        clock: Clock,
    ) -> None:
        """`make_library` is called once, with the first grammar; `trials` are closed with this."""
        self._make_library = make_library
        self._trials = trials
        self._settings = settings
        self._clock = clock
        self._library: Library | None = None
        self._library_lock = threading.Lock()

        self._lock = threading.Lock()
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()  # least recently used first
        self._waiting: queue.SimpleQueue[tuple[Grammar, _Entry] | None] = queue.SimpleQueue()
        self._num_unfinished = 0
        self._num_lanes = 0
        self._is_closed = False

    @classmethod
    def of_checkpoint(
        cls,
        folder: str | Path,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        settings: GrammarSettings,
    ) -> GrammarCompiler:
        """`vocab_size` is the width of the model's logits, `stop_token_ids` its end tokens; without
        any, the tokenizer's end token. Starts, imports and reads nothing yet."""
        arguments = LibraryArguments(
            str(folder), vocab_size, tuple(stop_token_ids), min(8, max(1, num_cpus() // 2))
        )
        trials = GrammarTrials(arguments, settings.compile_memory_bytes)
        return cls(lambda: GrammarLibrary(*arguments), trials, settings, SystemClock())

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """The grammar, compiled; the same future for all who ask for the same. Who does not want it
        any more calls `abandon`.

        Raises InvalidRequest when it is too long and Overloaded when too many wait. The future
        raises InvalidRequest with what is wrong with the grammar, or the limit that it exceeds.
        """
        num_bytes, most = len(grammar.source.encode(errors="replace")), self._settings
        if num_bytes > most.max_source_bytes:
            size = f"{num_bytes} bytes"
            raise InvalidRequest(
                f"grammar.{grammar.kind.value}", size, f"at most {most.max_source_bytes} bytes"
            )
        with self._lock:
            if self._is_closed:
                raise WorkerUnavailable("The worker stops.")
            entry = self._entries.get(grammar)
            if entry is not None and self._clock.now() < entry.expires_at_s:
                self._entries.move_to_end(grammar)
                entry.num_waiting += 1
                return entry.future
            if self._num_unfinished >= NUM_LANES + most.max_waiting:
                raise Overloaded(f"{most.max_waiting} grammars wait to be compiled already.")
            entry = _Entry(Future(), num_bytes, num_waiting=1)
            entry.future.set_running_or_notify_cancel()  # nobody may cancel it for the others
            self._entries[grammar] = entry
            self._entries.move_to_end(grammar)
            self._num_unfinished += 1
            self._waiting.put((grammar, entry))
            if self._num_lanes < min(NUM_LANES, self._num_unfinished):
                self._num_lanes += 1
                threading.Thread(target=self._run_lane, name="grammars", daemon=True).start()
        return entry.future

    def abandon(self, grammar: Grammar) -> None:
        """One who asked for it is gone. What nobody waits for any more makes room in the queue; one
        that is being compiled already is kept for the next."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None or entry.is_finished:
                return
            entry.num_waiting -= 1
            is_unwanted = not (entry.num_waiting or entry.has_begun)
        if is_unwanted:
            self._finish(entry, WorkerUnavailable("Nobody waits for this grammar any more."))

    def close(self) -> None:
        """Ends the process of the trials; what is unfinished fails. Safe to call again."""
        with self._lock:
            self._is_closed = True
            unfinished = [entry for entry in self._entries.values() if not entry.is_finished]
            for _ in range(self._num_lanes):
                self._waiting.put(None)
        self._trials.close()
        for entry in unfinished:
            self._finish(entry, WorkerUnavailable("The worker stops."))

    def _run_lane(self) -> None:
        while (job := self._waiting.get()) is not None:
            grammar, entry = job
            with self._lock:
                if entry.is_finished:
                    continue
                entry.has_begun = True
            try:
                self._finish(entry, self._compile(grammar))
            except HocketError as error:
                self._finish(entry, error)
            except Exception as error:
                _logger.exception("Compiling a grammar failed.")
                self._finish(entry, InternalError(f"Compiling a grammar failed: {error}."))

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self._trials.start()  # both load xgrammar, which takes seconds
        with self._library_lock:
            if self._library is None:
                self._library = self._make_library()
        serialized = self._trials.check(grammar, self._settings.compile_timeout_s)
        library = self._library
        return library.load(grammar, serialized) if serialized else library.compile(grammar)

    def _finish(self, entry: _Entry, outcome: CompiledGrammar | HocketError) -> None:
        with self._lock:
            if entry.is_finished:
                return
            entry.is_finished = True
            self._num_unfinished -= 1
            if isinstance(outcome, CompiledGrammar):
                entry.num_bytes += outcome.num_bytes
            elif isinstance(outcome, TrialFailed):
                entry.expires_at_s = self._clock.now() + RETRY_S
            elif not isinstance(outcome, InvalidRequest):
                entry.expires_at_s = 0.0  # not the grammar's fault
            self._drop_oldest()
        if isinstance(outcome, HocketError):
            entry.future.set_exception(outcome)
        else:
            entry.future.set_result(outcome)

    def _drop_oldest(self) -> None:
        kept = {grammar: entry for grammar, entry in self._entries.items() if entry.is_finished}
        excess = sum(entry.num_bytes for entry in kept.values()) - self._settings.cache_bytes
        for grammar, entry in kept.items():
            if excess <= 0:
                break
            del self._entries[grammar]
            excess -= entry.num_bytes
