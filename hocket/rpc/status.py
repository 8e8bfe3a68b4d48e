"""A `HocketError` as a gRPC status with rich details, and back.

Servers answer a call through `answered`, or end it with `abort(context, error)`; clients turn what
they caught into the same error with `error_from_rpc`. Between workers and gateway errors travel as
`Failed` events instead: `failed_from_error` and `error_from_failed`. Details carry
google.rpc.ErrorInfo (reason, domain "hocket", metadata), BadRequest with the field for
`InvalidRequest`, RetryInfo where a later try may succeed.
"""

# gRPC's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from hocket.errors import (
    Cancelled,
    DeadlineExceeded,
    HocketError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    WorkerUnavailable,
)
from hocket.types import Failed, RequestKey

_logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

DOMAIN = "hocket"
RETRY_DELAY_S = 1

_REASON_TO_KIND = {kind.reason: kind for kind in HocketError.__subclasses__()}
# For statuses that gRPC itself made, or a server that is not ours.
_CODE_TO_KIND: dict[int, type[HocketError]] = {
    1: Cancelled,
    4: DeadlineExceeded,
    5: ModelNotFound,
    8: Overloaded,
    # A call that ended under a write, whatever its own status was (grpc/grpc issue 36066). An
    # INTERNAL that a server of ours means has our details.
    13: WorkerUnavailable,
    14: WorkerUnavailable,
}


def status_from_error(error: HocketError) -> status_pb2.Status:
    """The google.rpc.Status of an error: code, message and details."""
    details: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata=dict(error.metadata)
        )
    ]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.is_retryable:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.seconds = RETRY_DELAY_S
        details.append(retry)
    return status_pb2.Status(
        code=error.code, message=str(error), details=[_packed(detail) for detail in details]
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: HocketError) -> NoReturn:
    """Ends the call with the error's status. Never returns: gRPC raises to unwind the handler."""
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")


async def answered(
    context: grpc.aio.ServicerContext[Any, Any], answer: Callable[[], Awaitable[_Answer]]
) -> _Answer:
    """The answer of a call, or the call ended with the status of the error. An error that is none
    of ours is a bug: it is logged, and the client learns no more than its name."""
    try:
        return await answer()
    except HocketError as error:
        failure = error
    except Exception as error:
        _logger.exception("a call failed on a bug")
        failure = InternalError(f"internal error: {type(error).__name__}")
    await abort(context, failure)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> HocketError:
    """The error behind a failed call, of the class that the server raised.

    A status without our details becomes the nearest class by its code: a refused connection is
    `WorkerUnavailable`; codes that we never send stay a plain `HocketError` of that code.
    """
    code = rpc_error.code().value[0]
    message = rpc_error.details() or rpc_error.code().name
    for key, value in rpc_error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        assert isinstance(value, bytes), type(value)
        info = error_details_pb2.ErrorInfo()
        status = status_pb2.Status.FromString(value)
        has_retry = any(d.TypeName() == "google.rpc.RetryInfo" for d in status.details)
        if any(detail.Unpack(info) for detail in status.details) and info.domain == DOMAIN:
            return _rebuilt(info.reason, code, message, has_retry, info.metadata)
    kind = _CODE_TO_KIND.get(code, HocketError)
    is_too_large = kind is Overloaded and "larger than max" in message
    return _rebuilt(
        reason=kind.reason if kind is not HocketError else rpc_error.code().name,
        code=code,
        message=message,
        is_retryable=kind.is_retryable and not is_too_large,
        metadata={},
    )


def is_from_grpc(error: HocketError) -> bool:
    """Whether `error_from_rpc` made it of a status of gRPC's own: no server of ours said it."""
    rpc_error = error.__cause__
    if not isinstance(rpc_error, grpc.aio.AioRpcError):
        return False
    keys = (key for key, _ in rpc_error.trailing_metadata() or ())
    return "grpc-status-details-bin" not in keys


def failed_from_error(key: RequestKey, error: HocketError) -> Failed:
    """The event that tells the other side of a Session."""
    return Failed(
        key=key,
        code=error.code,
        message=str(error),
        reason=error.reason,
        is_retryable=error.is_retryable,
        metadata=tuple(sorted(error.metadata.items())),
    )


def error_from_failed(failed: Failed) -> HocketError:
    """The inverse of `failed_from_error`; an unknown reason is a plain `HocketError`."""
    return _rebuilt(
        failed.reason, failed.code, failed.message, failed.is_retryable, dict(failed.metadata)
    )


def _rebuilt(
    reason: str, code: int, message: str, is_retryable: bool, metadata: Mapping[str, str]
) -> HocketError:
    """An error from its parts, past the constructors, which would word the message anew."""
    kind = _REASON_TO_KIND.get(reason, HocketError)
    error = kind.__new__(kind, message)
    error.code, error.reason, error.is_retryable = code, reason, is_retryable
    error.metadata = dict(metadata)
    if isinstance(error, InvalidRequest):
        error.field = error.metadata.get("field", "")
    return error


def _packed(detail: Any) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed
