"""What one step computes: a flat batch of query tokens, prefill chunks and verify tokens alike.

Built on the host by the model runner, passed as an argument through the whole forward pass.
`attention.plan_attention` derives from it what the kernels need, so that nothing inside the pass
waits for the device.

Shape letters: T query tokens of the step, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SequenceInput = tuple[Sequence[int], int, Sequence[int]]
"""Query token ids, position of the first one, block table."""


@dataclass(frozen=True)
class StepInputs:
    """A flat batch. Tensors are int64 on the model's device; tuples are the host's copy.

    A token at position p of its sequence writes slot p, then attends slots 0..p. A slot that is
    shared is not written: its token attends the entry that is there. Tokens of one sequence are
    neighbours, in order of position. Positions are absolute.
    """

    token_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T]"""
    sequence_ids: torch.Tensor
    """[T]: row of `block_tables`."""
    block_tables: torch.Tensor
    """[S, most blocks], short rows filled with 0."""
    query_lengths: tuple[int, ...]
    """Query tokens per sequence."""
    first_positions: tuple[int, ...]
    """Position of each sequence's first query token."""
    host_block_tables: tuple[Sequence[int], ...]
    num_shared: tuple[int, ...]
    """Slots at the start of each sequence that lie in shared blocks."""
    gaps: tuple[tuple[int, int], ...] = ()
    """Slots of each sequence that hold nothing and are not attended, from one to another; empty
    when no sequence has any."""

    @property
    def num_tokens(self) -> int:
        """T"""
        return self.token_ids.shape[0]

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Slots in use per sequence once the step has run."""
        return tuple(
            first + length
            for first, length in zip(self.first_positions, self.query_lengths, strict=True)
        )

    @staticmethod
    def build(
        sequences: list[SequenceInput],
        device: torch.device | str,
        num_shared: Sequence[int] | None = None,
        gaps: Sequence[tuple[int, int]] = (),
    ) -> StepInputs:
        """From (token ids, first position, block table) per sequence; none may be empty.

        The block table must cover every slot up to the last query token's. `num_shared`, one per
        sequence, None for no shared block anywhere. `gaps`: one per sequence, or none."""
        assert sequences, "a step needs a sequence"
        assert num_shared is None or len(num_shared) == len(sequences), (num_shared, len(sequences))
        token_ids: list[int] = []
        positions: list[int] = []
        sequence_ids: list[int] = []
        for row, (tokens, first, _) in enumerate(sequences):
            assert tokens, f"sequence {row} has no token"
            assert first >= 0, f"sequence {row} starts at {first}"
            token_ids += tokens
            positions += range(first, first + len(tokens))
            sequence_ids += [row] * len(tokens)
        tables = tuple(table for _, _, table in sequences)
        width = max(len(table) for table in tables)
        padded = [list(table) + [0] * (width - len(table)) for table in tables]
        return StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            sequence_ids=torch.tensor(sequence_ids, dtype=torch.int64, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int64, device=device),
            query_lengths=tuple(len(tokens) for tokens, _, _ in sequences),
            first_positions=tuple(first for _, first, _ in sequences),
            host_block_tables=tables,
            num_shared=(0,) * len(sequences) if num_shared is None else tuple(num_shared),
            gaps=tuple(gaps) if any(end > first for first, end in gaps) else (),
        )

    def gaps_of(self, sequences: Sequence[int]) -> torch.Tensor | None:
        """First slots of these sequences' gaps, and the first behind them, int64 [2, S]; None when
        none has any."""
        found = [self.gaps[s] for s in sequences] if self.gaps else []
        if all(end <= first for first, end in found):
            return None
        return torch.tensor(found, device=self.positions.device).T

    def last_rows(self) -> torch.Tensor:
        """Row of each sequence's last query token, int64 [S]."""
        rows = torch.tensor(self.query_lengths).cumsum(0) - 1
        return rows.to(self.positions.device)

    def last_tokens(self) -> StepInputs:
        """The step with only the last query token of each sequence."""
        rows = self.last_rows()
        return StepInputs(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            sequence_ids=self.sequence_ids[rows],
            block_tables=self.block_tables,
            query_lengths=(1,) * len(self.query_lengths),
            first_positions=tuple(length - 1 for length in self.context_lengths),
            host_block_tables=self.host_block_tables,
            num_shared=self.num_shared,
            gaps=self.gaps,
        )
