"""Which tokens may come next under a grammar: one `GrammarState` per sequence, and masks of logits.

In comes a `CompiledGrammar` of `compiler.py`, and the sequence's tokens; out go bitmasks,
which `constraints` lays over the logits before the sampler sees them. A state follows the tokens
that count for good (`commit`) and looks ahead over drafts (`seek`), so every draft prefix has the
mask that plain decoding would have there. After a hand-off, a preemption or a migration it is made
again from the output so far. xgrammar is imported with the first compiled grammar, not before.

Shape letters: R rows of logits, V vocabulary, W = ceil(V / 32) words of a bitmask; bit t % 32 of
word t // 32 says whether token t is allowed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hocket.errors import InternalError, InvalidRequest
from hocket.request_params import Grammar

# CPU time that following all outputs of a grammar may take. Usual grammars take microseconds a
# token; an ambiguous one can take ever longer, and every sequence of the batch waits for it.
SPARE_CPU_S = 1.0
TOKEN_CPU_S = 0.01


def refusal(grammar: Grammar, limit: str) -> InvalidRequest:
    """The error for a grammar that is not `limit`."""
    return InvalidRequest(f"grammar.{grammar.kind.value}", grammar.source, limit)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar over one model's vocabulary of `vocab_size` tokens; sequences share it.

    Its outputs end with one of `stop_token_ids`, the model's own end tokens. `handle` is xgrammar's
    object, `num_bytes` what it says that it holds. `spent` is what all its sequences have cost: a
    grammar that costs too much is refused for all of them, and for those that ask for it later.
    """

    grammar: Grammar
    handle: Any
    stop_token_ids: frozenset[int]
    vocab_size: int
    num_bytes: int
    spent: Spent = field(default_factory=lambda: Spent())


@dataclass(slots=True)
class Spent:
    """CPU seconds, and the tokens that were followed in them."""

    cpu_s: float = 0.0
    num_tokens: int = 0


class GrammarState:
    """Where in its grammar one sequence is. Not thread-safe."""

    def __init__(
        self,
        compiled: CompiledGrammar,
        output_tokens: Seq[int] = (),
        cpu_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`output_tokens` were put out under the same grammar already.

        Raises what `commit` raises.
        """
        from xgrammar import GrammarMatcher

        self._compiled = compiled
        self._matcher = GrammarMatcher(compiled.handle)
        self._num_committed = 0
        self._ahead: list[int] = []  # accepted tokens that are not committed
        self._num_past_end = 0  # tokens after the first end token; the matcher has not seen them
        self._cpu_time = cpu_time
        self.commit(output_tokens)

    @property
    def vocab_size(self) -> int:
        return self._compiled.vocab_size

    @property
    def is_over(self) -> bool:
        """Whether the end token was taken. From there on nothing but end tokens is allowed."""
        return self._matcher.is_terminated()

    def seek(self, tokens: Seq[int]) -> bool:
        """Goes to where `tokens` (drafts) follow the committed tokens.

        False when the grammar does not take them; it is then behind the longest part that it takes.
        Raises InvalidRequest when the grammar costs too much time.
        """
        started = self._cpu_time()
        common = 0
        while common < min(len(tokens), len(self._ahead)) and tokens[common] == self._ahead[common]:
            common += 1
        self._step_back(len(self._ahead) - common)
        for token in tokens[common:]:
            if not self._accept(token):
                break
            self._ahead.append(token)
        self._charge(started, max(0, len(self._ahead) - common))
        return len(self._ahead) == len(tokens)

    def commit(self, tokens: Seq[int]) -> None:
        """`tokens` follow for good.

        Raises InternalError, which names the position in the output, when the grammar does not take
        one: then it was not sampled under it. Raises what `seek` raises.
        """
        if not self.seek(tokens):
            self.fill(empty_masks(1, self.vocab_size))  # it may be that nothing could follow
            position = self._num_committed + len(self._ahead)
            raise InternalError(
                f"Output token {position} is {tokens[len(self._ahead)]}, which its grammar does "
                "not allow there.",
                position=position,
            )
        self._num_committed += len(tokens)
        self._ahead.clear()

    def fill(self, masks_RW: Tensor, row: int = 0) -> None:
        """Writes the mask of the next token to a row; `masks_RW` is int32 on the CPU.

        Raises InvalidRequest when no token at all can follow, and what `seek` raises.
        """
        started = self._cpu_time()
        if self.is_over:
            masks_RW[row] = _mask_of(self._compiled.stop_token_ids, masks_RW.shape[1])
        else:
            self._matcher.fill_next_token_bitmask(masks_RW, row)
        if not masks_RW[row].any():
            way = "a grammar that every beginning it allows can go on from"
            raise refusal(self._compiled.grammar, way)
        self._charge(started)

    def _accept(self, token: int) -> bool:
        if self.is_over:
            is_taken = token in self._compiled.stop_token_ids
            self._num_past_end += is_taken
            return is_taken
        return 0 <= token < self.vocab_size and self._matcher.accept_token(token)

    def _step_back(self, num_tokens: int) -> None:
        del self._ahead[len(self._ahead) - num_tokens :]
        num_past_end = min(num_tokens, self._num_past_end)
        self._num_past_end -= num_past_end
        if num_tokens > num_past_end:
            self._matcher.rollback(num_tokens - num_past_end)

    def _charge(self, started: float, num_tokens: int = 0) -> None:
        spent = self._compiled.spent
        spent.cpu_s += self._cpu_time() - started
        spent.num_tokens += num_tokens
        most_s = SPARE_CPU_S + TOKEN_CPU_S * spent.num_tokens
        if spent.cpu_s > most_s:
            limit = (
                f"a grammar of which {spent.num_tokens} tokens are followed in {most_s:g} s, not "
                f"{spent.cpu_s:.2g}; a less ambiguous one may be"
            )
            raise refusal(self._compiled.grammar, limit)


def apply_masks(state: GrammarState, logits_RV: Tensor, drafts: Seq[int], first: int) -> None:
    """Sets float32 logits of forbidden tokens to -inf, in place: row i follows the committed tokens
    and the first `first + i` of `drafts`.

    Rows behind a draft that the grammar refuses, or that nothing can follow, are left as they are:
    such a draft may well be wrong. Raises InvalidRequest, see `GrammarState.fill`.
    """
    assert logits_RV.shape[1] == state.vocab_size, (logits_RV.shape, state.vocab_size)
    masks_RW = empty_masks(logits_RV.shape[0], state.vocab_size)
    num_rows = 0
    while num_rows < logits_RV.shape[0] and state.seek(drafts[: first + num_rows]):
        try:
            state.fill(masks_RW, num_rows)
        except InvalidRequest:
            if first + num_rows == 0:
                raise
            break
        num_rows += 1
    if num_rows > 0:
        mask_logits(logits_RV[:num_rows], masks_RW[:num_rows])


def empty_masks(num_rows: int, vocab_size: int) -> Tensor:
    """Masks to fill, int32 [R, W] on the CPU."""
    return torch.empty((num_rows, -(-vocab_size // 32)), dtype=torch.int32)


def mask_logits(logits_RV: Tensor, masks_RW: Tensor) -> None:
    """Sets logits (float32, CPU or CUDA) to -inf in place wherever the row's mask has no bit."""
    from xgrammar import apply_token_bitmask_inplace

    # Not its default for CUDA, which needs a C compiler on the worker.
    backend = "cpu" if logits_RV.device.type == "cpu" else "torch_native"
    masks_RW = masks_RW.to(logits_RV.device)
    apply_token_bitmask_inplace(logits_RV, masks_RW, vocab_size=logits_RV.shape[1], backend=backend)


def allowed_tokens(mask_W: Tensor, vocab_size: int) -> np.ndarray:
    """The ids that one row of a mask allows, ascending, int64."""
    bits = np.unpackbits(mask_W.numpy().view(np.uint8), bitorder="little")
    return bits[:vocab_size].nonzero()[0]


def _mask_of(token_ids: frozenset[int], num_words: int) -> Tensor:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
