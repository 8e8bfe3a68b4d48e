"""B8, B9, B10 at the router: workers that differ never pair, and a request hears why at once.

What happens when such a handle arrives all the same is in `test_peers.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.router.route import choose_pair
from hocket.errors import WorkerUnavailable
from hocket.model.model_config import ModelConfig
from hocket.types import Fingerprint
from tests.control_plane.test_router import NEED, A, decode, prefill
from tests.end_to_end.workers.conftest import TINY


def fingerprint_of(config: ModelConfig) -> Fingerprint:
    layout = config.kv_layout()
    return Fingerprint("w", layout.describe(), layout.block_tokens, layout.dtype, "1")


WITH_MTP = fingerprint_of(TINY)
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "b8_layout": ({}, {"fingerprint": replace(A, kv_layout="other")}),
    "b8_dtype": ({}, {"fingerprint": replace(A, dtype="float32")}),
    "b8_block_size": ({}, {"fingerprint": replace(A, block_tokens=32)}),
    "b9_one_without_mtp": (
        {"fingerprint": WITH_MTP},
        {"fingerprint": fingerprint_of(replace(TINY, num_mtp_layers=0))},
    ),
    "b10_model_revision": ({}, {"fingerprint": replace(A, weights="later")}),
    "b10_numerics_of_another_version": ({}, {"fingerprint": replace(A, numerics="2")}),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_b8_b9_b10_workers_that_differ_are_not_paired_and_the_difference_is_named(
    difference: str,
) -> None:
    ours, theirs = DIFFERENCES[difference]
    of_prefill, of_decode = prefill("p", **ours), decode("d", **theirs)
    with pytest.raises(WorkerUnavailable) as refusal:
        choose_pair([of_prefill, of_decode], NEED)
    named = of_prefill.worker.fingerprint.difference(of_decode.worker.fingerprint)
    assert named
    assert named in str(refusal.value)


def test_b9_other_draft_lengths_and_b10_a_neighbouring_protocol_do_pair() -> None:
    workers = [prefill("p", max_draft_tokens=0), decode("d", max_draft_tokens=5)]
    assert choose_pair(workers, NEED).decode.worker_id == "d"
    workers = [prefill("p"), decode("d", protocol_version=2)]
    assert choose_pair(workers, NEED).decode.worker_id == "d"


def test_b10_protocols_further_apart_do_not_pair() -> None:
    with pytest.raises(WorkerUnavailable, match="speaks protocol 3"):
        choose_pair([prefill("p"), decode("d", protocol_version=3)], NEED)
