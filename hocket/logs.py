"""The log lines of every process: JSON, one object a line, on stderr and in a file of its own.

Each line names its process, and the request it is about where there is one (`extra=about(key)` in
a worker, `request_id` in the gateway), so that one search follows a request through all of them.
Lines never carry prompts or tokens. `docs/operations.md` says where they are found.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, TextIO

from hocket.errors import ConfigError
from hocket.types import RequestKey

# A log file that has grown to this is put aside, and the oldest of those is deleted.
_LOG_FILE_BYTES = 64 * 2**20
_OLD_LOG_FILES = 3
# Libraries whose debug lines tell of every call and poll, and bury ours.
_CHATTY = ("grpc", "asyncio")


class JsonFormatter(logging.Formatter):
    """One line of JSON per record; what is given as `extra={...}` becomes fields of its own, but
    names with a leading underscore, which Ray adds."""

    _PLAIN = frozenset(vars(logging.makeLogRecord({})))

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        # One line goes to several places, one after the other.
        self._last: tuple[logging.LogRecord | None, str] = (None, "")

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON: time (UTC, seconds), level, process, logger, message, extras."""
        last, text = self._last
        if last is not record:
            text = self._formatted(record)
            self._last = (record, text)
        return text

    def _formatted(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in vars(record).items() if k not in self._PLAIN and k[0] != "_"}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logging(
    level: str, process: str, stream: TextIO | None = None, *, folder: str = ""
) -> None:
    """Sends this process's log lines, as JSON, to `stream` (stderr), and to
    `<folder>/<process>.jsonl` where a folder is named; it is made if need be.

    Raises ConfigError when nothing can be written there.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    if folder:
        handlers.append(_log_file(Path(folder).expanduser(), process))
    formatter = JsonFormatter(process)
    for handler in handlers:
        handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(root.level, logging.INFO))


def about(key: RequestKey) -> dict[str, Any]:
    """The `extra` of a worker's log line on a request. The gateway's id of the request is what
    stands before the last dot."""
    return {"request_id": key.request_id, "attempt": key.attempt}


@contextmanager
def also_in_file(process: str, folder: str) -> Generator[None]:
    """Within it, this process's log lines go to `<folder>/<process>.jsonl` too; nowhere else
    without a folder."""
    if not folder:
        yield
        return
    handler = _log_file(Path(folder), process)
    handler.setFormatter(JsonFormatter(process))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def check_folder(folder: str) -> None:
    """Makes the folder of log files if need be. Raises ConfigError when it cannot be written."""
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"telemetry.log_folder is {folder!r}: {error.strerror or error}.",
            field="telemetry.log_folder",
        ) from error


def _log_file(folder: Path, process: str) -> logging.Handler:
    check_folder(str(folder))
    return _LogFile(
        folder / f"{process}.jsonl",
        maxBytes=_LOG_FILE_BYTES,
        backupCount=_OLD_LOG_FILES,
        encoding="utf-8",
    )


class _LogFile(RotatingFileHandler):
    def shouldRollover(self, record: logging.LogRecord) -> bool:  # noqa: N802
        """Whether the file is full. The library's own answer formats the record and looks at the
        file system, which takes longer than all else about a line."""
        del record
        if self.stream is None:
            self.stream = self._open()
        return os.fstat(self.stream.fileno()).st_size >= self.maxBytes
