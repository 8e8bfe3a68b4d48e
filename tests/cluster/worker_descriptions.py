"""Workers as they describe themselves, for tests that need no process."""

from __future__ import annotations

from dataclasses import replace

from hocket.types import Fingerprint, Role, WorkerDescription


def describe(worker_id: str = "decode-0", **changes: object) -> WorkerDescription:
    """Of the role that its id begins with, but for `changes`."""
    described = WorkerDescription(
        worker_id=worker_id,
        epoch=1,
        role=Role(worker_id.split("-")[0]),
        address="127.0.0.1:1",
        fingerprint=Fingerprint("digest", "layout", 64, "bfloat16", "1-invariant"),
        model="hocket-tiny",
        num_blocks=100,
        block_tokens=64,
        block_bytes=4096,
        max_context_tokens=4096,
        max_prompt_tokens=4095,
        max_draft_tokens=3,
        has_mtp=True,
    )
    return replace(described, **changes)  # pyright: ignore[reportArgumentType]
