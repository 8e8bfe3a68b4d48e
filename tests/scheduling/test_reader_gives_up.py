"""What prefill says of a request whose reader closes its stream before all of it is read."""

from __future__ import annotations

import pytest

from hocket.errors import Cancelled, HandOffFailed
from hocket.kv.block_pool import BlockPool
from hocket.scheduling.export_ownership import ExportOwnership
from hocket.scheduling.export_words import ExportLimits
from hocket.types import RequestKey
from tests.scheduling.ownership_world import Slots

A = RequestKey("a")


@pytest.mark.parametrize(("is_cancelled", "kind"), [(False, HandOffFailed), (True, Cancelled)])
def test_a_hand_off_that_failed_is_no_cancel(
    is_cancelled: bool, kind: type[HandOffFailed] | type[Cancelled]
) -> None:
    """The reader may compute the prompt itself: a gateway that hears "cancelled" would end it."""
    pool, slots = BlockPool(4), Slots(5)
    exports = ExportOwnership(pool, slots, ExportLimits(3, 6.0, 15.0, max_unread_share=0.5))
    slot, epoch = exports.begin(A, pool.allocate(2), 0.0)
    exports.open(1, A, slot, epoch, 0, 0.0)
    exports.close(1, False, 1.0, is_cancelled=is_cancelled)
    (lost,) = exports.tick(1.0)
    assert type(lost.error) is kind
    exports.abort(A, lost.error, 1.0)
    assert pool.num_free == 4
