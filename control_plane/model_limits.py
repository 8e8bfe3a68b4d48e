"""The served model, as far as requests are checked against it.

The gateway reads the limits off its workers for each request; `control_plane.validation` and
`control_plane.param_checks` hold what clients send against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hocket.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Sizes in tokens.

    `max_context_tokens`: prompt and output together. `max_prompt_tokens`: what one worker takes.
    `has_mtp`: whether the model has heads that draft.
    """

    name: str
    vocabulary_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    default_max_tokens: int
    has_mtp: bool = True

    @property
    def most_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token of output."""
        return min(self.max_prompt_tokens, self.max_context_tokens - 1)

    def check_vocabulary(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for the first id that is no token of the model."""
        size = self.vocabulary_size
        if not token_ids or max(token_ids) < size:
            return
        index = next(i for i, token_id in enumerate(token_ids) if token_id >= size)
        limit = f"below {size}, the size of the vocabulary"
        raise InvalidRequest(f"{field}[{index}]", token_ids[index], limit)
