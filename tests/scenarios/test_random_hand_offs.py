"""A14, the hand-off's part: whatever happens in whatever order, every block comes back."""

from __future__ import annotations

import random

import pytest

from decode_workers.import_stream import Imported
from hocket.errors import Cancelled
from hocket.types import RequestKey
from tests.scenarios.hand_off_world import (
    NUM_BLOCKS,
    OPEN_TIMEOUT_S,
    QUARANTINE_TIMEOUT_S,
    World,
    bundle,
    content,
)

_WEIGHTS = {
    "begin": 6,
    "compute": 6,
    "finish": 5,
    "import": 6,
    "cancel": 1,
    "abort": 1,
    "land": 3,
    "done": 8,
    "fail": 1,
    "cut": 2,
    "break": 1,
    "restart": 1,
    "wait": 1,
}


class _Driver:
    """Does what it is told, if it can be done now."""

    def __init__(self) -> None:
        self.world = World()
        self.num_requests = 0
        # Prefill's requests, in this life of it: how many blocks are computed; -1 when finished.
        self.computed: dict[RequestKey, int] = {}
        self.handles = {}
        self.blocks: dict[RequestKey, list[int]] = {}
        self.num_imported = 0

    def do(self, action: str, choice: int) -> None:
        world, exports = self.world, self.world.prefill.exports
        here = set(exports.keys())
        keys = [key for key in self.computed if key in here]
        key = keys[choice % len(keys)] if keys else None
        read = world.fabric.reads[choice % len(world.fabric.reads)] if world.fabric.reads else None
        match action:
            case "begin" if exports.can_begin(choice + 1):
                self._begin(choice + 1)
            case "compute" if key is not None:
                self._compute(key, 1 + choice % 2)
            case "finish" if key is not None and self.computed[key] >= 0:
                self._compute(key, NUM_BLOCKS)
                exports.finish(key, bundle(), world.now)
                self.computed[key] = -1
            case "import" if self.handles:
                self._import(list(self.handles)[choice % len(self.handles)])
            case "cancel" if self.blocks:
                self._cancel(list(self.blocks)[choice % len(self.blocks)])
            case "abort" if key is not None:
                exports.abort(key, Cancelled("no"), world.now)
            case "land" if read is not None and read.num_copied < len(read.local_blocks):
                world.fabric.copy(read, 1)
            case "done" if read is not None:
                world.fabric.deliver(read)
            case "fail" if read is not None:
                world.fabric.fail(read)
            case "cut":
                world.is_cut = choice == 0
            case "restart" if choice == 0:
                world.restart_prefill()
                self.computed.clear()
            case "break" if world.open_keys:
                world.break_stream(world.open_keys[choice % len(world.open_keys)])
            case "wait":
                world.wait(2.0 * choice, step_s=1.0)
            case _:
                pass
        self._settle()

    def finish(self) -> None:
        """All clients leave; time does the rest."""
        for key in list(self.blocks):
            self._cancel(key)
        for key in list(self.world.prefill.exports.keys()):
            self.world.prefill.exports.abort(key, Cancelled("no"), self.world.now)
        self.world.is_cut = False
        self.world.wait(OPEN_TIMEOUT_S + QUARANTINE_TIMEOUT_S, step_s=1.0)
        self._settle()

    def _begin(self, num_blocks: int) -> None:
        key = RequestKey(f"request-{chr(97 + self.num_requests % 26)}", self.num_requests % 10)
        self.num_requests += 1
        self.computed[key] = 0
        self.handles[key] = self.world.prefill.exports.begin(key, num_blocks, self.world.now)

    def _compute(self, key: RequestKey, most: int) -> None:
        done = self.computed[key]
        count = min(most, len(self.world.prefill.exports.blocks(key)) - done)
        if done >= 0 and count > 0:
            self.world.prefill.compute(key, done, count, self.world.now)
            self.computed[key] += count

    def _import(self, key: RequestKey) -> None:
        handle = self.handles.pop(key)
        if handle.num_blocks <= self.world.pool.num_free:
            self.blocks[key] = self.world.begin_import(key, handle)

    def _cancel(self, key: RequestKey) -> None:
        self.world.imports.cancel(key, self.world.now)
        self.blocks.pop(key)

    def _settle(self) -> None:
        """What was imported is right, whatever happened meanwhile, and is used up."""
        world = self.world
        world.run()
        for key, outcome in world.outcomes.items():
            blocks = self.blocks.pop(key, None)
            if isinstance(outcome, Imported):
                assert blocks is not None
                found = [world.importer.pool[b] for b in blocks]
                assert found == [content(key, i) for i in range(len(blocks))]
                world.pool.free(blocks)
                self.num_imported += 1
        world.outcomes.clear()


@pytest.mark.parametrize("seed", range(0, 100, 10))
def test_a14_every_block_comes_back_and_what_is_imported_is_right(seed: int) -> None:
    num_imported = 0
    for chance in map(random.Random, range(seed, seed + 10)):
        driver = _Driver()
        for action in chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=200):
            driver.do(action, chance.randrange(6))
        driver.finish()
        driver.world.assert_nothing_is_left()
        num_imported += driver.num_imported
    assert num_imported > 10


def test_the_driver_can_bring_hand_offs_to_their_end() -> None:
    driver = _Driver()
    for action in ("begin", "import", "finish", "done"):
        driver.do(action, 2)
    assert driver.num_imported == 1
