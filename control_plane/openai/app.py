"""The OpenAI HTTP door's routes: what is asked where.

    POST /v1/completions        POST /v1/chat/completions
    GET  /v1/models             GET  /v1/models/{name}             GET /health

Generation is `door.py`; the rest is answered here. `server.py` listens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.openai.door import Door, GenerationEndpoint, request_id_of
from control_plane.openai.errors import HttpRefusal, error_reply
from control_plane.openai.replies import CHAT, COMPLETION
from control_plane.openai.requests import chat_request, completion_request
from control_plane.validation import check_model
from hocket.errors import HocketError, InternalError

OWNER = "hocket"


def openai_app(door: Door) -> Starlette:
    """The ASGI application. Its errors have OpenAI's shape, whatever the path."""
    pages = _Pages(door)
    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                GenerationEndpoint(door, COMPLETION, completion_request),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                GenerationEndpoint(door, CHAT, chat_request),
                methods=["POST"],
            ),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
        ],
        exception_handlers={HTTPException: _refuse, HocketError: _fail, Exception: _bug},
    )


class _Pages:
    """What is not generation."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._started = int(door.behind.now())

    async def models(self, request: Request) -> Response:
        return _json_response(request, 200, {"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._door.behind.limits())
        return _json_response(request, 200, self._model())

    async def health(self, request: Request) -> Response:
        """200 while a request would be served, else 503: what a readiness probe asks."""
        if self._door.is_closing:
            return _json_response(request, 503, {"status": "stopping"})
        if not self._door.behind.pool.can_serve():
            return _json_response(request, 503, {"status": "no workers that can pair"})
        return _json_response(request, 200, {"status": "serving"})

    def _model(self) -> dict[str, Any]:
        limits = self._door.behind.limits()
        return {
            "id": limits.name,
            "object": "model",
            "created": self._started,
            "owned_by": OWNER,
            "max_model_len": limits.max_context_tokens,
        }


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail.lower()}"
    response = await _fail(request, HttpRefusal(error.status_code, told))
    response.headers.update(error.headers or {})
    return response


async def _fail(request: Request, error: Exception) -> Response:
    assert isinstance(error, HocketError)
    reply = error_reply(error)
    return _response(request, reply.status, reply.body, dict(reply.headers))


async def _bug(request: Request, error: Exception) -> Response:
    """The server logs the error itself, with its traceback."""
    return await _fail(request, InternalError(f"internal error: {type(error).__name__}"))


def _json_response(request: Request, status: int, value: Mapping[str, Any]) -> Response:
    return _response(request, status, json.dumps(value, ensure_ascii=False), {})


def _response(request: Request, status: int, body: str, headers: dict[str, str]) -> Response:
    request_id, _ = request_id_of(request.scope)
    headers = {**headers, "x-request-id": request_id}
    return Response(body, status, headers, media_type="application/json")
