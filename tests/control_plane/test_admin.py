"""The operator's door from outside: a real client, a real gateway, the store in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from control_plane.admin import AdminOptions, AdminServer
from control_plane.cluster.scaling_store import PoolStatus
from hocket.errors import ConfigError, InvalidRequest, StoreUnavailable
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.worker_pb2 import Role as RoleMessage
from hocket.types import Load, Role
from tests.control_plane.operator_door import LIMITS, operator_door

TEXT = " the quick brown fox jumps over the lazy dog"


def sizes(**asked: int | str) -> cluster.ScaleRequest:
    request = cluster.ScaleRequest()
    for name, size in asked.items():
        pool: cluster.PoolSize = getattr(request, name)
        if size == "auto":
            pool.auto = True
        else:
            pool.workers = int(size)
    return request


async def test_a_status_has_every_worker_with_its_latest_load(serving: Any, until: Any) -> None:
    ranks = {"group": "decode-0", "rank": 1, "group_size": 2}
    async with serving(TEXT, decode=ranks) as s, operator_door(s.gateway) as door:
        load = Load(running_requests=3, free_blocks=5, num_blocks=16, steps=99)
        s.decode.engine.sessions.publish((), load)
        await until(lambda: any(w.load.steps == 99 for w in s.gateway.snapshots()))
        prefill, decode = (await door.client.get_status()).workers
        assert [w.worker.role for w in (prefill, decode)] == [
            RoleMessage.ROLE_PREFILL,
            RoleMessage.ROLE_DECODE,
        ]
        worker = decode.worker
        assert (worker.group, worker.rank, worker.group_size) == ("decode-0", 1, 2)
        assert worker.address == s.decode.description.address
        assert worker.fingerprint.dtype == "float32"
        assert (worker.load.running_requests, worker.load.free_blocks) == (3, 5)
        assert prefill.is_connected
        assert prefill.is_listed


async def test_workers_stand_in_the_order_of_their_numbers(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        names = [("decode-10", 0), ("decode-9", 1), ("decode-9", 0)]
        many = [
            replace(s.decode.description, worker_id=f"{name}.{rank}", group=name, rank=rank)
            for name, rank in names
        ]
        s.directory.set([*many, s.prefill.description])
        found = [
            w.worker.worker_id for w in (await door.client.get_status()).workers if w.is_listed
        ]
        assert found[1:] == ["decode-9.0", "decode-9.1", "decode-10.0"]


async def test_the_gateways_figures_count_what_it_has_served(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        s.decode.engine.step_tokens = 3
        answer = await s.generate(text="hello")
        with suppress(InvalidRequest):
            await s.generate(text="hello", top_logprobs=10**6)
        gateway = (await door.client.get_status()).gateway
        usage = answer.finish.usage
        assert dict(gateway.requests) == {"OK": 1, "INVALID_REQUEST": 1}
        assert (gateway.requests_in_flight, gateway.requests_queued) == (0, 0)
        assert gateway.output_tokens == usage.output_tokens
        assert gateway.first_token.count == 1
        assert gateway.first_token.sum_s > 0
        assert gateway.inter_token.count == usage.output_tokens - 1
        assert dict(gateway.hand_off_bytes) == {"memory": 4096}
        assert gateway.drafts.verify_steps == usage.verify_steps > 0
        assert list(gateway.drafts.drafted_by_position) == list(usage.drafted_by_position)
        assert list(gateway.drafts.accepted_by_position) == list(usage.accepted_by_position)


async def test_a_request_in_flight_is_seen_on_its_workers(serving: Any, until: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        s.prefill.engine.stall_at = s.decode.engine.stall_at = 0
        running = asyncio.create_task(s.generate(text="hello"))
        await until(lambda: len(s.prefill.engine.submitted) == 1)
        status = await door.client.get_status()
        assert (status.gateway.requests_in_flight, status.gateway.requests_queued) == (1, 1)
        assert status.workers[0].gateway_requests == 1
        s.prefill.engine.resume.set()
        s.decode.engine.resume.set()
        await running


async def test_pools_and_reasons_are_told_as_published(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        assert not (await door.client.get_status()).HasField("pools")
        door.board.publish(PoolStatus(2, 1, 1, 0), PoolStatus(3, 3, 0, 1), "decode: because")
        await door.view.refresh()
        pools = (await door.client.get_status()).pools
        assert (pools.prefill.size, pools.prefill.ready, pools.prefill.starting) == (2, 1, 1)
        assert (pools.decode.size, pools.decode.draining) == (3, 1)
        assert list(pools.reasons) == ["decode: because"]
        assert pools.is_autoscaled
        assert 0 <= pools.age_s < 60


async def test_sizes_are_written_and_told(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        targets = (await door.client.scale(sizes(decode=3))).targets
        assert targets.decode.size.workers == 3
        assert not targets.HasField("prefill")
        await door.client.scale(sizes(prefill=2))
        targets = (await door.client.scale(sizes(decode="auto"))).targets
        assert targets.prefill.size.workers == 2
        assert targets.decode.size.auto
        assert {role: one.size for role, one in door.board.asked.items()} == {
            Role.PREFILL: 2,
            Role.DECODE: None,
        }
        assert (await door.client.get_status()).targets.prefill.size.workers == 2


@pytest.mark.parametrize(
    ("request_", "field", "said"),
    [
        (sizes(prefill=0), "prefill", "prefill is 0; it must be from 1 to 4, or auto."),
        (sizes(decode=9), "decode", "it must be from 1 to 8, or auto. Raise autoscaler.decode."),
        (sizes(prefill=1, decode=2**32 - 1), "decode", "from 1 to 8"),
        (cluster.ScaleRequest(), "sizes", "prefill=N, decode=N or both"),
        (cluster.ScaleRequest(prefill=cluster.PoolSize()), "prefill", "prefill is missing"),
        (cluster.ScaleRequest(prefill=cluster.PoolSize(auto=False)), "prefill", "is missing"),
    ],
)
async def test_a_size_that_cannot_be_is_refused_and_nothing_is_written(
    serving: Any, request_: cluster.ScaleRequest, field: str, said: str
) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        with pytest.raises(InvalidRequest) as caught:
            await door.client.scale(request_)
        assert caught.value.field == field
        assert said in str(caught.value)
        assert door.board.asked == {}


async def test_auto_without_an_autoscaler_is_refused(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        door.board.publish(PoolStatus(1, 1), PoolStatus(1, 1), is_autoscaled=False)
        await door.view.refresh()
        with pytest.raises(InvalidRequest, match=r"a number: no autoscaler runs.*enabled"):
            await door.client.scale(sizes(prefill="auto"))


async def test_without_the_store_the_rest_is_told_and_sizes_are_refused(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        door.board.publish(PoolStatus(1, 1), PoolStatus(1, 1))
        door.board.is_away = True
        await door.view.refresh()
        status = await door.client.get_status()
        assert len(status.workers) == 2
        assert "Connection refused" in status.store_fault
        assert not status.HasField("pools"), "an old size must not pass for a new one"
        with pytest.raises(StoreUnavailable, match="ask again") as caught:
            await door.client.scale(sizes(prefill=2))
        assert caught.value.is_retryable
        door.board.is_away = False
        await door.view.refresh()
        status = await door.client.get_status()
        assert status.HasField("pools")
        assert status.store_fault == ""


async def test_what_another_version_wrote_is_a_fault_and_not_the_end(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:

        def unreadable() -> None:
            raise KeyError("decode")

        door.board.status = unreadable  # type: ignore[method-assign]
        await door.view.refresh()
        assert "another version" in (await door.client.get_status()).store_fault


async def test_the_view_follows_by_itself(serving: Any, until: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        following = asyncio.create_task(door.view.run())
        door.board.publish(PoolStatus(4, 4), PoolStatus(1, 1))
        await until(lambda: door.view.scaling.status is door.board.published)
        following.cancel()


async def test_pool_sizes_are_metrics_of_the_gateway(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        door.board.publish(PoolStatus(2, 1, 1, 0), PoolStatus(3, 3, 0, 1), unix_s=1234.0)
        await door.client.scale(sizes(decode=3))
        value = door.registry.get_sample_value
        assert value("hocket_pool_workers", {"pool": "prefill", "state": "asked"}) == 2
        assert value("hocket_pool_workers", {"pool": "decode", "state": "draining"}) == 1
        assert value("hocket_pool_operator_workers", {"pool": "decode"}) == 3
        assert value("hocket_autoscaler_enabled") == 1
        assert value("hocket_pool_status_timestamp_seconds") == 1234
        door.board.is_away = True
        await door.view.refresh()
        assert value("hocket_pool_workers", {"pool": "prefill", "state": "asked"}) is None
        assert value("hocket_pool_operator_workers", {"pool": "decode"}) is None


async def test_a_port_that_is_taken_is_named(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        port = int(door.address.rpartition(":")[2])
        options = AdminOptions("127.0.0.1", port, "fox", "g", LIMITS)
        again = AdminServer(options, door.view, s.gateway.snapshots, s.gateway.metrics.figures)
        with pytest.raises(ConfigError, match=r"gateway\.admin_port.*-1 closes"):
            await again.start()
