"""The words that every part of Hocket shares: plain frozen dataclasses, no I/O, no torch.

What crosses a process is protobuf (`hocket.rpc`); `hocket.rpc.convert` turns one into the other.
Sizes are in tokens, blocks or bytes as the name says; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hocket.request_params import SamplingParams, StoppingParams

PROTOCOL_VERSION = 1
"""Of `worker.proto`, as this version speaks it; N and N-1 understand each other."""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names one try of one request; a retry or migration raises `attempt`."""

    request_id: str
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of a chosen token, and the likeliest ones of its position, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What multi-token prediction did for one request or one worker.

    `drafted_by_position[i]`: steps that proposed a draft i; `accepted_by_position[i]`: steps that
    kept drafts 0..i. Their ratio is the survival of position i.
    """

    verify_steps: int = 0
    emitted_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @property
    def drafted_tokens(self) -> int:
        return sum(self.drafted_by_position)

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify step; 0.0 before the first."""
        return self.emitted_tokens / self.verify_steps if self.verify_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def add_step(self, num_drafted: int, num_accepted: int, num_emitted: int) -> DraftCounts:
        """The counts after one more verify step."""
        width = max(num_drafted, len(self.drafted_by_position))
        old_d = self.drafted_by_position + (0,) * (width - len(self.drafted_by_position))
        old_a = self.accepted_by_position + (0,) * (width - len(self.accepted_by_position))
        return DraftCounts(
            verify_steps=self.verify_steps + 1,
            emitted_tokens=self.emitted_tokens + num_emitted,
            drafted_by_position=tuple(n + (i < num_drafted) for i, n in enumerate(old_d)),
            accepted_by_position=tuple(n + (i < num_accepted) for i, n in enumerate(old_a)),
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request consumed and produced."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Two workers may hand over to each other only when all of this is equal.

    The draft length and the software version are not part of it.
    """

    weights: str
    kv_layout: str
    block_tokens: int
    dtype: str
    numerics: str

    @property
    def is_batch_invariant(self) -> bool:
        """Whether equal fingerprints promise equal bits, whatever a request's company; see
        `hocket.model.numerics.numerics_revision`."""
        return self.numerics.partition(" ")[0].endswith("-invariant")

    def difference(self, other: Fingerprint) -> str:
        """Names the fields that differ with both values; empty when equal."""
        names = ("weights", "kv_layout", "block_tokens", "dtype", "numerics")
        pairs = [(n, getattr(self, n), getattr(other, n)) for n in names]
        return ", ".join(f"{n}: {a!r} != {b!r}" for n, a, b in pairs if a != b)


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is, as it says itself; from `busy_s` on, what it did since its start.

    busy_s: seconds of turns that did something.
    computed_prompt_tokens: in prompt chunks.
    decode_steps: that this rank took part in, with a batch or to step with its group.
    decode_step_s: seconds of the turns with a decode step. decode_batch_sum: requests in its batch,
    summed over its steps. emitted_tokens: by decode steps.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    queued_prompt_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    unread_blocks: int = 0
    steps: int = 0
    busy_s: float = 0.0
    computed_prompt_tokens: int = 0
    decode_steps: int = 0
    decode_step_s: float = 0.0
    decode_batch_sum: int = 0
    emitted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExportHandle:
    """Where a decode worker finds an exported prompt; see `worker.proto`."""

    worker_id: str
    worker_epoch: int
    address: str
    slot: int
    slot_epoch: int
    fingerprint: Fingerprint
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """What decode needs beside the KV blocks: prefill's last word on a request."""

    first_token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    usage: Usage
    hidden_state: bytes


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Who a worker is and what it can pair with."""

    worker_id: str
    epoch: int
    role: Role
    address: str
    fingerprint: Fingerprint
    model: str
    num_blocks: int
    block_tokens: int
    block_bytes: int
    max_context_tokens: int
    max_prompt_tokens: int
    max_draft_tokens: int
    has_mtp: bool
    has_prefix_cache: bool = False
    group: str = ""
    rank: int = 0
    group_size: int = 1
    protocol_version: int = PROTOCOL_VERSION
    load: Load = field(default_factory=Load)
    is_draining: bool = False
    transport: str = ""
    metrics_address: str = ""
    synthetic_acceptance: float = 0.0


class Leg(Enum):
    """Which part of a request a worker is asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A request as a worker's engine takes it: the prompt is whole, defaults are filled in.

    `deadline_s` is time left at arrival. `export` is set on the decode leg. The last
    `generated_tokens` of `token_ids` were output of an earlier attempt. `max_draft_tokens` None
    leaves the choice to the worker.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    leg: Leg
    deadline_s: float
    export: ExportHandle | None = None
    max_draft_tokens: int | None = None
    generated_tokens: int = 0
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class Begun:
    """Prefill has reserved the whole prompt; decode may be started with this handle."""

    key: RequestKey
    export: ExportHandle


@dataclass(frozen=True, slots=True)
class Joined:
    """Decode has the prompt's KV and runs the request.

    `cached_tokens` were in its own cache. `recomputed`: the hand-off failed, as `recompute_reason`
    says, and the prompt was computed again here.
    """

    key: RequestKey
    imported_bytes: int
    transport: str
    cached_tokens: int = 0
    recomputed: bool = False
    recompute_reason: str = ""


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """What multi-token prediction did in one step for one request: drafts proposed, drafts kept."""

    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some output tokens; `output_index` is the first one's position in the whole output.

    `logprobs` is empty or has one entry per token. `step` is set when one verify step of decode
    emitted exactly these tokens.
    """

    key: RequestKey
    output_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    step: VerifyStep | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt's tokens from `first_position` on; the first token has none, so that
    positions begin with 1."""

    key: RequestKey
    first_position: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The leg is over; nothing of the request is left on the worker but exported blocks.

    `reason` None: the output goes on elsewhere (a prefill leg that is handed off).
    """

    key: RequestKey
    reason: FinishReason | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The leg ended with an error: the fields of a `HocketError`, as they cross the wire."""

    key: RequestKey
    code: int
    message: str
    reason: str
    is_retryable: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


Event = Begun | Joined | PromptLogprobs | Tokens | Finished | Failed
