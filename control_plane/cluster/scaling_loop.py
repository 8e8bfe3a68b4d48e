"""The loop that keeps both pools at their sizes: operators' edits, the autoscaler's decisions.

It runs in the launcher, several turns a second. A turn takes what operators asked for since the
last one, decides when the interval is over (if the autoscaler is on), has the executor act, and
publishes sizes and reasons for `hocket status`. `decide` has the thinking, the executor the doing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from redis.exceptions import RedisError

from control_plane.autoscaler.decide import Decision, decide
from control_plane.autoscaler.executor import ObservationSource, PoolExecutor
from control_plane.autoscaler.observations import Observations
from control_plane.autoscaler.policy import Limits, PoolLimits, Targets
from control_plane.autoscaler.state import State
from control_plane.cluster.scaling_store import AskedSize, PoolStatus, ScalingStatus
from hocket.clock import Clock
from hocket.errors import HocketError
from hocket.types import Role

_log = logging.getLogger(__name__)


class ScalingBoard(Protocol):
    """What the loop needs of `ScalingStore`. Every method may raise `RedisError`."""

    def sizes(self) -> Mapping[Role, AskedSize]: ...
    def forget(self, role: Role) -> None: ...
    def publish(self, status: ScalingStatus) -> None: ...


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """is_autoscaled: whether sizes follow the load, by a decision every `interval_s`. `limits` hold
    for operators too."""

    is_autoscaled: bool
    interval_s: float
    targets: Targets
    limits: Limits

    def pool(self, role: Role) -> PoolLimits:
        """The limits of one pool."""
        return self.limits.prefill if role is Role.PREFILL else self.limits.decode


class ScalingLoop:
    """One launcher's loop. `turn` is called from one thread."""

    def __init__(
        self,
        executor: PoolExecutor,
        source: ObservationSource,
        board: ScalingBoard,
        plan: ScalingPlan,
        clock: Clock,
        *,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._executor = executor
        self._source = source
        self._board = board
        self._plan = plan
        self._clock = clock
        self._unix_s = unix_s
        self._state = State()
        self._decide_at = clock.now() + plan.interval_s
        self._seen: dict[Role, int] = {}
        self._operator: dict[Role, str] = {}
        self._reasons: tuple[str, ...] = ()
        self._said = ""
        self._is_away = False

    def turn(self) -> None:
        """Takes edits, decides if it is time, publishes. The store being away holds up nothing
        but edits."""
        try:
            for role, asked in self._board.sizes().items():
                self._take(role, asked)
        except RedisError as error:
            self._away(error)
        now = self._clock.now()
        if self._plan.is_autoscaled and now >= self._decide_at:
            self._decide_at = now + self._plan.interval_s
            self._decide()
        try:
            self._board.publish(self._status())
            self._is_away = False
        except RedisError as error:
            self._away(error)

    def _take(self, role: Role, asked: AskedSize) -> None:
        """What an operator asked of a pool, once."""
        if self._seen.get(role) == asked.serial:
            return
        pool = self._executor.workers(role)
        try:
            if asked.size is None:
                self._executor.release(role)
                said = f"{role.value}: given back to the autoscaler at {pool.size}"
                if not self._plan.is_autoscaled:
                    said = f"{role.value}: stays at {pool.size}, the autoscaler is off"
            else:
                said = self._edit(role, asked.size)
        except HocketError as error:
            # The request is still there: the next turn tries again.
            self._say(f"{role.value}: an operator's size was not taken: {error}", is_news=False)
            return
        self._seen[role] = asked.serial
        self._operator[role] = said
        _log.info("%s", said)
        if asked.size is None:
            self._board.forget(role)

    def _edit(self, role: Role, size: int) -> str:
        limits, before = self._plan.pool(role), self._executor.workers(role).size
        nearest = min(max(size, limits.min_workers), limits.max_workers)
        if nearest == size:
            self._executor.edit(role, size)
            self._forget_hold(role)
            return f"{role.value}: {before} → {size}, asked for by an operator"
        # Nobody asked for this very size, so nothing keeps the autoscaler from another.
        self._executor.resize(role, nearest)
        return (
            f"{role.value}: {before} → {nearest}, an operator asked for {size}; the limits are "
            f"{limits.min_workers} to {limits.max_workers} (autoscaler.{role.value})"
        )

    def _forget_hold(self, role: Role) -> None:
        """An operator's time begins anew, also when the size is the one that was asked before."""
        if role is Role.PREFILL:
            self._state = replace(self._state, prefill=replace(self._state.prefill, hold=()))
        else:
            self._state = replace(self._state, decode=replace(self._state.decode, hold=()))

    def _decide(self) -> None:
        observations = self._source.observe()
        decision = decide(observations, self._plan.targets, self._plan.limits, self._state)
        self._state = decision.state
        self._reasons = tuple(str(reason) for reason in decision.reasons)
        moves = [
            self._resize(Role.PREFILL, observations.prefill_workers.size, decision.sizes.prefill),
            self._resize(Role.DECODE, observations.decode_workers.size, decision.sizes.decode),
        ]
        self._say(_in_words(observations, decision), is_news=any(moves))

    def _resize(self, role: Role, size: int, wanted: int) -> bool:
        """Whether the pool moved."""
        if wanted == size:
            return False
        try:
            self._executor.resize(role, wanted)
        except HocketError as error:
            _log.warning("%s: %d → %d was not taken: %s", role.value, size, wanted, error)
            return False
        if role in self._operator:
            # The autoscaler has gone on from an operator's size.
            del self._operator[role]
            try:
                self._board.forget(role)
            except RedisError as error:
                self._away(error)
        return True

    def _status(self) -> ScalingStatus:
        return ScalingStatus(
            unix_s=self._unix_s(),
            is_autoscaled=self._plan.is_autoscaled,
            prefill=self._pool_status(Role.PREFILL),
            decode=self._pool_status(Role.DECODE),
            reasons=(*self._operator.values(), *self._reasons, *self._executor.notes()),
        )

    def _pool_status(self, role: Role) -> PoolStatus:
        pool = self._executor.workers(role)
        return PoolStatus(pool.size, pool.ready, len(pool.starting_s), pool.draining)

    def _say(self, text: str, *, is_news: bool) -> None:
        """Logs what is new; what says the same with other numbers is for those who debug."""
        kind = re.sub(r"[\d.,]+", "#", text)
        level = logging.INFO if is_news or kind != self._said else logging.DEBUG
        self._said = kind
        _log.log(level, "%s", text)

    def _away(self, error: RedisError) -> None:
        if not self._is_away:
            _log.warning("the store of sizes is away, the pools are kept: %s", error)
        self._is_away = True


def _in_words(observations: Observations, decision: Decision) -> str:
    """A decision as the lines of a transcript."""
    prefill, decode = observations.prefill_workers, observations.decode_workers
    head = (
        f"prefill {prefill.size} ({prefill.ready} ready) → {decision.sizes.prefill}, "
        f"decode {decode.size} ({decode.ready} ready) → {decision.sizes.decode}"
    )
    return "\n  ".join([head, *(str(reason) for reason in decision.reasons)])
