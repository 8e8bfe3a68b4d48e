"""A `StartRequest` as a `Start` message and its pieces, and back; see `hocket.rpc.convert`.

Sampling, stopping, grammar and acceptance are in the public messages; `control_plane.validation`
reads the same ones from clients.
"""

from __future__ import annotations

import json

from hocket.request_params import (
    Grammar,
    GrammarKind,
    SamplingParams,
    StoppingParams,
    TypicalAcceptance,
)
from hocket.rpc import generation_pb2 as generation
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import (
    handle_from_message,
    handle_to_message,
    key_from_message,
    key_to_message,
    known,
    pack_tokens,
)
from hocket.types import Leg, StartRequest

_LEG_TO_MESSAGE = {
    Leg.PREFILL: worker.LEG_PREFILL,
    Leg.DECODE: worker.LEG_DECODE,
    Leg.WHOLE: worker.LEG_WHOLE,
}
_LEG_FROM_MESSAGE = {number: leg for leg, number in _LEG_TO_MESSAGE.items()}


def grammar_to_message(grammar: Grammar) -> generation.Grammar:
    """What an output must look like."""
    message, source = generation.Grammar(), grammar.source
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            message.json_schema = source
        case GrammarKind.REGEX:
            message.regex = source
        case GrammarKind.EBNF:
            message.ebnf = source
        case GrammarKind.CHOICE:
            message.choice.strings.extend(json.loads(source))
    return message


def grammar_from_message(message: generation.Grammar) -> Grammar:
    """The inverse of `grammar_to_message`. Raises ValueError when none is set."""
    name = message.WhichOneof("grammar")
    if name is None:
        raise ValueError("a grammar of no kind")
    if name == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.strings)))
    return Grammar(GrammarKind(name), getattr(message, name))


def start_to_messages(
    request: StartRequest, piece_tokens: int
) -> tuple[worker.Start, list[worker.StartPiece]]:
    """A Start with at most `piece_tokens` prompt tokens, and the pieces with the rest."""
    sampling, stopping = request.sampling, request.stopping
    key = key_to_message(request.key)
    token_ids = request.token_ids
    start = worker.Start(
        key=key,
        prompt_tokens=len(token_ids),
        token_ids=pack_tokens(token_ids[:piece_tokens]),
        sampling=_sampling_to_message(sampling),
        stopping=generation.Stopping(
            max_tokens=stopping.max_tokens,
            stop_token_ids=sorted(stopping.stop_token_ids),
            min_tokens=stopping.min_tokens,
        ),
        top_logprobs=sampling.top_logprobs,
        max_draft_tokens=request.max_draft_tokens,
        deadline_ms=max(0, round(request.deadline_s * 1000)),
        leg=_LEG_TO_MESSAGE[request.leg],
        export=None if request.export is None else handle_to_message(request.export),
        generated_tokens=request.generated_tokens,
        tenant_salt=request.tenant_salt,
        choice=sampling.choice,
        prompt_logprobs=sampling.prompt_logprobs,
        grammar=None if sampling.grammar is None else grammar_to_message(sampling.grammar),
        typical_acceptance=_acceptance_to_message(sampling.acceptance),
    )
    pieces = [
        worker.StartPiece(
            key=key, offset=offset, token_ids=pack_tokens(token_ids[offset : offset + piece_tokens])
        )
        for offset in range(piece_tokens, len(token_ids), piece_tokens)
    ]
    return start, pieces


def start_from_message(message: worker.Start, token_ids: tuple[int, ...]) -> StartRequest:
    """The request of a Start whose prompt, pieces included, is `token_ids`.

    Raises ValueError for an unknown leg or grammar.
    """
    has_drafts = message.HasField("max_draft_tokens")
    return StartRequest(
        key=key_from_message(message.key),
        token_ids=token_ids,
        sampling=_sampling_from_message(message),
        stopping=StoppingParams(
            max_tokens=message.stopping.max_tokens,
            stop_token_ids=frozenset(message.stopping.stop_token_ids),
            min_tokens=message.stopping.min_tokens,
        ),
        leg=known(_LEG_FROM_MESSAGE, message.leg, "leg"),
        deadline_s=message.deadline_ms / 1000,
        export=handle_from_message(message.export) if message.HasField("export") else None,
        max_draft_tokens=message.max_draft_tokens if has_drafts else None,
        generated_tokens=message.generated_tokens,
        tenant_salt=message.tenant_salt,
    )


def _sampling_to_message(sampling: SamplingParams) -> generation.Sampling:
    return generation.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
    )


def _sampling_from_message(message: worker.Start) -> SamplingParams:
    sampling = message.sampling
    has_penalty = sampling.HasField("repetition_penalty")
    has_logprobs, has_prompt = message.HasField("top_logprobs"), message.HasField("prompt_logprobs")
    acceptance = None
    if message.HasField("typical_acceptance"):
        typical = message.typical_acceptance
        acceptance = TypicalAcceptance(typical.epsilon, typical.delta)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=message.choice,
        top_logprobs=message.top_logprobs if has_logprobs else None,
        prompt_logprobs=message.prompt_logprobs if has_prompt else None,
        repetition_penalty=sampling.repetition_penalty if has_penalty else 1.0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        grammar=grammar_from_message(message.grammar) if message.HasField("grammar") else None,
        acceptance=acceptance,
    )


def _acceptance_to_message(
    acceptance: TypicalAcceptance | None,
) -> generation.TypicalAcceptance | None:
    if acceptance is None:
        return None
    return generation.TypicalAcceptance(epsilon=acceptance.epsilon, delta=acceptance.delta)
