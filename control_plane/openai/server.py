"""uvicorn on the gateway's own event loop: listens, and stops without cutting anyone short.

`control_plane.gateway` starts and stops it beside the gRPC server. uvicorn's usual entry would
take over the process's signals; these belong to whoever started the process, so its parts are
called here one by one.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from control_plane.openai.door import Door
from hocket.errors import ConfigError

# Clients keep their idle connections for a minute at most; we close ours later than they do.
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 1.0
_BACKLOG = 2048


class HttpServer:
    """One listening HTTP server. `start`, then `stop`; both on the same event loop."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._door = door
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="httptools",  # half the cost per event of the parser in Python
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ConfigError when the address cannot be bound."""
        try:
            self._socket = _listening(host, port)
        except OSError as error:
            raise ConfigError(
                f"gateway.host and gateway.http_port: {host}:{port} cannot be bound"
                f" ({error.strerror or error}); is another gateway running?"
                " Port 0 takes a free one, -1 closes the HTTP door."
            ) from error
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=[self._socket])
        self._ticking = asyncio.create_task(self._server.main_loop())
        return self._socket.getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, gives what runs `grace_s` to end, then ends it with an error."""
        self._door.is_closing = True
        self._server.should_exit = True
        await self._ticking
        closing = asyncio.create_task(self._server.shutdown(sockets=[self._socket]))
        _, running = await asyncio.wait((closing,), timeout=grace_s)
        if running:
            self._door.end_all()
            _, running = await asyncio.wait((closing,), timeout=_LAST_WORDS_S)
        if running:  # clients that do not read
            for connection in list(self._server.server_state.connections):
                assert connection.transport is not None
                connection.transport.abort()
        await closing


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Its connections send each event at once (TCP_NODELAY): asyncio sees
    to that, but only where a socket names its protocol, which `socket.create_server` leaves out.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
