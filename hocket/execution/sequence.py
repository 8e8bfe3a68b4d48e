"""One request as the engine thread sees it on one worker: its tokens and how far its KV reaches.

The scheduler decides what runs; `model_runner` advances the sequence. The intervals, for n tokens
of which the first c = `num_computed` have KV:

    [0, c)        main-model KV slots that are valid (slot i holds token i)
    [1, c - m]    MTP slots that are valid (slot i + 1 is made from (h_i, t_{i+1})), but for `gap`;
                  m is `num_pending`: the entries made from h_{c-m} .. h_{c-1} wait
    [c, n)        tokens not yet computed: the rest of the prompt, or the one token that the last
                  step emitted (c = n - 1 whenever the sequence decodes)
    [0, s)        s = `num_shared`: slots of blocks that other requests may read too; never written
    [0, x)        x = `num_complete`: slots that hold all a block is shared for, main and MTP

Draft steps write MTP slots and main slots at and beyond c; those bytes never count.

With M > 1 MTP modules the valid slots of module j are [j, c - m]: its slot i + j is made from row i
and t_{i+j}, so the next entries need rows that go M - 1 further back. `waiting` begins with these,
its context (fewer at the start of a sequence), and the m pending ones follow.

While nothing drafts, m does not grow without end: older rows are forgotten, and the MTP slots that
they would have made are a gap. Passes of the MTP modules do not look into it; what follows is made
as always, so drafting goes on at little cost, with drafts that are nearly as good.

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
from hocket.execution.waiting_rows import WaitingRows
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import DraftCounts, FinishReason, PromptLogprobs, RequestKey, TokenLogprobs

MOST_PENDING = 16
"""Hidden states that may wait for the next draft of their sequence."""
NO_GAP = (0, 0)


@dataclass
class Sequence:
    """A running request; mutable, owned by the engine thread.

    `token_ids` is prompt and accepted output; the last `num_generated` tokens of the prompt are
    output of an earlier attempt. `block_table` covers every slot a step may write.
    `gap`: its first slot and the first one behind it in the first MTP module. `grammar` is what
    `sampling.grammar` was compiled to. `prompt_logprobs`: those computed and not told yet, up to
    that of the token at `num_computed`.
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
    waiting: WaitingRows = field(default_factory=WaitingRows)
    gap: tuple[int, int] = NO_GAP
    grammar: CompiledGrammar | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    _constraints: Constraints | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        assert 0 < self.prompt_tokens <= tokens, (self.prompt_tokens, tokens)
        assert 0 <= self.num_computed < tokens, (self.num_computed, tokens)
        assert self.waiting.num_rows <= self.num_computed, (self.waiting, self.num_computed)
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
        return self.waiting.num_pending

    @property
    def num_complete(self) -> int:
        """x: slots [0, x) are complete in all layers, so blocks wholly inside may be shared.

        A worker that never drafts writes no MTP entries of its output and keeps no hidden states:
        its blocks lack them, but are shared with requests of the same worker only, which never
        draft either.
        """
        if self.gap != NO_GAP:
            return self.gap[0]
        return min(self.num_computed, self.num_computed - self.num_pending + 1)

    def keep_hidden(self, hidden_RH: Tensor, num_context: int, num_pending: int = 0) -> None:
        """Of these rows, which end with h_{c-1}, keep the last: `num_pending` whose entries wait,
        and context before them as far as there is some. Copied, as they may be few of a chunk's."""
        num_rows = min(num_context + num_pending, hidden_RH.shape[0])
        kept_RH = hidden_RH[-num_rows:].clone() if num_rows else None
        self.waiting = WaitingRows(kept_RH, num_rows - num_pending)

    def add_hidden(self, hidden_TH: Tensor, first: int, end: int) -> None:
        """Rows `first` to `end` are h_{c-1} and those before it. Of more than `MOST_PENDING` that
        would wait the newer half does."""
        self.waiting.add(hidden_TH, first, end)
        if self.num_pending > max(MOST_PENDING, end - first):
            num_kept = max(MOST_PENDING // 2, end - first)
            self.gap = (self.num_complete, self.num_computed - num_kept + 1)
            self.waiting.keep_newest(num_kept)

    def gap_of(self, module: int) -> tuple[int, int]:
        """Slots without entries in an MTP module, numbered from 0: they end where `gap` does in the
        first one, and a slot later in each further one, as at the start of a sequence."""
        first, end = self.gap
        return (first, end + module) if end else NO_GAP

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
