"""Tries a client's grammar in a process that may be killed, before the worker compiles it.

A few bytes of schema can make xgrammar run for hours, fill the memory or overflow its stack, and a
thread cannot be stopped. So every new grammar is first compiled, and some outputs are walked
through, in a child of a helper process, within a time and a memory limit; only what passes is
compiled in the worker too, or carried over where that is faster. The helper has xgrammar loaded and
forks a child per trial. Over a socket pair of its own each child gets a grammar, answers "+" when
it begins, then a line, empty or why the grammar is refused, then the compiled grammar or nothing.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hocket.errors import InternalError, InvalidRequest
from hocket.execution.grammars.library import GrammarLibrary, LibraryArguments, not_compiled
from hocket.execution.grammars.states import (
    CompiledGrammar,
    GrammarState,
    allowed_tokens,
    empty_masks,
    refusal,
)
from hocket.request_params import Grammar, GrammarKind

START_TIMEOUT_S = 120.0
_NUM_WALKS, _WALK_TOKENS = 4, 32
_ENDING_S = 0.1
_CARRY_S = 1.0  # what took longer to compile is faster to carry over


class TrialFailed(InvalidRequest):
    """The trial did not come to its end; another time it might."""


class GrammarTrials:
    """The worker's end. `check` may be called from several threads."""

    def __init__(self, library: LibraryArguments, memory_bytes: int) -> None:
        """`memory_bytes` that a trial may take on top of what the helper has. Starts nothing."""
        self._library = json.dumps(library)
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._is_closed = False
        self._helper: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Starts the helper process if there is none; it takes seconds to be ready."""
        with self._lock:
            if self._is_closed or (self._helper is not None and self._helper.poll() is None):
                return
            self._stop()
            self._control, theirs = socket.socketpair()
            with theirs:
                self._helper = subprocess.Popen(
                    [sys.executable, "-m", __name__, self._library],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is the worker's affair
                )

    def check(self, grammar: Grammar, timeout_s: float) -> str:
        """Returns when the grammar can be compiled and followed: for `GrammarLibrary.load`, or ""
        where `compile` is faster.

        Where somebody ended the helper under way, that is not the grammar's fault: it is tried once
        more. Raises InvalidRequest with the reason; TrialFailed when the time, the memory or the
        process came to an end; InternalError when no trial could be begun.
        """
        self.start()
        helper = self._helper
        try:
            return self._try(grammar, timeout_s)
        except (TrialFailed, InternalError):
            if self._is_closed or helper is None or _lives(helper):
                raise
        self.start()
        return self._try(grammar, timeout_s)

    def _try(self, grammar: Grammar, timeout_s: float) -> str:
        mine, theirs = socket.socketpair()
        with mine:
            with theirs, suppress(OSError), self._lock:
                if self._control is not None:
                    socket.send_fds(self._control, [b"g"], [theirs.fileno()])
            request = (grammar.kind.value, grammar.source, timeout_s, self._memory_bytes)
            try:
                mine.settimeout(START_TIMEOUT_S)
                mine.sendall(json.dumps(request).encode())
                mine.shutdown(socket.SHUT_WR)
                has_begun = mine.recv(1) == b"+"
            except OSError as error:
                raise InternalError(f"No grammar can be tried out: {error}.") from error
            if not has_begun:
                raise InternalError("No grammar can be tried out: its process ended.")
            mine.settimeout(timeout_s)
            try:
                answer = mine.makefile("rb").read()
            except TimeoutError:
                limit = f"one that can be compiled within {timeout_s:g} s"
                raise TrialFailed(_field(grammar), grammar.source, limit) from None
        if not answer:
            limit = f"one that compiles within {self._memory_bytes >> 20} MiB, and crashes nothing"
            raise TrialFailed(_field(grammar), grammar.source, limit)
        reason, _, serialized = answer.decode().partition("\n")
        if reason:
            raise refusal(grammar, reason)
        return serialized

    def close(self) -> None:
        """Ends the helper and all trials; `check` fails from then on. Safe to call again."""
        with self._lock:
            self._is_closed = True
            self._stop()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._helper is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._helper.pid, signal.SIGKILL)
            self._helper.wait()


def _lives(helper: subprocess.Popen[bytes]) -> bool:
    """Not one that is just ending."""
    try:
        helper.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _field(grammar: Grammar) -> str:
    return f"grammar.{grammar.kind.value}"


def main(arguments: str) -> None:
    """The helper process: stdin is the socket on which it gets a socket per trial."""
    library = GrammarLibrary(*json.loads(arguments))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    control = socket.socket(fileno=os.dup(0))
    while True:
        told, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not told:
            return  # the worker is gone
        if os.fork() == 0:
            try:
                _answer(socket.socket(fileno=sockets[0]), library)
            finally:
                os._exit(0)
        os.close(sockets[0])


def _answer(worker: socket.socket, library: GrammarLibrary) -> None:
    kind, source, timeout_s, memory_bytes = json.loads(worker.makefile("rb").read())
    grammar = Grammar(GrammarKind(kind), source)
    limit_bytes = _data_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Its default action ends the process, whatever it is at.
    signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
    log = os.memfd_create("log")
    os.dup2(log, 2)
    worker.sendall(b"+")
    try:
        started = time.monotonic()
        compiled = library.compile(grammar)
        is_slow = time.monotonic() - started > _CARRY_S
        # A warning says that something in the grammar is passed over.
        if "Warning" in (said := os.pread(log, 4096, 0).decode(errors="replace")):
            raise not_compiled(grammar, said.splitlines()[0])
        _walk(compiled)
        answer = "\n" + (compiled.handle.serialize_json() if is_slow else "")
    except InvalidRequest as error:
        if "bad_alloc" in str(error):
            return  # as when the memory limit ends the process
        answer = " ".join(error.metadata["limit"].split()) + "\n"
    worker.sendall(answer.encode(errors="replace"))


def _walk(compiled: CompiledGrammar) -> None:
    """Follows some random outputs. Raises InvalidRequest where that is not possible."""
    chance = random.Random(0)
    masks = empty_masks(1, compiled.vocab_size)
    for _ in range(_NUM_WALKS):
        state = GrammarState(compiled)
        for _ in range(_WALK_TOKENS):
            state.fill(masks)
            state.commit([int(chance.choice(allowed_tokens(masks[0], compiled.vocab_size)))])


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1])
