"""Data-parallel training on one machine: one process with one thread for every rank.

A step has thousands of small operations. Two threads that meet after each of them stand still
whenever anything else wants a core; two processes meet once a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

NUM_RANKS = 2


class Group:
    """Averages over the ranks: gradients, routers' loads and the clock in one message."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks

    def average(self, parameters: Iterable[nn.Parameter], others: list[Tensor]) -> None:
        """Replace gradients and `others` (float32, contiguous) by their mean, in place."""
        if self.num_ranks == 1:
            return
        tensors = [p.grad for p in parameters if p.grad is not None] + others
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.num_ranks
        for tensor, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))


def run_ranks(work: Callable[[Group], None]) -> None:
    """Call `work` in this process as rank 0 and in forked ones as the others.

    Forking shares what was prepared (the corpus) without copying; so call this before torch has
    started threads of its own.
    """
    num_ranks = min(NUM_RANKS, os.cpu_count() or 1)
    if num_ranks == 1:
        work(Group(0, 1))
        return
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        context = mp.get_context("fork")
        others = [
            context.Process(target=_run, args=(work, rank, num_ranks, store), daemon=True)
            for rank in range(1, num_ranks)
        ]
        for process in others:
            process.start()
        _run(work, 0, num_ranks, store)
        for process in others:
            process.join()
            assert process.exitcode == 0, process.exitcode


def _run(work: Callable[[Group], None], rank: int, num_ranks: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    try:
        work(Group(rank, num_ranks))
    finally:
        dist.destroy_process_group()
