"""Between `hocket.types` and protobuf: the only place that knows both.

`x_to_message` builds what `hocket.rpc.session` and the servers send, `x_from_message` is its
inverse; both are total on what the other gives. Token ids travel packed, little-endian uint32.
An unset enum is `None` where the type allows it and a `ValueError` where it does not: a peer that
speaks nonsense is an error, never a default.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from hocket.rpc import generation_pb2 as generation
from hocket.rpc import worker_pb2 as worker
from hocket.types import (
    Begun,
    Bundle,
    DraftCounts,
    Event,
    ExportHandle,
    Failed,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Load,
    PromptLogprobs,
    RequestKey,
    Role,
    TokenLogprobs,
    Tokens,
    Usage,
    VerifyStep,
    WorkerDescription,
)

_IS_BIG_ENDIAN = sys.byteorder == "big"
_UINT32 = "I"
_Name = TypeVar("_Name")
assert array(_UINT32).itemsize == 4, "no 4-byte unsigned int on this platform"

_ROLE_TO_MESSAGE = {Role.PREFILL: worker.ROLE_PREFILL, Role.DECODE: worker.ROLE_DECODE}
_ROLE_FROM_MESSAGE = {number: role for role, number in _ROLE_TO_MESSAGE.items()}
_REASON_TO_MESSAGE = {
    None: generation.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation.FINISH_REASON_LENGTH,
}
_REASON_FROM_MESSAGE = {number: reason for reason, number in _REASON_TO_MESSAGE.items()}


def _plain_fields(kind: type[Any]) -> tuple[str, ...]:
    """The fields that have the same name and value on both sides: all but enums and messages."""
    others = ("key", "role", "fingerprint", "load")
    return tuple(f.name for f in fields(kind) if f.name not in others)


_FINGERPRINT_FIELDS = _plain_fields(Fingerprint)
_LOAD_FIELDS = _plain_fields(Load)
_DESCRIPTION_FIELDS = _plain_fields(WorkerDescription)
_HANDLE_FIELDS = _plain_fields(ExportHandle)
_JOINED_FIELDS = _plain_fields(Joined)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for one that does not fit."""
    packed = array(_UINT32, token_ids)
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`. Raises ValueError when bytes are left over."""
    token_ids = array(_UINT32)
    token_ids.frombytes(packed)
    if _IS_BIG_ENDIAN:
        token_ids.byteswap()
    return tuple(token_ids)


def key_to_message(key: RequestKey) -> worker.RequestKey:
    """A request key as it crosses the wire."""
    return worker.RequestKey(request_id=key.request_id, attempt=key.attempt)


def key_from_message(message: worker.RequestKey) -> RequestKey:
    """The inverse of `key_to_message`."""
    return RequestKey(message.request_id, message.attempt)


def finish_reason_to_message(reason: FinishReason | None) -> generation.FinishReason:
    """`None` is FINISH_REASON_UNSPECIFIED."""
    return _REASON_TO_MESSAGE[reason]


def finish_reason_from_message(reason: generation.FinishReason) -> FinishReason | None:
    """The inverse of `finish_reason_to_message`. Raises ValueError for an unknown number."""
    return known(_REASON_FROM_MESSAGE, reason, "finish reason")


def fingerprint_to_message(fingerprint: Fingerprint) -> worker.Fingerprint:
    """What two workers compare before they pair."""
    return worker.Fingerprint(**_values(fingerprint, _FINGERPRINT_FIELDS))


def fingerprint_from_message(message: worker.Fingerprint) -> Fingerprint:
    """The inverse of `fingerprint_to_message`."""
    return Fingerprint(**_values(message, _FINGERPRINT_FIELDS))


def load_to_message(load: Load) -> worker.Load:
    """How busy a worker is."""
    return worker.Load(**_values(load, _LOAD_FIELDS))


def load_from_message(message: worker.Load) -> Load:
    """The inverse of `load_to_message`."""
    return Load(**_values(message, _LOAD_FIELDS))


def description_to_message(description: WorkerDescription) -> worker.WorkerDescription:
    """The answer to Describe, and what the registry keeps."""
    return worker.WorkerDescription(
        role=_ROLE_TO_MESSAGE[description.role],
        fingerprint=fingerprint_to_message(description.fingerprint),
        load=load_to_message(description.load),
        **_values(description, _DESCRIPTION_FIELDS),
    )


def description_from_message(message: worker.WorkerDescription) -> WorkerDescription:
    """The inverse of `description_to_message`. Raises ValueError for an unknown role."""
    return WorkerDescription(
        role=known(_ROLE_FROM_MESSAGE, message.role, "role"),
        fingerprint=fingerprint_from_message(message.fingerprint),
        load=load_from_message(message.load),
        **_values(message, _DESCRIPTION_FIELDS),
    )


def handle_to_message(handle: ExportHandle) -> worker.ExportHandle:
    """Where an exported prompt is found."""
    return worker.ExportHandle(
        fingerprint=fingerprint_to_message(handle.fingerprint), **_values(handle, _HANDLE_FIELDS)
    )


def handle_from_message(message: worker.ExportHandle) -> ExportHandle:
    """The inverse of `handle_to_message`."""
    return ExportHandle(
        fingerprint=fingerprint_from_message(message.fingerprint),
        **_values(message, _HANDLE_FIELDS),
    )


def logprobs_to_message(logprobs: TokenLogprobs) -> generation.TokenLogprobs:
    """Logprobs are float32 on the wire."""
    return generation.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[generation.TopLogprob(token_id=t, logprob=p) for t, p in logprobs.top],
    )


def logprobs_from_message(message: generation.TokenLogprobs) -> TokenLogprobs:
    """The inverse of `logprobs_to_message`."""
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprobs(message.token_id, message.logprob, top)


def usage_to_message(usage: Usage) -> generation.Usage:
    """Usage with its draft counts side by side; the sums are filled in for clients."""
    drafts = usage.drafts
    return generation.Usage(
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        cached_tokens=usage.cached_tokens,
        drafted_tokens=drafts.drafted_tokens,
        accepted_tokens=drafts.accepted_tokens,
        verify_steps=drafts.verify_steps,
        emitted_tokens=drafts.emitted_tokens,
        drafted_by_position=drafts.drafted_by_position,
        accepted_by_position=drafts.accepted_by_position,
    )


def usage_from_message(message: generation.Usage) -> Usage:
    """The inverse of `usage_to_message`."""
    return Usage(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        drafts=DraftCounts(
            verify_steps=message.verify_steps,
            emitted_tokens=message.emitted_tokens,
            drafted_by_position=tuple(message.drafted_by_position),
            accepted_by_position=tuple(message.accepted_by_position),
        ),
    )


def bundle_to_message(bundle: Bundle) -> worker.Bundle:
    """Prefill's last word on a request."""
    return worker.Bundle(
        first_token=bundle.first_token,
        logprobs=None if bundle.logprobs is None else logprobs_to_message(bundle.logprobs),
        finish_reason=_REASON_TO_MESSAGE[bundle.finish_reason],
        usage=usage_to_message(bundle.usage),
        hidden_state=bundle.hidden_state,
    )


def bundle_from_message(message: worker.Bundle) -> Bundle:
    """The inverse of `bundle_to_message`."""
    has_logprobs = message.HasField("logprobs")
    return Bundle(
        first_token=message.first_token,
        logprobs=logprobs_from_message(message.logprobs) if has_logprobs else None,
        finish_reason=finish_reason_from_message(message.finish_reason),
        usage=usage_from_message(message.usage),
        hidden_state=message.hidden_state,
    )


def event_to_message(event: Event) -> worker.Event:
    """Any event of a leg, with its key."""
    message = worker.Event()
    key = message.key  # field by field is quickest, and there is one of these for every token
    key.request_id, key.attempt = event.key.request_id, event.key.attempt
    match event:
        case Tokens():
            tokens = message.tokens
            tokens.output_index = event.output_index
            tokens.token_ids = pack_tokens(event.token_ids)
            tokens.logprobs.extend(map(logprobs_to_message, event.logprobs))
            if event.step is not None:
                tokens.step.drafted_tokens = event.step.drafted_tokens
                tokens.step.accepted_tokens = event.step.accepted_tokens
        case PromptLogprobs():
            message.prompt_logprobs.first_position = event.first_position
            message.prompt_logprobs.logprobs.extend(map(logprobs_to_message, event.logprobs))
        case Begun():
            message.begun.export.CopyFrom(handle_to_message(event.export))
        case Joined():
            message.joined.CopyFrom(worker.Joined(**_values(event, _JOINED_FIELDS)))
        case Finished():
            message.finished.reason = _REASON_TO_MESSAGE[event.reason]
            message.finished.usage.CopyFrom(usage_to_message(event.usage))
        case Failed():
            failed = message.failed
            failed.code, failed.message, failed.reason = event.code, event.message, event.reason
            failed.retryable = event.is_retryable
            failed.metadata.update(event.metadata)
    return message


def event_from_message(message: worker.Event, key: RequestKey | None = None) -> Event:
    """The inverse of `event_to_message`; `key` spares reading it again. Raises ValueError when no
    event is set."""
    key = key or key_from_message(message.key)
    kind = message.WhichOneof("event")
    if kind is None:
        raise ValueError(f"event of {key} is of an unknown kind")
    return _EVENT_FROM_MESSAGE[kind](key, message)


def _tokens(key: RequestKey, message: worker.Event) -> Event:
    tokens = message.tokens
    logprobs = tuple(map(logprobs_from_message, tokens.logprobs)) if tokens.logprobs else ()
    made = tokens.step
    has_step = tokens.HasField("step")
    step = VerifyStep(made.drafted_tokens, made.accepted_tokens) if has_step else None
    return Tokens(key, tokens.output_index, unpack_tokens(tokens.token_ids), logprobs, step)


def _prompt_logprobs(key: RequestKey, message: worker.Event) -> Event:
    found = message.prompt_logprobs
    return PromptLogprobs(
        key, found.first_position, tuple(map(logprobs_from_message, found.logprobs))
    )


def _begun(key: RequestKey, message: worker.Event) -> Event:
    return Begun(key, handle_from_message(message.begun.export))


def _joined(key: RequestKey, message: worker.Event) -> Event:
    return Joined(key, **_values(message.joined, _JOINED_FIELDS))


def _finished(key: RequestKey, message: worker.Event) -> Event:
    finished = message.finished
    reason = finish_reason_from_message(finished.reason)
    return Finished(key, reason, usage_from_message(finished.usage))


def _failed(key: RequestKey, message: worker.Event) -> Event:
    failed = message.failed
    return Failed(
        key=key,
        **_values(failed, ("code", "message", "reason")),
        is_retryable=failed.retryable,
        metadata=tuple(sorted(failed.metadata.items())),
    )


_EVENT_FROM_MESSAGE: dict[str, Callable[[RequestKey, worker.Event], Event]] = {
    "tokens": _tokens,
    "prompt_logprobs": _prompt_logprobs,
    "begun": _begun,
    "joined": _joined,
    "finished": _finished,
    "failed": _failed,
}


def _values(source: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def known(names: Mapping[Any, _Name], number: int, what: str) -> _Name:
    """What an enum's number stands for. Raises ValueError for an unknown one."""
    if number not in names:
        raise ValueError(f"unknown {what} {number}")
    return names[number]
