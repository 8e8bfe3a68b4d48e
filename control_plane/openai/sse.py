"""Server-sent events as OpenAI frames them: one `data:` line of JSON, an empty line; last [DONE].

JSON text has no raw line breaks, so one line always does.
"""

from __future__ import annotations

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks proxies to pass each event on at once.
    (b"x-accel-buffering", b"no"),
)


def event(data: str) -> bytes:
    """One event that carries `data`, JSON text."""
    return b"data: " + data.encode() + b"\n\n"
