"""Carries TCP connections from outside into the network namespace that it runs in.

    python relay.py FD HOST PORT

FD is a listening socket that its parent opened before: a socket stays in the namespace that it was
made in, so its clients are outside and what they reach is inside.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from functools import partial


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the near end has nothing more to say or either is gone."""
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def carry(
    host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One connection."""
    try:
        inner_reader, inner_writer = await asyncio.open_connection(host, port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))


async def main() -> None:
    number, host, port = sys.argv[1:4]
    listener = socket.socket(fileno=int(number))
    server = await asyncio.start_server(partial(carry, host, int(port)), sock=listener)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
