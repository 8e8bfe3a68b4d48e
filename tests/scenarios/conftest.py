"""Fixtures of the scenarios."""

from __future__ import annotations

import pytest

from tests.scenarios.hand_off_world import World


@pytest.fixture
def world() -> World:
    return World()
