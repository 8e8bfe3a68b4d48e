"""Hidden states of a sequence that wait to be made into MTP entries.

Steps add to them all the time, and where nobody drafts most are forgotten again. So they stay where
the steps left them, and are joined when somebody drafts.

Shape letters: T tokens of a flat batch, R rows of one sequence, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WaitingRows:
    """The last rows of what is computed, h_{c-R} .. h_{c-1}: `num_pending` whose entries are to be
    made, and before them `num_context` that the modules look back to."""

    __slots__ = ("_spans", "num_context", "num_pending")

    def __init__(self, hidden_RH: Tensor | None = None, num_context: int = 0) -> None:
        """All of these; None: no rows."""
        num_rows = 0 if hidden_RH is None else hidden_RH.shape[0]
        assert num_context <= num_rows, (num_context, num_rows)
        self.num_context = num_context
        self.num_pending = num_rows - num_context
        # First to end of some rows.
        self._spans = [] if hidden_RH is None else [(hidden_RH, 0, num_rows)]

    @property
    def num_rows(self) -> int:
        """R"""
        return self.num_context + self.num_pending

    def add(self, hidden_TH: Tensor, first: int, end: int) -> None:
        """Newer ones: rows `first` to `end` of a step's."""
        self._spans.append((hidden_TH, first, end))
        self.num_pending += end - first

    def keep_newest(self, num_pending: int) -> None:
        """Only so many of those whose entries are to be made, and no context."""
        surplus = self.num_rows - num_pending
        assert surplus >= 0, (self.num_rows, num_pending)
        while surplus:
            hidden_TH, first, end = self._spans.pop(0)
            if surplus < end - first:
                self._spans.insert(0, (hidden_TH, first + surplus, end))
            surplus -= min(surplus, end - first)
        self.num_context, self.num_pending = 0, num_pending

    def joined(self) -> Tensor:
        """[R, H]; R > 0."""
        parts = [hidden_TH[first:end] for hidden_TH, first, end in self._spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
