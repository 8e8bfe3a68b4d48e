"""The grammars of a worker's requests: compiled aside while the request waits for admission.

An engine gives each new request to `take_in`, holds it in its scheduler while that says so, and
looks into `take_ready` at every turn. What was compiled is kept until `discard`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from hocket.errors import HocketError, InternalError, InvalidRequest
from hocket.execution.grammars.states import CompiledGrammar
from hocket.request_params import Grammar
from hocket.types import RequestKey, StartRequest

POLL_S = 0.002
"""How often an engine that has nothing else to do looks for compiled grammars."""


class Compiles(Protocol):
    """What compiles a grammar in a thread of its own; see `grammars.GrammarCompiler`."""

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]: ...

    def abandon(self, grammar: Grammar) -> None: ...

    def close(self) -> None: ...


class GrammarRequests:
    """Requests with a grammar. Not thread-safe: the engine thread owns it."""

    def __init__(self, compiler: Compiles | None) -> None:
        """`compiler` None: there is no tokenizer here, so every grammar is refused."""
        self._compiler = compiler
        self._pending: dict[RequestKey, Future[CompiledGrammar]] = {}
        self._compiled: dict[RequestKey, CompiledGrammar] = {}
        self._wanted: dict[RequestKey, Grammar] = {}

    def take_in(self, request: StartRequest) -> bool:
        """Whether the request has to wait until `take_ready` names it."""
        if request.sampling.grammar is None:
            return False
        self._wanted[request.key] = request.sampling.grammar
        self._pending[request.key] = self._compile(request.sampling.grammar)
        return True

    def take_ready(self) -> list[tuple[RequestKey, HocketError | None]]:
        """The requests that have waited, since the last call; with an error where the grammar
        cannot be compiled."""
        ready = [(key, future) for key, future in self._pending.items() if future.done()]
        outcomes: list[tuple[RequestKey, HocketError | None]] = []
        for key, future in ready:
            del self._pending[key]
            error = future.exception()
            if error is None:
                self._compiled[key] = future.result()
            elif not isinstance(error, HocketError):
                error = InternalError(f"compiling a grammar failed: {error}")
            outcomes.append((key, error))
        return outcomes

    def of(self, key: RequestKey) -> CompiledGrammar | None:
        """The request's compiled grammar; None when it has none."""
        return self._compiled.get(key)

    def discard(self, key: RequestKey) -> None:
        """The request is over; one without a grammar is no error."""
        self._compiled.pop(key, None)
        if self._pending.pop(key, None) is not None and self._compiler is not None:
            self._compiler.abandon(self._wanted[key])
        self._wanted.pop(key, None)

    def _compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        error: HocketError
        if self._compiler is None:
            error = InvalidRequest(
                "grammar",
                grammar.kind.value,
                "absent: this model has no tokenizer",
            )
        else:
            try:
                return self._compiler.compile(grammar)
            except HocketError as refusal:
                error = refusal
        future: Future[CompiledGrammar] = Future()
        future.set_exception(error)
        return future

    def close(self) -> None:
        """Ends what compiles; safe to call again."""
        if self._compiler is not None:
            self._compiler.close()

    @property
    def wait_s(self) -> float | None:
        """When to look again; None: nothing is being compiled."""
        return POLL_S if self._pending else None
