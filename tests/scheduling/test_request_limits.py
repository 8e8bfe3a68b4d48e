"""Claims about requests that can never be served."""

from __future__ import annotations

import pytest

from hocket.errors import InvalidRequest
from hocket.request_params import SamplingParams, StoppingParams
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Leg, RequestKey, StartRequest

LIMITS = RequestLimits(max_context_tokens=100, vocabulary_size=50, num_blocks=10, block_tokens=8)


def start(prompt: int, max_tokens: int, leg: Leg = Leg.WHOLE, token: int = 1) -> StartRequest:
    return StartRequest(
        key=RequestKey("a"),
        token_ids=(token,) * prompt,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens),
        leg=leg,
        deadline_s=1.0,
    )


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        (start(0, 5), "prompt_tokens", "1 to 80"),
        (start(81, 5), "prompt_tokens", "1 to 80"),
        (start(30, 0), "max_tokens", "1 to 70"),
        (start(30, 71), "max_tokens", "1 to 70"),
        (start(30, 51), "max_tokens", "at most 50"),
        (start(30, 5, token=50), "token_ids", "0 to 49"),
        (start(30, 5, token=-1), "token_ids", "0 to 49"),
    ],
)
def test_the_refusal_names_field_and_limit(request_: StartRequest, field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as error:
        LIMITS.check(request_)
    assert error.value.field == field


def test_what_just_fits_is_taken() -> None:
    LIMITS.check(start(80, 1, Leg.PREFILL))
    LIMITS.check(start(30, 50))


def test_only_the_decoding_leg_needs_blocks_for_the_output() -> None:
    assert LIMITS.blocks_needed(start(16, 40, Leg.PREFILL)) == 2
    assert LIMITS.blocks_needed(start(16, 40, Leg.DECODE)) == 7
