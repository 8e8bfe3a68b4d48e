"""A `HocketError` as OpenAI's clients expect errors: an HTTP status, headers and a JSON object.

The object is {"error": {"message", "type", "param", "code"}}; `type` and `code` are stable words,
`param` is the field of the request's body. Clients retry as the headers tell them: Retry-After,
and x-should-retry, which OpenAI's own clients obey.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hocket.errors import HocketError, InvalidRequest
from hocket.rpc.status import RETRY_DELAY_S


class BodyTooLarge(InvalidRequest):
    """The body is larger than the server takes."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__("body", f"over {limit_bytes} bytes", f"at most {limit_bytes} bytes")


class BodyTooSlow(HocketError):
    """The client did not finish its body."""

    code = 4
    reason = "BODY_TIMEOUT"


class HttpRefusal(HocketError):
    """The HTTP layer's own errors: no such path, wrong method."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error ready to be sent. `body` is JSON text."""

    status: int
    body: str
    headers: tuple[tuple[str, str], ...]


# (HTTP status, OpenAI's type, OpenAI's code) by gRPC status; None: the error's own reason.
_BY_CODE: dict[int, tuple[int, str, str | None]] = {
    1: (499, "server_error", None),
    3: (400, "invalid_request_error", "invalid_value"),
    4: (504, "timeout_error", None),
    5: (404, "invalid_request_error", None),
    8: (429, "rate_limit_error", "rate_limit_exceeded"),
    9: (500, "server_error", None),
    13: (500, "server_error", None),
    14: (503, "server_error", None),
}
# Our names of fields, as OpenAI calls them. The first that fits counts.
_RENAMED = (
    (re.compile(r"^(sampling|stopping)\."), ""),
    (re.compile(r"^chat\.messages"), "messages"),
    (re.compile(r"^chat$"), "messages"),
    (re.compile(r"^text$"), "prompt"),
    (re.compile(r"^token_ids\.ids"), "prompt"),
    (re.compile(r"^grammar\.(json_schema|regex|ebnf|choice(\.strings)?)"), "grammar"),
    (re.compile(r"^request_id$"), "x-request-id"),
)
_LENGTHS = ("prompt", "stopping.max_tokens")


def error_reply(error: HocketError, params: Mapping[str, str] | None = None) -> ErrorReply:
    """The HTTP form of an error. `params`: what this request calls its prompt, its grammar."""
    status, kind, code = _BY_CODE.get(error.code, (500, "server_error", None))
    message, param = str(error), None
    match error:
        case BodyTooLarge():
            status, code = 413, "request_too_large"
        case BodyTooSlow():
            status, kind = 408, "invalid_request_error"
        case HttpRefusal():
            status, kind = error.status, "invalid_request_error"
            code = "unknown_url" if status == 404 else "method_not_allowed"
        case InvalidRequest():
            if _is_too_long(error):
                code = "context_length_exceeded"
            param = _param(error.field, params or {})
            message = param + message.removeprefix(error.field)
        case _:
            pass
    told = {
        "message": message,
        "type": kind,
        "param": param,
        "code": code or error.reason.lower(),
    }
    headers = [("x-should-retry", "true" if error.is_retryable else "false")]
    if error.is_retryable:
        headers.append(("retry-after", str(RETRY_DELAY_S)))
    body = json.dumps({"error": told}, ensure_ascii=False)
    return ErrorReply(status, body, tuple(headers))


def _param(field: str, params: Mapping[str, str]) -> str:
    for pattern, name in _RENAMED:
        field, count = pattern.subn(name, field)
        if count:
            break
    name, bracket, index = field.partition("[")
    return params.get(name, name) + bracket + index


def _is_too_long(error: InvalidRequest) -> bool:
    """Whether prompt, or prompt and output, exceed the context (and not: are malformed)."""
    return error.field in _LENGTHS and error.metadata.get("limit", "").startswith("at most")
