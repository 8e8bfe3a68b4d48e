"""Claims about the decode engine's prefix cache: what is read, computed, shared and counted.

Blocks have 16 tokens. Requests of one prompt length have the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decode_workers.import_stream import StreamGone
from hocket.errors import HandOffFailed
from hocket.execution.engine_thread import CancelRequest
from hocket.request_params import StoppingParams
from hocket.types import Finished, FinishReason, Joined, RequestKey
from tests.decode_workers.rig import BLOCK_TOKENS, Rig

MakeWorker = Callable[..., Any]
BLOCK_BYTES = 8


@pytest.fixture
def rig(make_worker: MakeWorker) -> Rig:
    return Rig(make_worker(num_blocks=16, prefix_cache=True))


def joined(rig: Rig, name: str) -> Joined:
    (event,) = [e for e in rig.events if isinstance(e, Joined) and e.key.request_id == name]
    return event


def finish(rig: Rig, name: str) -> None:
    rig.turn_until(lambda: name in rig.of(Finished))


def hand_over(rig: Rig, name: str, prompt: int, **changes: Any) -> Joined:
    """A request whose prompt prefill has computed, from its arrival to its end."""
    rig.import_(name, prompt, **changes)
    rig.turn()
    rig.prefill_hands_over(name, -(-prompt // BLOCK_TOKENS), cached_tokens=5)
    finish(rig, name)
    return joined(rig, name)


def test_an_import_reads_only_the_blocks_that_are_missing(rig: Rig) -> None:
    first = hand_over(rig, "a", 40)
    assert (first.imported_bytes, first.cached_tokens) == (3 * BLOCK_BYTES, 0)
    again = hand_over(rig, "b", 40)
    assert (again.imported_bytes, again.cached_tokens) == (BLOCK_BYTES, 32)
    longer = hand_over(rig, "c", 64)
    assert (longer.imported_bytes, longer.cached_tokens) == (2 * BLOCK_BYTES, 32)
    whole_blocks = hand_over(rig, "d", 64)
    assert (whole_blocks.imported_bytes, whole_blocks.cached_tokens) == (0, 64)
    assert rig.is_at_rest


def test_a_prompt_whose_first_token_ends_it_is_kept(rig: Rig) -> None:
    rig.import_("a", 40)
    rig.prefill_hands_over("a", 3, finish_reason=FinishReason.STOP)
    finish(rig, "a")
    assert hand_over(rig, "b", 40).cached_tokens == 32


def test_the_usage_of_a_handed_over_prompt_is_what_prefill_says(rig: Rig) -> None:
    hand_over(rig, "a", 40)
    hand_over(rig, "b", 40)
    assert rig.usage("a").cached_tokens == rig.usage("b").cached_tokens == 5


@pytest.mark.parametrize(("prompt", "cached"), [(15, 0), (16, 15), (40, 31), (48, 47)])
def test_prompt_tokens_are_either_cached_or_computed(rig: Rig, prompt: int, cached: int) -> None:
    """A full block's last token is computed again, for its hidden state."""
    rig.start("a", prompt)
    finish(rig, "a")
    before = rig.turn().load.computed_prompt_tokens
    assert (before, rig.usage("a").cached_tokens) == (prompt, 0)
    rig.start("b", prompt)
    finish(rig, "b")
    computed = rig.turn().load.computed_prompt_tokens - before
    assert (computed, rig.usage("b").cached_tokens) == (prompt - cached, cached)
    assert joined(rig, "b").cached_tokens == cached
    assert rig.output("b") == rig.output("a")
    assert rig.is_at_rest


def test_nothing_is_written_into_blocks_that_were_found(rig: Rig) -> None:
    """Not even what is computed again: others may be reading it."""
    rig.start("a", prompt=40)
    finish(rig, "a")
    cache = rig.runner.cache
    found = [block for block in range(cache.num_blocks) if cache.pool.is_indexed(block)]
    cache.storage.zero_()
    rig.start("b", prompt=40)
    finish(rig, "b")
    assert rig.usage("b").cached_tokens == 31
    assert not cache.storage[found].any()


def test_output_is_found_too_as_far_as_it_was_complete(rig: Rig) -> None:
    """The next turn of a conversation: prompt, answer, and a new question."""
    rig.start("a", prompt=20, max_tokens=61)
    finish(rig, "a")
    said = tuple(i % 50 for i in range(20)) + rig.output("a")
    rig.start("b", token_ids=(*said, 1, 2, 3), prompt=20)
    finish(rig, "b")
    # The last step filled the fifth block, but its MTP entries are not made.
    assert rig.usage("b").cached_tokens == 4 * BLOCK_TOKENS - 1


def test_running_requests_share_blocks_and_the_last_one_frees_them(rig: Rig) -> None:
    rig.start("a", prompt=64, max_tokens=60, max_draft_tokens=0)
    rig.turn_until(lambda: "a" in rig.of(Joined))
    free = rig.free_blocks
    rig.start("b", prompt=64, max_tokens=16, max_draft_tokens=0)
    rig.turn()
    assert free - rig.free_blocks == 1, "four blocks of the prompt are shared"
    finish(rig, "b")
    assert rig.free_blocks == free
    rig.engine.take(CancelRequest(RequestKey("a")), rig.now)
    rig.turn()
    assert rig.is_at_rest


def test_what_is_shared_counts_as_room(make_worker: MakeWorker) -> None:
    """100 requests with one long prefix must not wait for 100 copies of it."""
    rig = Rig(make_worker(num_blocks=8, prefix_cache=True))
    rig.start("a", prompt=80, max_tokens=16)
    rig.turn_until(lambda: "a" in rig.of(Joined))
    rig.start("b", prompt=80, max_tokens=16)
    rig.start("c", prompt=80, max_tokens=16)
    rig.turn()
    assert rig.worker.scheduler.num_seated == 3
    rig.turn_until(lambda: rig.is_at_rest)
    assert rig.output("a") == rig.output("b") == rig.output("c")


def test_tenants_share_nothing(rig: Rig) -> None:
    hand_over(rig, "a", 40, tenant_salt=b"one")
    other = hand_over(rig, "b", 40, tenant_salt=b"two")
    assert (other.imported_bytes, other.cached_tokens) == (3 * BLOCK_BYTES, 0)


def test_a_hand_off_that_failed_leaves_nothing_in_the_cache(rig: Rig) -> None:
    """Its blocks were never whole; what is computed instead is."""
    hand_over(rig, "a", 20)
    rig.import_("b", prompt=40)
    rig.turn()
    rig.engine.take(StreamGone(RequestKey("b"), HandOffFailed("cut")), rig.now)
    finish(rig, "b")
    assert joined(rig, "b").recomputed
    assert rig.usage("b").cached_tokens == BLOCK_TOKENS - 1, "one block came with a"
    third = hand_over(rig, "c", 40)
    assert third.cached_tokens == 32
    assert rig.is_at_rest


def test_a_prompt_being_read_is_not_shared_before_it_is_whole(rig: Rig) -> None:
    rig.worker.fabric.is_automatic = False
    rig.import_("a", prompt=40)
    rig.turn()
    rig.prefill_hands_over("a", 3)
    rig.start("b", prompt=40)
    finish(rig, "b")
    assert rig.usage("b").cached_tokens == 0
    rig.engine.take(CancelRequest(RequestKey("a")), rig.now)
    rig.turn()
    for read in list(rig.worker.fabric.reads):
        rig.worker.fabric.fail(read)
    rig.turn()
    assert rig.is_at_rest


def test_without_a_cache_everything_is_computed(make_worker: MakeWorker) -> None:
    rig = Rig(make_worker(num_blocks=16, prefix_cache=False))
    for name in ("a", "b"):
        rig.start(name, prompt=40, stopping=StoppingParams(4))
        finish(rig, name)
    assert rig.turn().load.computed_prompt_tokens == 80
    assert rig.usage("b").cached_tokens == 0
