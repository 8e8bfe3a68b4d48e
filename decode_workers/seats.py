"""Which request has which blocks on a decode worker, and what of it was told already.

`engine.py` makes a `LiveRequest` of each request that comes and keeps it to its end. `Seats` gives
it blocks when the scheduler admits it, more as it grows, and takes them back when it ends or gives
way. The blocks of one request, f hits of the prefix cache and p blocks of the prompt:

    [0, f)    found here: shared with others, read only, held once for this request
    [f, p)    while it `is_importing` the import table's, which frees them when the import fails
    [p, ..)   the output's: this request's own, and so is [f, p) once the import is over
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hocket.execution.grammars.states import CompiledGrammar
from hocket.execution.sequence import Sequence
from hocket.execution.waiting_rows import WaitingRows
from hocket.kv.block_pool import BlockPool
from hocket.kv.prefix_cache import Prefix, PrefixCaching
from hocket.scheduling.request_limits import blocks_for
from hocket.types import DraftCounts, StartRequest, Usage


@dataclass(slots=True)
class LiveRequest:
    """A request from its arrival to its end. `request` is as it came: what it put out before it
    gave way counts as output here, and as prompt in `sequence`.

    `prompt_blocks` are those of the prompt; `blocks` are empty while it waits, `sequence` is None
    while it waits or imports. `cached_tokens` are the prompt tokens that nobody had to compute for
    it. `grammar`: what its grammar was compiled to. `hand_off_fault`: why its prompt is computed
    here although it was handed over."""

    request: StartRequest
    prefix: Prefix
    prompt_blocks: int
    grammar: CompiledGrammar | None = None
    blocks: list[int] = field(default_factory=list[int])
    num_hits: int = 0
    is_importing: bool = False
    sequence: Sequence | None = None
    has_joined: bool = False
    has_given_way: bool = False
    hand_off_fault: str = ""
    cached_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def prompt_tokens(self) -> int:
        """Of the client's prompt: without what an earlier attempt put out."""
        return len(self.request.token_ids) - self.request.generated_tokens

    @property
    def output_tokens(self) -> int:
        """Put out by this attempt so far."""
        return self.running.num_tokens - len(self.request.token_ids)

    @property
    def running(self) -> Sequence:
        assert self.sequence is not None, f"{self.request.key} takes no steps yet"
        return self.sequence

    def usage(self) -> Usage:
        """As it stands, counted once whatever was computed again."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            drafts=self.running.drafts,
        )


class Seats:
    """The blocks of all requests of one worker. The engine thread owns it."""

    def __init__(
        self,
        pool: BlockPool,
        prefixes: PrefixCaching,
        block_tokens: int,
        start_behind: Callable[[int], int],
    ) -> None:
        """`start_behind`: the runner's."""
        self._start_behind = start_behind
        self._pool = pool
        self._prefixes = prefixes
        self._block_tokens = block_tokens

    def arrive(self, request: StartRequest) -> LiveRequest:
        """A new request, without blocks. Its prompt's are named once: it may wait for long."""
        is_fresh = request.sampling.prompt_logprobs is not None
        prefix = self._prefixes.prefix(request.token_ids, request.tenant_salt, is_fresh)
        prompt_blocks = blocks_for(len(request.token_ids), self._block_tokens)
        return LiveRequest(request, prefix, prompt_blocks)

    def take(self, live: LiveRequest, num_blocks: int) -> bool:
        """Gives a request its blocks, as many of them as possible from the prefix cache; False,
        and none, when the pool has too few."""
        hits = self._prefixes.look_up(live.prefix)
        if num_blocks - hits.num_blocks + hits.num_free > self._pool.num_free:
            return False
        live.num_hits = hits.num_blocks
        live.blocks = self._prefixes.claim(live.prefix)
        live.blocks += self._pool.allocate(num_blocks - hits.num_blocks)
        return True

    def grow(self, live: LiveRequest, num_slots: int) -> bool:
        """Gives a request blocks up to `num_slots`; False, and none, when the pool has too few."""
        missing = blocks_for(num_slots, self._block_tokens) - len(live.blocks)
        if missing > self._pool.num_free:
            return False
        live.blocks += self._pool.allocate(max(0, missing))
        return True

    def hit_tokens(self, live: LiveRequest) -> int:
        """Tokens in the blocks that the prefix cache had."""
        return live.num_hits * self._block_tokens

    def cached_tokens(self, live: LiveRequest) -> int:
        """Of these, those that are not computed again, were the prompt computed here: the last ones
        are, for their hidden states."""
        return self._start_behind(self.hit_tokens(live))

    def begin_sequence(self, live: LiveRequest, request: StartRequest) -> None:
        """The prompt of `request`, with what was put out before, is to be computed here."""
        cached_tokens = self.cached_tokens(live)
        live.sequence = Sequence(
            key=request.key,
            token_ids=list(request.token_ids),
            prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            block_table=live.blocks,
            num_computed=cached_tokens,
            num_shared=self.hit_tokens(live),
            num_generated=request.generated_tokens,
            grammar=live.grammar,
            drafts=live.drafts,
        )
        if not live.has_given_way:
            live.cached_tokens = min(cached_tokens, live.prompt_tokens)

    def begin_imported(self, live: LiveRequest, first_token: int, hidden_RH: Tensor | None) -> None:
        """The prompt is here: the sequence goes on with its first token, and the hidden states
        before it, of which the last one is not in the MTP entries yet."""
        request = live.request
        num_context = 0 if hidden_RH is None else len(hidden_RH) - 1
        live.sequence = Sequence(
            key=request.key,
            token_ids=[*request.token_ids, first_token],
            prompt_tokens=len(request.token_ids),
            sampling=request.sampling,
            stopping=request.stopping,
            block_table=live.blocks,
            num_computed=len(request.token_ids),
            num_shared=self.hit_tokens(live),
            num_generated=request.generated_tokens,
            grammar=live.grammar,
            waiting=WaitingRows(hidden_RH, num_context),
        )

    def publish(self, live: LiveRequest) -> None:
        """Lets others share the blocks that are complete."""
        sequence = live.running
        num_complete = sequence.num_complete
        self._prefixes.index(live.prefix, sequence.token_ids, live.blocks, num_complete)

    def give_way(self, live: LiveRequest) -> list[int]:
        """Takes the blocks of a request that is to be computed again later; returns what it put
        out since it was admitted."""
        sequence = live.running
        output = sequence.token_ids[sequence.prompt_tokens :]
        live.drafts = sequence.drafts
        live.has_given_way = True
        self.leave(live)
        return output

    def leave(self, live: LiveRequest) -> None:
        """Takes the blocks of a request that ends or has to wait again. Those of an import that
        failed or was cancelled are not its own any more."""
        blocks = live.blocks
        if live.is_importing:
            blocks = blocks[: live.num_hits] + blocks[live.prompt_blocks :]
        self._pool.free(blocks)
        live.blocks, live.num_hits, live.sequence, live.is_importing = [], 0, None, False
