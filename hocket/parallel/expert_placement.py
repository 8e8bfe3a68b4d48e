"""Which rank of a group owns which experts: for now fixed, in runs of neighbours.

Experts of one routing group are neighbours in DeepSeek's checkpoints, so a token, which chooses
few groups, goes to few ranks. `expert_dispatch` sends rows by it, `model.weights` reads by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """`num_experts` spread over `num_ranks`; the first ranks have one more where it is uneven."""

    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_ranks > self.num_experts:
            raise ConfigError(
                f"decode.group_size is {self.num_ranks}, but the checkpoint has {self.num_experts} "
                "experts per layer; every rank needs one: use smaller groups and more workers.",
                field="decode.group_size",
            )

    def experts_of(self, rank: int) -> range:
        """The experts of a rank, by their number in the checkpoint."""
        share, extra = divmod(self.num_experts, self.num_ranks)
        first = rank * share + min(rank, extra)
        return range(first, first + share + (rank < extra))

    def counts(self) -> list[int]:
        """How many experts each rank has."""
        return [len(self.experts_of(rank)) for rank in range(self.num_ranks)]
