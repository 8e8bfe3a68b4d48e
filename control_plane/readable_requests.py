"""Refuses what is no protobuf message of its method as INVALID_ARGUMENT, with details.

gRPC's Python server answers a message that it cannot parse (a string that is not UTF-8, a cut
message) with UNKNOWN, which reads as a fault of ours. `ReadableRequests` goes into the gateway's
server as an interceptor and parses requests itself, inside the handler, where an error can be
answered. Only calls with a single request are touched.
"""

# gRPC's own types are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hocket.errors import InvalidRequest
from hocket.rpc.status import abort

_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ReadableRequests(grpc.aio.ServerInterceptor):
    """See the module."""

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        parse, behaviour = handler.request_deserializer, handler.unary_unary or handler.unary_stream

        async def answer(packed: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                request = parse(packed)
            except DecodeError as error:
                await abort(context, _unreadable(packed, error))
            return await behaviour(request, context)

        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(answer, None, handler.response_serializer)


def _unreadable(packed: bytes, error: DecodeError) -> InvalidRequest:
    limit = f"a message as the method takes it ({error})"
    return InvalidRequest("message", f"{len(packed)} bytes", limit)
