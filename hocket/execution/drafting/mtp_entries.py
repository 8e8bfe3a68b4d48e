"""Makes the cache entries of the MTP modules, from the main model's hidden states.

Module n, counted from 1, makes the entry of slot s from h_{s-n} of the module before it and from
t_s. So all modules take the same rows, in order, each with the tokens one further on. The entry of
the last module goes back as many rows as there are modules: rows whose entries are made already
come along for their outputs (context, see `WaitingRows`), and what they would write is there. The
runner sends prompts through all modules, the draft source outputs, with drafts behind them.

Shape letters: R rows of a sequence, T tokens of a flat batch, S sequences, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hocket.execution.passes import Passes
from hocket.execution.sequence import Sequence
from hocket.kv.paged_cache import PagedCache
from hocket.model.step_inputs import SequenceInput, StepInputs


@dataclass(slots=True)
class HiddenRows:
    """A sequence's rows on their way through the modules.

    `hidden_RH` are h_{first_row}, ... of the main model, then what each module made of them. Slots
    before `first_slot` are final and not written. `last_slot` is the last one to be made of a token
    of the sequence; `drafts` follow, up to `num_drafts`, and the entries made of them don't count.
    """

    sequence: Sequence
    first_row: int
    first_slot: int
    last_slot: int
    hidden_RH: Tensor
    drafts: list[int] = field(default_factory=list[int])
    num_drafts: int = 0

    @property
    def has_new_slots(self) -> bool:
        """Whether there is anything to make, drafts not counted."""
        return self.first_slot <= min(self.last_slot, self.sequence.num_tokens - 1)

    def has_tokens(self, module: int) -> bool:
        """Whether the rows meet any in a module: not where there are fewer than it looks ahead."""
        last_slot = min(self.last_slot, self.sequence.num_tokens - 1) + len(self.drafts)
        return self.first_row + module + 1 <= last_slot

    def tokens(self, module: int) -> list[int]:
        """Those that the rows meet in a module, numbered from 0."""
        slot, end = self.first_row + module + 1, self.last_slot + 1
        return [*self.sequence.token_ids[slot:end], *self.drafts[max(0, slot - end) :]]


def run_module(
    module: int, rows: Seq[HiddenRows], passes: Passes, cache: PagedCache, is_last: bool
) -> Tensor:
    """One pass: every sequence's rows through a module, numbered from 0, where all have tokens.

    Returns what it made of each sequence's last row, [S, H]. Unless it `is_last`, the rows are
    ready for the next module.
    """
    parts: list[SequenceInput] = []
    gaps = [one.sequence.gap_of(module) for one in rows]
    for one, (_, gap_end) in zip(rows, gaps, strict=True):
        slot = one.first_row + module + 1
        first_slot = max(one.first_slot, module + 1, gap_end)
        assert slot <= first_slot, (one.sequence.key, slot, first_slot)
        parts.append((one.tokens(module), slot, one.sequence.block_table))
    lengths = [len(tokens) for tokens, _, _ in parts]
    hidden = [one.hidden_RH[:length] for one, length in zip(rows, lengths, strict=True)]
    hidden_TH = hidden[0] if len(hidden) == 1 else torch.cat(hidden)
    inputs = StepInputs.build(parts, hidden_TH.device, [one.first_slot for one in rows], gaps)
    z = passes.mtp_forward(inputs, hidden_TH, cache, is_last, module)
    if is_last:
        return z
    for one, z_RH in zip(rows, z.split(lengths), strict=True):
        one.hidden_RH = z_RH
    return z[inputs.last_rows()]
