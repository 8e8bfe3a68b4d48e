"""What the draft controller decides, as transcripts; and what each of them must not lose."""

from __future__ import annotations

import pytest

from tests.scheduling.draft_transcript import FOLDER, replay

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_the_controller_decides_as_written_down(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert replay(text) == text
