"""Hidden states of a sequence that wait to be made into MTP entries.

Steps add to them all the time, and where nobody drafts most are forgotten again. So they stay where
the steps left them, and are joined when somebody drafts.

Shape letters: T tokens of a flat batch, R rows of one sequence, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Span = tuple[Tensor, int, int]
"""Rows first to end of a [T, H]."""


class WaitingRows(NamedTuple):
    """The last rows of what is computed, h_{c-R} .. h_{c-1}: `num_pending` whose entries are to be
    made, and before them `num_context` that the modules look back to. Immutable."""

    spans: tuple[Span, ...] = ()
    num_context: int = 0
    num_pending: int = 0

    @classmethod
    def of(cls, hidden_RH: Tensor, num_context: int = 0) -> WaitingRows:
        """All of [R, H]; the first `num_context` as context."""
        num_rows = hidden_RH.shape[0]
        return cls(((hidden_RH, 0, num_rows),), num_context, num_rows - num_context)

    @property
    def num_rows(self) -> int:
        """R"""
        return self.num_context + self.num_pending

    def add(self, hidden_TH: Tensor, first: int, end: int) -> WaitingRows:
        """With newer ones: rows `first` to `end` of a step's."""
        spans = (*self.spans, (hidden_TH, first, end))
        return WaitingRows(spans, self.num_context, self.num_pending + end - first)

    def newest(self, num_pending: int) -> WaitingRows:
        """Only so many of those whose entries are to be made, and no context."""
        surplus = self.num_rows - num_pending
        assert surplus >= 0, (self.num_rows, num_pending)
        spans = list(self.spans)
        while surplus:
            hidden_TH, first, end = spans.pop(0)
            if surplus < end - first:
                spans.insert(0, (hidden_TH, first + surplus, end))
            surplus = max(0, surplus - (end - first))
        return WaitingRows(tuple(spans), 0, num_pending)

    def joined(self) -> Tensor:
        """[R, H]; R > 0."""
        parts = [hidden_TH[first:end] for hidden_TH, first, end in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


NO_ROWS = WaitingRows()
