"""A pass through the model: of this process alone, or together with an expert-parallel group.

The runner and the draft source make their passes through `Passes`. `Transformer` is the plain
case; `GroupPasses` keeps this rank in step with the others before each pass. An error inside of a
pass leaves the other ranks waiting in the middle of it, so it ends the group.

Shape letters: T tokens of a flat batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from hocket.errors import GroupLost
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import StepInputs
from hocket.model.transformer import Transformer
from hocket.parallel.lockstep import MAIN, Lockstep, Pass


class Passes(Protocol):
    """The two passes of a `Transformer`, see there."""

    def forward(self, inputs: StepInputs, cache: PagedCache) -> Tensor: ...

    def mtp_forward(
        self,
        inputs: StepInputs,
        hidden_TH: Tensor,
        cache: PagedCache,
        last_only: bool = False,
        module: int = 0,
    ) -> Tensor: ...


class GroupPasses:
    """The model's passes, in step with the group's other ranks."""

    def __init__(self, model: Transformer, lockstep: Lockstep) -> None:
        self._model = model
        self._lockstep = lockstep

    def forward(self, inputs: StepInputs, cache: PagedCache) -> Tensor:
        self._lockstep.enter(MAIN)
        with _nothing_half_done():
            return self._model.forward(inputs, cache)

    def mtp_forward(
        self,
        inputs: StepInputs,
        hidden_TH: Tensor,
        cache: PagedCache,
        last_only: bool = False,
        module: int = 0,
    ) -> Tensor:
        self._lockstep.enter(Pass(module))
        with _nothing_half_done():
            return self._model.mtp_forward(inputs, hidden_TH, cache, last_only, module)


def take_part_in(model: Transformer) -> Callable[[Pass], None]:
    """What a rank without tokens does in a pass of its group."""

    def take_part(which: Pass) -> None:
        with _nothing_half_done():
            model.take_part(which.module)

    return take_part


@contextmanager
def _nothing_half_done() -> Iterator[None]:
    try:
        yield
    except GroupLost:
        raise
    except Exception as error:
        raise GroupLost(
            f"A rank of the expert-parallel group failed inside of a pass ({type(error).__name__}: "
            f"{error}); all requests of the group end and it starts again. Retry."
        ) from error
