"""The worker registry in Redis: who serves, where, in which life.

A worker's entry is a lease: a hash with its epoch and description that expires unless renewed. A
later life of the same worker replaces the entry; a late renewal of an earlier life is refused and
tells that life that it is over. Redis holds soft state only: when it loses everything, the next
renewals bring it back. Workers write through `Registration` (a thread in the worker's process),
gateways read through `control_plane.cluster.directory`.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, cast

import redis

from hocket.config import RedisSettings
from hocket.errors import ConfigError
from hocket.types import Fingerprint, Load, Role, WorkerDescription

_log = logging.getLogger(__name__)

# KEYS: entry, index. ARGV: worker id, epoch, description, lease in ms, channel, is draining (0, 1).
# Returns 1 when a new life was entered, 0 when this life was renewed, -1 when a later one is there.
# Gateways are told of a new life, and of one that begins to drain.
RENEW = """
local held = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '-1')
local epoch = tonumber(ARGV[2])
if held > epoch then return -1 end
local draining = redis.call('HGET', KEYS[1], 'draining') or '0'
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'description', ARGV[3], 'draining', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if held ~= epoch or draining ~= ARGV[6] then redis.call('PUBLISH', ARGV[5], ARGV[1]) end
if held == epoch then return 0 end
return 1
"""

# KEYS: entry, index. ARGV: worker id, epoch, channel. Only a life's own entry is removed.
REMOVE = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('PUBLISH', ARGV[3], ARGV[1])
return 1
"""


class Keys:
    """The names of the registry's keys. The braces keep them on one node of a Redis cluster."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.index = f"{{{prefix}}}:workers"
        self.changes = f"{{{prefix}}}:changes"
        self.store_life = f"{{{prefix}}}:life"

    def entry(self, worker_id: str) -> str:
        return f"{{{self._prefix}}}:worker:{worker_id}"


def description_to_json(worker: WorkerDescription) -> str:
    """One line of JSON, readable with any Redis client."""
    return json.dumps({**asdict(worker), "role": worker.role.value}, separators=(",", ":"))


def description_from_json(text: str | bytes) -> WorkerDescription:
    """The inverse. Keys that this version does not know are ignored.

    Raises:
        ValueError: not JSON, or a key without default is missing.
    """
    values = cast("dict[str, Any]", json.loads(text))
    try:
        values["role"] = Role(values["role"])
        values["fingerprint"] = Fingerprint(**_known(Fingerprint, values["fingerprint"]))
        values["load"] = Load(**_known(Load, values.get("load", {})))
        return WorkerDescription(**_known(WorkerDescription, values))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a worker description: {error!r}") from error


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def descriptions(entries: Iterable[Mapping[bytes, bytes]]) -> list[WorkerDescription]:
    """The readable entries; an unreadable one (of an incompatible version) is logged, left out."""
    found: list[WorkerDescription] = []
    for entry in entries:
        if not entry:
            continue
        try:
            found.append(description_from_json(entry[b"description"]))
        except (KeyError, ValueError) as error:
            _log.warning("registry entry left out: %s", error)
    return found


def check_redis(settings: RedisSettings) -> None:
    """Raises ConfigError unless the server at `redis.url` answers."""
    try:
        client: Any = redis.Redis.from_url(
            settings.url, socket_timeout=2.0, socket_connect_timeout=2.0
        )
        try:
            client.ping()
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        raise ConfigError(
            f"redis.url is {_without_password(settings.url)!r}: {error}", field="redis.url"
        ) from error


def _without_password(url: str) -> str:
    """redis://user:password@host -> redis://...@host: the rest may be shown."""
    scheme, separator, rest = url.rpartition("://")
    secret, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'...' if secret else ''}{at}{host}"


class Registry:
    """Reads and writes the registry, synchronously. Every method may raise `redis.RedisError`."""

    def __init__(self, settings: RedisSettings) -> None:
        self.keys = Keys(settings.prefix)
        self._lease_ms = int(settings.lease_s * 1000)
        self._redis: Any = redis.Redis.from_url(
            settings.url, socket_timeout=2.0, socket_connect_timeout=2.0
        )
        self._renew = self._redis.register_script(RENEW)
        self._remove = self._redis.register_script(REMOVE)

    def renew(self, worker: WorkerDescription) -> bool:
        """Enters or renews the worker's lease; False when a later life of it is entered."""
        arguments = [
            worker.worker_id,
            worker.epoch,
            description_to_json(worker),
            self._lease_ms,
            self.keys.changes,
            int(worker.is_draining),
        ]
        return self._renew([self.keys.entry(worker.worker_id), self.keys.index], arguments) >= 0

    def remove(self, worker_id: str, epoch: int) -> bool:
        """Takes this life's entry off the list; False when it was not there."""
        keys = [self.keys.entry(worker_id), self.keys.index]
        return bool(self._remove(keys, [worker_id, epoch, self.keys.changes]))

    def workers(self) -> list[WorkerDescription]:
        """All workers whose lease is valid, by worker id."""
        names = sorted(name.decode() for name in self._redis.smembers(self.keys.index))
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(self.keys.entry(name))
        return descriptions(pipeline.execute())

    def close(self) -> None:
        self._redis.close()


class Registration:
    """Keeps one worker's lease from a thread of its own, from `start` to `stop`.

    `describe` is asked before every renewal, so load and draining are as fresh as the lease; when
    it raises, the worker cannot say who it is and the lease is left to expire. When a later life
    of the worker is found, `on_replaced` is called once, from the thread, and renewals end.
    """

    def __init__(
        self,
        settings: RedisSettings,
        describe: Callable[[], WorkerDescription],
        on_replaced: Callable[[], None],
    ) -> None:
        self._registry = Registry(settings)
        self._renew_s = settings.renew_s
        self._describe = describe
        self._on_replaced = on_replaced
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._asked = threading.Event()
        self._answered = threading.Event()
        self._last: WorkerDescription | None = None
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def renew_now(self, timeout_s: float) -> bool:
        """Has the entry renewed with what `describe` says from now on; False when Redis has not
        taken it within the time."""
        self._answered.clear()
        self._asked.set()
        self._hurry.set()
        return self._answered.wait(timeout_s)

    def stop(self) -> None:
        """Ends the renewals and takes the entry off the list, if Redis can be reached."""
        self._stopping.set()
        self._hurry.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._last is not None:
            try:
                self._registry.remove(self._last.worker_id, self._last.epoch)
            except redis.RedisError as error:
                _log.warning("%s stays registered until its lease ends: %s", self._last, error)
        self._registry.close()

    def _run(self) -> None:
        is_away = False
        while not self._stopping.is_set():
            is_asked = self._asked.is_set()
            self._asked.clear()
            try:
                worker = self._last = self._describe()
                if not self._registry.renew(worker):
                    _log.error("%s: a later life is registered", worker.worker_id)
                    self._on_replaced()
                    return
                if is_away:
                    _log.info("%s is registered again", worker.worker_id)
                is_away = False
                if is_asked:
                    self._answered.set()
            except redis.RedisError as error:
                if not is_away:
                    _log.warning("registry is away, trying on: %s", error)
                is_away = True
            except Exception:
                _log.exception("worker cannot describe itself; its lease is not renewed")
            self._hurry.wait(self._renew_s)
            self._hurry.clear()
