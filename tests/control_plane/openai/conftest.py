"""The gateway of the tests above with its HTTP door open, and OpenAI's own client before it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest


@dataclass
class HttpAnswer:
    """One answer, read off a raw socket."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class OpenDoor:
    """`behind`: the gateway and its workers."""

    behind: Any
    client: openai.AsyncOpenAI
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(
        self, request_line: str, body: bytes | str = b"", headers: dict[str, str] | None = None
    ) -> HttpAnswer:
        """A whole exchange over a connection of its own."""
        reader, writer = await self.connect()
        try:
            writer.write(request_bytes(request_line, body, headers))
            return await read_answer(reader)
        finally:
            writer.close()

    async def post(self, path: str, **body: Any) -> HttpAnswer:
        return await self.raw(f"POST {path}", json.dumps(body))


def request_bytes(
    request_line: str, body: bytes | str = b"", headers: dict[str, str] | None = None
) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = {"host": "test", "content-length": str(len(body))} | (headers or {})
    told = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{request_line} HTTP/1.1\r\n{told}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> HttpAnswer:
    """Reads up to the end of one answer, chunk by chunk where it comes so."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    answer = HttpAnswer(int(head[0].split()[1]), headers, b"")
    if "content-length" in headers:
        answer.body = await reader.readexactly(int(headers["content-length"]))
        return answer
    while size := int(await reader.readuntil(b"\r\n"), 16):
        answer.chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    answer.body = b"".join(answer.chunks)
    return answer


@pytest.fixture
def open_door(serving: Any) -> Any:
    """`async with open_door(text, ...) as d`: as `serving`, with the HTTP door open."""

    @asynccontextmanager
    async def run(*texts: str, **options: Any) -> AsyncIterator[OpenDoor]:
        async with serving(*texts, http_port=0, **options) as behind:
            port = behind.gateway.http_port
            client = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0
            )
            async with client:
                yield OpenDoor(behind, client, port)

    return run
