"""A worker of R ranks, seen by the supervisor and by a departure as one process.

The ranks of an expert-parallel group step together: none serves without the others, and what a
dead or stuck one leaves behind is of no use. So one dead rank makes the group dead, and all of
them are killed and started again. An ordinary worker is a group of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from control_plane.cluster.departures import LeavingProcess
from control_plane.cluster.supervisor import Health


class RankProcess(LeavingProcess, Protocol):
    """One rank: a process of its own."""

    @property
    def actor(self) -> Any:
        """The Ray actor that it is."""
        ...

    @property
    def result(self) -> Any:
        """What its start returned; None while it has not."""
        ...


class GroupProcess:
    """One life of a worker, all its ranks."""

    def __init__(self, ranks: Mapping[str, RankProcess]) -> None:
        """`ranks` by worker id: "decode-0.0", "decode-0.1"; "decode-0" alone when it is one."""
        assert ranks, "a group has ranks"
        self.ranks = dict(ranks)
        self._fault = ""
        # Ranks that were heard since all of them were: a pulse answers when it likes, so two
        # healthy ranks need not answer the same look.
        self._heard: set[str] = set()
        self._is_stopping = False

    def look(self) -> Health:
        found = {name: rank.look() for name, rank in self.ranks.items()}
        for name, health in found.items():
            if health is Health.DEAD:
                why = self.ranks[name].why()
                self._fault = f"{name}: {why}" if len(self.ranks) > 1 else why
                return Health.DEAD
        if Health.STARTING in found.values():
            return Health.STARTING
        self._heard |= {name for name, health in found.items() if health is Health.SERVING}
        if len(self._heard) < len(self.ranks):
            return Health.SILENT
        self._heard.clear()
        return Health.SERVING

    @property
    def has_started(self) -> bool:
        """Whether every rank's start has returned."""
        return all(rank.result is not None for rank in self.ranks.values())

    def why(self) -> str:
        return self._fault

    def kill(self) -> None:
        for rank in self.ranks.values():
            rank.kill()

    def begin_drain(self, announce_s: float, drain_s: float) -> None:
        # Everything may end while this worker leaves: what stops already has drained.
        if self._is_stopping:
            return
        for rank in self.ranks.values():
            rank.begin_drain(announce_s, drain_s)

    def is_drained(self) -> bool:
        return all(rank.is_drained() for rank in self.ranks.values())

    def begin_stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        for rank in self.ranks.values():
            rank.begin_stop()

    def has_stopped(self) -> bool:
        return all(rank.has_stopped() for rank in self.ranks.values())
