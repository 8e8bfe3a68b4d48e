"""Every error that Hocket raises on purpose, each with its gRPC status and whether to retry.

    HocketError
    ├── InvalidRequest        INVALID_ARGUMENT     field, value and limit in the details
    ├── ModelNotFound         NOT_FOUND
    ├── Overloaded            RESOURCE_EXHAUSTED   retry later
    ├── DeadlineExceeded      DEADLINE_EXCEEDED
    ├── Cancelled             CANCELLED
    ├── WorkerUnavailable     UNAVAILABLE          retry elsewhere
    ├── GroupLost             UNAVAILABLE          retry elsewhere
    ├── HandOffFailed         UNAVAILABLE          retry elsewhere
    ├── ResizeRefused         ABORTED              retry later
    ├── ApiUnavailable        UNAVAILABLE          retry later
    ├── StoreUnavailable      UNAVAILABLE          retry later
    ├── FingerprintMismatch   FAILED_PRECONDITION
    ├── ConfigError           FAILED_PRECONDITION
    ├── CheckpointError       FAILED_PRECONDITION
    └── InternalError         INTERNAL

`code` is the number of the canonical gRPC status (no grpc import here). `reason` is the stable
word that programs may switch on; `metadata` holds the values behind the message.
"""

from __future__ import annotations

from collections.abc import Mapping


class HocketError(Exception):
    """The root. `str(error)` says what is wrong, the limit, and the way out."""

    code = 13
    reason = "INTERNAL"
    is_retryable = False

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata: Mapping[str, str] = {name: str(value) for name, value in metadata.items()}


class InvalidRequest(HocketError):
    """The client sent something that can never work."""

    code = 3
    reason = "INVALID_REQUEST"

    def __init__(self, field: str, value: object, limit: str, way_out: str = "") -> None:
        shown = "missing" if value is None else repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        message = f"{field} is {shown}; it must be {limit}."
        super().__init__(f"{message} {way_out}".rstrip(), field=field, value=shown, limit=limit)
        self.field = field


class ModelNotFound(HocketError):
    """No such model is served here."""

    code = 5
    reason = "MODEL_NOT_FOUND"


class Overloaded(HocketError):
    """A queue or pool is full; the same request may work later."""

    code = 8
    reason = "OVERLOADED"
    is_retryable = True


class DeadlineExceeded(HocketError):
    """The request's own deadline passed."""

    code = 4
    reason = "DEADLINE_EXCEEDED"


class Cancelled(HocketError):
    """The client left or cancelled."""

    code = 1
    reason = "CANCELLED"


class WorkerUnavailable(HocketError):
    """A worker died, drains or cannot be reached."""

    code = 14
    reason = "WORKER_UNAVAILABLE"
    is_retryable = True


class GroupLost(HocketError):
    """A rank of an expert-parallel group died or hangs, so none of them can go on."""

    code = 14
    reason = "GROUP_LOST"
    is_retryable = True


class HandOffFailed(HocketError):
    """The KV cache did not cross from prefill to decode."""

    code = 14
    reason = "HAND_OFF_FAILED"
    is_retryable = True


class StoreUnavailable(HocketError):
    """Redis does not answer; what needs it can be asked again."""

    code = 14
    reason = "STORE_UNAVAILABLE"
    is_retryable = True


class ResizeRefused(HocketError):
    """Somebody else changed a pool in between, or it is not ours to change now."""

    code = 10
    reason = "RESIZE_REFUSED"
    is_retryable = True


class ApiUnavailable(HocketError):
    """Kubernetes' API server gave no answer, or none that helps."""

    code = 14
    reason = "API_UNAVAILABLE"
    is_retryable = True


class FingerprintMismatch(HocketError):
    """Two workers that cannot pair were asked to."""

    code = 9
    reason = "FINGERPRINT_MISMATCH"


class ConfigError(HocketError):
    """The configuration cannot work; the message names the key."""

    code = 9
    reason = "CONFIG"


class CheckpointError(HocketError):
    """The checkpoint cannot be served; the message names what is missing or unsupported."""

    code = 9
    reason = "CHECKPOINT"


class InternalError(HocketError):
    """A bug of ours."""
