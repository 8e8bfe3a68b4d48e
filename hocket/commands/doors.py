"""The two doors of a gateway that commands call: is this the right one, and if not, what is it?

`check_address` looks at what was typed. `explained` turns what gRPC says of a call on which no
gateway of ours has spoken into what is wrong and where to look; errors of a gateway pass as they
are. `generate`, `status` and `scale` use both.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import HocketError, InvalidRequest, WorkerUnavailable
from hocket.rpc.status import is_from_grpc

UNIMPLEMENTED = 12


@dataclass(frozen=True, slots=True)
class Door:
    """`what` it is, the `key` with its port, and how to ask whether it is there."""

    what: str
    key: str
    question: str


GENERATION = Door("gateway's door for requests", "gateway.port (50051 by default)", "serving there")
OPERATOR = Door(
    "operator's door",
    "gateway.admin_port (50052 by default)",
    "serving, with its operator's door there (gateway.admin_port)",
)


def check_address(address: str) -> None:
    """Raises InvalidRequest unless it is host:port."""
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not (port.isascii() and port.isdecimal()):
        raise InvalidRequest("--address", address, "host:port, as in 127.0.0.1:50051")
    if not 0 < int(port) < 2**16:
        raise InvalidRequest("--address", address, "host:port with a port from 1 to 65535")


def explained(error: HocketError, address: str, door: Door) -> HocketError:
    """The error of a call to `address`, where `door` was meant to be, for whoever typed that."""
    if not is_from_grpc(error):
        return error
    if error.code == UNIMPLEMENTED:
        return _kept(error, f"{address} answers, but is no {door.what}; that is {door.key}.")
    if not isinstance(error, WorkerUnavailable):
        return error
    if "Failed parsing HTTP/2" in str(error):
        text = f"{address} answers, but not in gRPC: that looks like an HTTP port; use {door.key}."
    else:
        text = (
            f"no gateway answers at {address!r} ({cause(error)}); is `hocket up` {door.question}?"
        )
    return WorkerUnavailable(text, address=address)


def cause(error: HocketError) -> str:
    """What gRPC says, without the way there: "connection refused"."""
    text = str(error)
    if text.startswith(("failed to connect", "errors resolving", "DNS resolution failed")):
        text = text.rsplit(": ", 1)[-1].rsplit(":", 1)[-1].rstrip("]").strip()
    return text[:1].lower() + text[1:]


def _kept(error: HocketError, text: str) -> HocketError:
    """The same status in other words."""
    told = HocketError(text)
    told.code, told.reason = error.code, error.reason
    return told
