"""Pools that grow and shrink under requests, by the load and by an operator: none may fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from control_plane.cluster.registry import Registry
from control_plane.cluster.scaling_store import PoolStatus, ScalingStatus, ScalingStore
from hocket.config import RedisSettings
from hocket.errors import ConfigError, HocketError
from hocket.rpc.clients import GenerationClient
from hocket.types import Role
from tests.end_to_end.running_cluster import Case, Running, answer_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

# Targets that no machine meets, so that sizes follow from counts and not from its speed: decode
# runs two requests per worker, and prefill is busy with long prompts all the time.
OVERRIDES = (
    "autoscaler.enabled=true",
    "autoscaler.interval_s=1",
    "autoscaler.ttft_s=0.001",
    "autoscaler.inter_token_s=0.0001",
    "autoscaler.queue_drain_s=1",
    "autoscaler.up_window_s=1",
    "autoscaler.down_window_s=3",
    "autoscaler.prefill.max_workers=2",
    "autoscaler.decode.max_workers=2",
    "decode.max_batch=2",
    # Decode queues until it has grown, however long that takes here.
    "transfer.open_timeout_s=100",
    "decode.num_blocks=200",
    "prefill.num_blocks=200",
    "prefill.chunk_tokens=256",
)
LONG_PROMPT = Case(tuple(3 + (i * 7) % 900 for i in range(1500)), 4)
LONG_OUTPUT = Case(tuple(range(3, 40)), 60)
SMALL = PoolStatus(size=1, ready=1)


class Traffic:
    """Clients that each ask for the same answer again and again, until `stop`."""

    def __init__(self, up: Running, cases: list[Case]) -> None:
        self.num_answers = 0
        self.faults: list[str] = []
        self._up = up
        self._outputs: dict[Case, set[tuple[int, ...]]] = {case: set() for case in cases}
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(case,)) for case in cases]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Waits for the last answers; raises unless all were whole and alike."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)
        assert self.faults == []
        assert all(len(outputs) == 1 for outputs in self._outputs.values()), "answers differ"

    def _ask(self, case: Case) -> None:
        async def story(client: GenerationClient) -> None:
            while not self._stopping.is_set():
                try:
                    answer = await answer_of(client, case.message(), 100)
                except HocketError as error:
                    self.faults.append(f"{type(error).__name__}: {error}")
                    return
                self._outputs[case].add(answer.token_ids)
                self.num_answers += 1

        self._up.with_client(story)


def test_a_start_without_room_says_what_is_missing() -> None:
    """First in this file: a process is in one Ray at a time, and the fixture's lasts."""
    started = time.monotonic()
    with (
        pytest.raises(ConfigError, match=r"decode\.placement: Ray has no room for 1 x.*1000"),
        running("decode.placement.num_gpus=1000"),
    ):
        pass
    assert time.monotonic() - started < 60, "a local Ray never grows: waiting is of no use"


@pytest.fixture(scope="module")
def up() -> Iterator[Running]:
    with running(*OVERRIDES) as cluster:
        yield cluster


@pytest.fixture
def store(up: Running) -> Iterator[ScalingStore]:
    opened = ScalingStore(RedisSettings(url=up.serving.redis_url))
    yield opened
    opened.close()


def wait_for(
    store: ScalingStore, is_so: Callable[[ScalingStatus], bool], timeout_s: float = 90.0
) -> ScalingStatus:
    deadline = time.monotonic() + timeout_s
    while True:
        status = store.status()
        if status is not None and is_so(status):
            return status
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {status}"
        time.sleep(0.1)


def registered(up: Running) -> list[str]:
    registry = Registry(RedisSettings(url=up.serving.redis_url))
    try:
        return [worker.worker_id for worker in registry.workers()]
    finally:
        registry.close()


def test_an_operator_resizes_a_pool_under_requests_and_none_fails(
    up: Running, store: ScalingStore
) -> None:
    store.set_sizes({Role.PREFILL: 1, Role.DECODE: 1})
    traffic = Traffic(up, [LONG_OUTPUT, LONG_PROMPT, LONG_OUTPUT])
    store.set_sizes({Role.PREFILL: 2, Role.DECODE: 1})
    grown = wait_for(store, lambda status: status.prefill.ready == 2)
    assert grown.decode.size == 1, "the autoscaler took an operator's pool"
    assert any("asked for by an operator" in reason for reason in grown.reasons)
    assert registered(up) == ["decode-0", "prefill-0", "prefill-1"]
    seen = traffic.num_answers
    while traffic.num_answers < seen + 4 and not traffic.faults:
        time.sleep(0.1)
    store.set_sizes({Role.PREFILL: 1})
    wait_for(store, lambda status: status.prefill == SMALL)
    assert registered(up) == ["decode-0", "prefill-0"]
    traffic.stop()
    store.set_sizes({Role.PREFILL: None, Role.DECODE: None})
    wait_for(store, lambda status: status.prefill == status.decode == SMALL)
    assert store.targets() == {}


def test_pools_follow_the_load_up_and_down_and_no_request_fails(
    up: Running, store: ScalingStore
) -> None:
    wait_for(store, lambda status: status.prefill == status.decode == SMALL)
    traffic = Traffic(up, [LONG_OUTPUT] * 5 + [LONG_PROMPT] * 5)
    grown = wait_for(store, lambda s: s.prefill.ready == s.decode.ready == 2)
    assert grown.is_autoscaled
    assert any(reason.startswith("prefill: needs") for reason in grown.reasons)
    assert any(reason.startswith("decode: needs") for reason in grown.reasons)
    assert registered(up) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
    traffic.stop()
    shrunk = wait_for(store, lambda status: status.prefill == status.decode == SMALL)
    assert "decode: no load" in shrunk.reasons
    assert registered(up) == ["decode-0", "prefill-0"]
    assert traffic.num_answers >= 10
