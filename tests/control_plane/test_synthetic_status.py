"""An operator sees whose drafts are accepted at random."""

from __future__ import annotations

from typing import Any

import pytest

from tests.control_plane.test_operator_commands import TEXT, hocket, operator_door


@pytest.mark.parametrize(("rate", "times"), [(0.7, 1), (0.0, 0)])
async def test_a_worker_whose_output_is_not_the_models_is_named(
    serving: Any, rate: float, times: int
) -> None:
    decode = {"synthetic_acceptance": rate}
    async with serving(TEXT, decode=decode) as s, operator_door(s.gateway) as door:
        done = await hocket("status", "--address", door.address)
        assert done.stdout.count("SYNTHETIC, 0.70") == times
        assert done.stdout.count(s.decode.description.worker_id) == 1 + times
