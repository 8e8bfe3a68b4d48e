"""What the draft controller decides, as transcripts; and what each of them must not lose."""

from __future__ import annotations

import re

import pytest

from tests.scheduling.draft_transcript import FOLDER, replay

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def drafts_at_end(name: str, after: str) -> dict[str, float]:
    """Mean drafts by kind of request in the last line of the answer behind `after`."""
    text = (FOLDER / f"{name}.txt").read_text().partition(after)[2]
    answer = re.findall(r"^ *\d+-\d+  (.*)  \d+ tokens/s", text.split("\n\n")[0], re.M)[-1]
    return {kind: float(number) for kind, number in re.findall(r"(\w+) ([\d.]+)", answer)}


@pytest.mark.parametrize("name", NAMES)
def test_the_controller_decides_as_written_down(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    assert replay(text) == text


def test_drafts_end_and_come_back_with_the_text() -> None:
    assert drafts_at_end("text_changes", "> run 200 100")["chat"] < 0.3
    assert drafts_at_end("text_changes", "> text chat 0.95")["chat"] > 3.5


def test_drafts_end_and_come_back_with_the_size_of_the_batch() -> None:
    assert max(drafts_at_end("batch_grows", "> join d").values()) < 0.1
    assert drafts_at_end("batch_grows", "> leave c")["a"] > 2.5


def test_a_target_takes_drafts_from_those_that_keep_them() -> None:
    free = drafts_at_end("targets", "> worker max_drafts=4 verify=linear\n")
    bound = drafts_at_end("targets", "target=8:42")
    assert bound["code"] < free["code"] / 2
