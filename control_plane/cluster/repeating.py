"""A function that is called again and again from a thread of its own.

The launcher keeps two: one looks at places and pools, the other runs the scaling loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Repeating:
    """Calls `turn` every `every_s` seconds from `start` to `stop`."""

    def __init__(self, name: str, every_s: float, turn: Callable[[], object]) -> None:
        """A turn that raises is logged, once while it goes on in the same way, and the next one
        follows: what it looks after must outlive whatever one look ran into."""
        self._name = name
        self._every_s = every_s
        self._turn = turn
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends it after its present turn. Safe to call again."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        said = ""
        while not self._stopping.wait(self._every_s):
            try:
                self._turn()
                said = ""
            except Exception as error:
                if said != (said := repr(error)):
                    _log.exception("%s: this turn failed, the next one follows", self._name)
