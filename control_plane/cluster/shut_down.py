"""The orderly end of workers that all stop at the same time, when everything does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from control_plane.cluster.departures import LeavingProcess
from control_plane.cluster.group_process import GroupProcess

_LOOK_S = 0.05
_ANSWER_S = 5.0


def stop_workers(workers: Iterable[LeavingProcess], drain_s: float) -> None:
    """Drains them for `drain_s`, unannounced, stops them, and kills what does not end in time.

    One that has not started yet has nothing to finish, and is killed.
    """
    workers = list(workers)
    started = [w for w in workers if isinstance(w, GroupProcess) and w.has_started]
    for worker in started:
        worker.begin_drain(0.0, drain_s)
    # Ranks step together: none may stop before all of its group are empty.
    _wait_for(started, GroupProcess.is_drained, drain_s + _ANSWER_S)
    for worker in started:
        worker.begin_stop()
    _wait_for(started, GroupProcess.has_stopped, _ANSWER_S)
    for worker in workers:
        worker.kill()


def _wait_for(
    workers: list[GroupProcess], is_so: Callable[[GroupProcess], bool], timeout_s: float
) -> None:
    """Returns when it is so for all of them, or after the time."""
    deadline = time.monotonic() + timeout_s
    while not all(is_so(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
