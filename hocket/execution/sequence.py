"""One request as the engine thread sees it on one worker: its tokens and how far its KV reaches.

The scheduler decides what runs; `model_runner` advances the sequence. The intervals, for n tokens
of which the first c = `num_computed` have KV:

    [0, c)        main-model KV slots that are valid (slot i holds token i)
    [1, c - m]    MTP slots that are valid (slot i + 1 is made from (h_i, t_{i+1})), where m is
                  `num_pending`: the entries made from h_{c-m} .. h_{c-1} wait
    [c, n)        tokens not yet computed: the rest of the prompt, or the one token that the last
                  step emitted (c = n - 1 whenever the sequence decodes)
    [0, s)        s = `num_shared`: slots of blocks that other requests may read too; never written
    [0, x)        x = `num_complete`: slots that hold all a block is shared for, main and MTP

Draft steps write MTP slots and main slots at and beyond c; those bytes never count.

With M > 1 MTP modules the valid slots of module j are [j, c - m]: its slot i + j is made from row i
and t_{i+j}, so the next entries need rows that go M - 1 further back. `pending_hidden` begins with
these, `num_context` of them (fewer at the start of a sequence), and the m waiting ones follow.

A prefix hit of f blocks starts with s = f * block_tokens and c = s - 1: slot s - 1 is valid, but
its token is computed once more, for the hidden state that the next token and the MTP entry of slot
s are made from. Its own entry is not written again: outside of batch-invariant mode it may have
other bits, and others are reading the block. M modules need M tokens: c = s - M. A hit whose hidden
state came with a hand-off starts at c = n - 1 like any imported prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from hocket.errors import HocketError
from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.sampling.constraints import Constraints
from hocket.execution.step_failures import RequestFault
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import DraftCounts, FinishReason, PromptLogprobs, RequestKey, TokenLogprobs


@dataclass
class Sequence:
    """A running request; mutable, owned by the engine thread.

    `token_ids` is prompt and accepted output; the last `num_generated` tokens of the prompt are
    output of an earlier attempt. `block_table` covers every slot a step may write.
    `pending_hidden` is [num_context + m, H] in the model's dtype, or None when nothing waits.
    `grammar` is what `sampling.grammar` was compiled to. `prompt_logprobs`: those computed and not
    told yet, up to that of the token at `num_computed`.
    """

    key: RequestKey
    token_ids: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    stopping: StoppingParams
    block_table: list[int]
    num_computed: int = 0
    num_shared: int = 0
    num_generated: int = 0
    pending_hidden: Tensor | None = None
    num_context: int = 0
    grammar: CompiledGrammar | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)
    has_lapsed: bool = False
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    _constraints: Constraints | None = field(default=None, init=False)
    _num_complete: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        assert 0 < self.prompt_tokens <= tokens, (self.prompt_tokens, tokens)
        assert 0 <= self.num_computed < tokens, (self.num_computed, tokens)
        rows = self.num_context + self.num_pending
        assert 0 <= self.num_pending <= rows <= self.num_computed, (rows, self.num_computed)
        assert (self.grammar is None) == (self.sampling.grammar is None), self.key
        assert self.num_generated < self.prompt_tokens, (self.num_generated, self.prompt_tokens)

    @property
    def is_constrained(self) -> bool:
        """Whether anything comes between the model's logits and the sampler."""
        return Constraints.are_needed(self.sampling, self.stopping)

    @property
    def num_client_tokens(self) -> int:
        """Tokens of the prompt as the client sent it."""
        return self.prompt_tokens - self.num_generated

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that max_tokens still allows."""
        return self.stopping.max_tokens - self.output_tokens

    @property
    def num_pending(self) -> int:
        if self.pending_hidden is None:
            return 0
        return self.pending_hidden.shape[0] - self.num_context

    def lapse(self) -> None:
        """Gives up drafting for good: the hidden states that wait are forgotten, so that neither
        memory nor the work of making their entries grows while nothing drafts. Blocks from here on
        lack their MTP entries and are not shared."""
        self._num_complete = self.num_complete
        self.has_lapsed = True
        self.pending_hidden, self.num_context = None, 0

    @property
    def num_complete(self) -> int:
        """x: slots [0, x) are complete in all layers, so blocks wholly inside may be shared.

        A worker that never drafts writes no MTP entries of its output and keeps no hidden states:
        its blocks lack them, but are shared with requests of the same worker only, which never
        draft either.
        """
        if self.has_lapsed:
            return self._num_complete
        return min(self.num_computed, self.num_computed - self.num_pending + 1)

    def keep_hidden(self, hidden_RH: Tensor, num_kept: int, num_pending: int = 0) -> None:
        """Of these rows, which end with h_{c-1}, keep the last `num_kept` (0: none): `num_pending`
        whose entries wait, and context before them. Copied, as they may be few of a chunk's."""
        self.pending_hidden = hidden_RH[-num_kept:].clone() if num_kept else None
        self.num_context = min(num_kept, hidden_RH.shape[0]) - num_pending

    @property
    def is_prefilled(self) -> bool:
        """Only the newest token lacks KV: the sequence can decode."""
        return self.num_computed == len(self.token_ids) - 1

    def constrain(self, logits_RV: Tensor, drafts: Seq[int] = (), first: int = 0) -> None:
        """Applies the request's constraints to logits in place: row i follows `token_ids` and the
        first `first + i` of `drafts`. See `Constraints.apply`.

        Raises RequestFault when its grammar allows nothing any more, or takes too long.
        """
        if not self.is_constrained:
            return
        if self._constraints is None:
            stopping = self.stopping.before(self.num_generated)
            prompt = self.token_ids[: self.num_client_tokens]
            self._constraints = Constraints(
                self.sampling, stopping, prompt, self.grammar, logits_RV.device
            )
        num_known = self.num_client_tokens + self._constraints.num_output
        try:
            self._constraints.commit(self.token_ids[num_known:])
            self._constraints.apply(logits_RV, drafts, first)
        except HocketError as error:
            raise RequestFault(self.key, error) from error

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Those computed since the last call; None when there are none."""
        if not self.prompt_logprobs:
            return None
        found, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        last = min(self.num_computed, self.num_client_tokens - 1)
        return PromptLogprobs(self.key, last - len(found) + 1, found)

    def finish_reason(self) -> FinishReason | None:
        """Why the output ends with its newest token; None when it goes on."""
        if self.token_ids[-1] in self.stopping.stop_token_ids:
            return FinishReason.STOP
        if self.remaining_tokens <= 0:
            return FinishReason.LENGTH
        return None
