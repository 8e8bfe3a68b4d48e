"""Errors as statuses and as events, and back."""

from __future__ import annotations

import grpc
import pytest

from hocket import errors
from hocket.errors import HocketError, InvalidRequest, Overloaded, WorkerUnavailable
from hocket.rpc.status import (
    error_from_failed,
    error_from_rpc,
    failed_from_error,
    status_from_error,
)
from hocket.types import RequestKey

# Other packages may derive errors that never cross a wire.
KINDS = [
    kind
    for kind in HocketError.__subclasses__()
    if kind is not InvalidRequest and kind.__module__ == errors.__name__
]
ERRORS = [
    InvalidRequest("top_p", 2.0, "at most 1", "Lower it."),
    *(kind("it went wrong", name="value", number=3) for kind in KINDS),
]


def rpc_error(
    code: grpc.StatusCode, message: str, details: bytes | None = None
) -> grpc.aio.AioRpcError:
    pairs = [] if details is None else [("grpc-status-details-bin", details)]
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*pairs), details=message
    )


def assert_same(error: HocketError, other: HocketError) -> None:
    assert type(error) is type(other)
    assert str(error) == str(other)
    for name in ("code", "reason", "is_retryable", "metadata"):
        assert getattr(error, name) == getattr(other, name), name


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_survives_as_a_status_and_as_an_event(error: HocketError) -> None:
    status = status_from_error(error)
    code = next(c for c in grpc.StatusCode if c.value[0] == status.code)
    assert_same(error_from_rpc(rpc_error(code, status.message, status.SerializeToString())), error)
    assert_same(error_from_failed(failed_from_error(RequestKey("r"), error)), error)


def test_every_error_of_the_tree_has_its_own_reason() -> None:
    reasons = [kind.reason for kind in (InvalidRequest, *KINDS)]
    assert len(set(reasons)) == len(reasons)
    named = {n for n, v in vars(errors).items() if isinstance(v, type) and n != "HocketError"}
    assert {type(e).__name__ for e in ERRORS} == named - {"Mapping"}


def test_statuses_that_grpc_made_become_the_nearest_error() -> None:
    refused = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused"))
    assert isinstance(refused, WorkerUnavailable)
    assert refused.is_retryable
    too_large = "SERVER: Received message larger than max (20 vs. 10)"
    oversized = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, too_large))
    assert isinstance(oversized, Overloaded)
    assert not oversized.is_retryable
    under_a_write = error_from_rpc(rpc_error(grpc.StatusCode.INTERNAL, "Internal error from Core"))
    assert isinstance(under_a_write, WorkerUnavailable)
    assert under_a_write.is_retryable
    other = error_from_rpc(rpc_error(grpc.StatusCode.UNIMPLEMENTED, "no such method"))
    assert type(other) is HocketError
    assert (other.code, other.reason) == (12, "UNIMPLEMENTED")
