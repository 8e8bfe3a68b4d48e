"""Several ranks of a group in this process, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d as c10d

from hocket.config import GroupSettings, RedisSettings
from hocket.parallel.rank_group import RankGroup

Answer = TypeVar("Answer")


def run_ranks(
    size: int,
    rank_body: Callable[[RankGroup], Answer],
    timeout_s: float = 20.0,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> list[Answer]:
    """The body's answer on each rank, by rank; raises what a rank raised."""
    store: Any = c10d.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    answers: dict[int, Answer] = {}
    errors: dict[int, Exception] = {}

    def run(rank: int) -> None:
        settings = GroupSettings("decode-0", rank, size, RedisSettings(), timeout_s)
        try:
            group = RankGroup(store, settings, "127.0.0.1", device)
            answers[rank] = rank_body(group)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s * 3)
        assert not thread.is_alive(), "a rank hangs"
    for error in errors.values():
        raise error
    return [answers[rank] for rank in range(size)]
