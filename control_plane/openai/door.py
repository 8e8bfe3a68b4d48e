"""One HTTP request to `request_flow` and back: what both OpenAI endpoints do alike.

`app.py` routes requests here. The body becomes a `GenerateRequest` (`requests.py`), the flow's
messages become chunks or one reply (`replies.py`), every HocketError an OpenAI error. Headers wait
for the first token, so that what fails before it has a proper HTTP status; after it an error is
the stream's last event. When the client leaves, the flow is cancelled and with it both legs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from control_plane.model_limits import ModelLimits
from control_plane.openai import sse
from control_plane.openai.errors import BodyTooLarge, BodyTooSlow, ErrorReply, error_reply
from control_plane.openai.fields import Fields, parse_object
from control_plane.openai.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsShape
from control_plane.openai.replies import CHAT, Chunks, Echo, Form, Head, Whole
from control_plane.openai.requests import Asked
from control_plane.openai.token_texts import TokenTexts
from control_plane.request_flow import RequestFlow
from control_plane.router.pool import WorkerPool
from control_plane.tokenizer import ModelTokenizer
from control_plane.validation import check_prompt
from hocket.errors import HocketError, InternalError, InvalidRequest, WorkerUnavailable
from hocket.rpc import generation_pb2 as generation
from hocket.types import Fingerprint

logger = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
# A body this many times too large is still read, so that its sender sees the answer.
_DRAINED = 4
_BODY_S = 30.0
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_Answer = TypeVar("_Answer")


class ClientLeft(Exception):
    """The connection is gone; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Behind:
    """What the door opens to. `now`: seconds since 1970, for `created`.

    `deadline_s`: what a request gets. `max_body_bytes`: the largest body taken.
    """

    flow: RequestFlow
    pool: WorkerPool
    limits: Callable[[], ModelLimits]
    tokenizer: ModelTokenizer
    texts: TokenTexts
    now: Callable[[], float]
    deadline_s: float
    max_body_bytes: int


class Door:
    """Serves requests and knows which run. One per gateway."""

    def __init__(self, behind: Behind) -> None:
        self.behind = behind
        self.is_closing = False
        self._running: set[asyncio.Task[Any]] = set()

    def end_all(self) -> None:
        """Ends what runs, each with an error that says so."""
        for task in self._running:
            task.cancel()

    async def while_connected(
        self, receive: Receive, work: Coroutine[Any, Any, _Answer]
    ) -> _Answer:
        """The result of `work`, which is cancelled when the client leaves.

        Raises ClientLeft then, WorkerUnavailable after `end_all`, and what `work` raises.
        """
        task = asyncio.create_task(work)
        watcher = asyncio.create_task(_client_left(receive))
        self._running.add(task)
        try:
            await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientLeft
            if task.cancelled():
                raise WorkerUnavailable("the gateway is stopping")
            return task.result()
        finally:
            self._running.discard(task)
            task.cancel()
            watcher.cancel()
            await asyncio.gather(task, watcher, return_exceptions=True)

    def head(self, request_id: str) -> Head:
        """What a reply to this request repeats."""
        workers = self.behind.pool.workers()
        fingerprint = _shown_fingerprint(workers[0].fingerprint) if workers else None
        model = self.behind.limits().name
        return Head(request_id, int(self.behind.now()), model, fingerprint)


class GenerationEndpoint:
    """POST /v1/completions or /v1/chat/completions: an ASGI application."""

    def __init__(self, door: Door, form: Form, read: Callable[[Fields], Asked]) -> None:
        """`form` is of the reply; `read` turns the body into what was asked for."""
        self._door = door
        self._form = form
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises nothing that a client could cause."""
        request_id, is_usable = request_id_of(scope)
        answer = _Answerer(send, request_id)
        params: Mapping[str, str] = {}
        try:
            if not is_usable:
                limit = "1 to 128 printable ASCII characters"
                raise InvalidRequest("request_id", "of other characters or length", limit)
            behind = self._door.behind
            body = await read_body(scope, receive, behind.max_body_bytes)
            asked = self._read(parse_object(body))
            params = asked.params
            asked.message.request_id = request_id
            await self._door.while_connected(receive, self._serve(asked, answer))
        except ClientLeft:
            return
        except HocketError as error:
            failure = error
        except Exception as error:
            logger.exception("an HTTP request failed on a bug", extra={"request_id": request_id})
            failure = InternalError(f"internal error: {type(error).__name__}")
        else:
            return
        await answer.fail(error_reply(failure, params))

    async def _serve(self, asked: Asked, answer: _Answerer) -> None:
        behind = self._door.behind
        message, head = asked.message, self._door.head(asked.message.request_id)
        shapes = [self._logprobs_shape(message) for _ in range(message.n)]
        echo = await self._echo(message) if asked.wants_echo else None
        if asked.is_stream:
            chunks = Chunks(self._form, head, shapes, wants_usage=asked.wants_usage, echo=echo)

            async def pass_on(response: generation.GenerateResponse) -> None:
                await answer.stream(chunks.take(response), is_last=chunks.is_over)

            await behind.flow.serve(message, behind.limits(), behind.deadline_s, pass_on)
            return
        whole = Whole(
            self._form,
            head,
            shapes,
            echo=echo,
            prompt_texts=behind.texts if asked.wants_prompt_logprobs else None,
        )

        async def collect(response: generation.GenerateResponse) -> None:
            whole.add(response)

        await behind.flow.serve(message, behind.limits(), behind.deadline_s, collect)
        await answer.whole(200, whole.body(), ())

    def _logprobs_shape(self, message: generation.GenerateRequest) -> LogprobsShape | None:
        if not message.HasField("top_logprobs"):
            return None
        kind = ChatLogprobs if self._form is CHAT else CompletionLogprobs
        return kind(self._door.behind.texts)

    async def _echo(self, message: generation.GenerateRequest) -> Echo:
        """The prompt as the reply repeats it; the message has its token ids from here on."""
        behind = self._door.behind
        limits = behind.limits()
        prompt = check_prompt(message, limits)
        token_ids = await behind.tokenizer.tokenize(prompt, limits.most_prompt_tokens)
        text = message.text or behind.tokenizer.backend.decode(token_ids)
        message.token_ids.ids[:] = token_ids
        num_logprobs = len(token_ids) - 1 if message.HasField("prompt_logprobs") else 0
        return Echo(text, token_ids[0], num_logprobs)


class _Answerer:
    """Sends one answer: whole, or a stream that may fail on its way."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = (b"x-request-id", request_id.encode())
        self.has_started = False
        self._has_ended = False

    async def whole(
        self, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, (JSON, length, *headers))
        await self._body(body, is_last=True)

    async def stream(self, data: bytes, *, is_last: bool) -> None:
        """Sends events; the first call sends the headers too."""
        if not self.has_started:
            await self._start(200, sse.HEADERS)
        if data or is_last:
            await self._body(data, is_last=is_last)

    async def fail(self, reply: ErrorReply) -> None:
        """An error: with its own status, or as the last event of a stream, without [DONE]."""
        if not self.has_started:
            headers = tuple((n.encode(), v.encode()) for n, v in reply.headers)
            closing = (CLOSE,) if reply.status in (408, 413) else ()
            await self.whole(reply.status, reply.body.encode(), (*headers, *closing))
        elif not self._has_ended:
            await self._body(sse.event(reply.body), is_last=True)

    async def _start(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.has_started = True
        headers = (*headers, self._request_id)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, data: bytes, *, is_last: bool) -> None:
        self._has_ended = is_last
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


def request_id_of(scope: Scope) -> tuple[str, bool]:
    """The client's x-request-id or a new id; and False when the client's cannot be used."""
    sent = _header(scope, b"x-request-id")
    if sent and _REQUEST_ID.fullmatch(sent):
        return sent, True
    return uuid.uuid4().hex, not sent


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, timeout_s: float = _BODY_S
) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: it is over the limit, or says that it will be.
        BodyTooSlow: it did not come in time.
        ClientLeft: the connection ended first.
    """
    declared = _header(scope, b"content-length")
    declared_bytes = int(declared) if declared.isdecimal() else 0
    waits_for_us = bool(_header(scope, b"expect"))
    if declared_bytes > limit_bytes * (1 if waits_for_us else _DRAINED):
        raise BodyTooLarge(limit_bytes)
    pieces: list[bytes] = []
    num_bytes, is_whole = 0, False
    try:
        async with asyncio.timeout(timeout_s):
            while not is_whole and num_bytes <= limit_bytes * _DRAINED:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                is_whole = not message.get("more_body", False)
                num_bytes += len(message.get("body", b""))
                if num_bytes <= limit_bytes:
                    pieces.append(message.get("body", b""))
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {timeout_s:g} s") from None
    if num_bytes > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    return b"".join(pieces)


async def _client_left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(scope: Scope, name: bytes) -> str:
    return next((v.decode("latin-1") for n, v in scope["headers"] if n == name), "")


@lru_cache(maxsize=16)
def _shown_fingerprint(fingerprint: Fingerprint) -> str:
    """A short word that changes when equal seeds may stop to give equal tokens."""
    return f"fp_{sha256(repr(fingerprint).encode()).hexdigest()[:12]}"
