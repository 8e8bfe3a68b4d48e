"""`hocket status` and `hocket scale` against a gateway with stub workers."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from control_plane.cluster.scaling_store import PoolStatus
from hocket.cli import app
from hocket.commands import status as status_command
from hocket.commands.scale import Following, parsed
from hocket.commands.status import figures_between, tables
from hocket.errors import HandOffFailed, InvalidRequest, StoreUnavailable
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.cluster_pb2_grpc import ClusterServicer, add_ClusterServicer_to_server
from hocket.rpc.worker_pb2 import Role as RoleMessage
from hocket.rpc.worker_pb2 import WorkerDescription
from hocket.types import Role
from tests.control_plane.operator_door import operator_door

TEXT = " the quick brown fox jumps over the lazy dog"


async def hocket(*arguments: str) -> Any:
    """The command in a thread, as it is another process in earnest."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments))


def shown(status: cluster.ClusterStatus, before: cluster.ClusterStatus | None = None) -> str:
    page = io.StringIO()
    console = Console(file=page, width=160)
    for part in tables(status, before):
        console.print(part)
    return page.getvalue()


async def test_a_status_shows_pools_workers_and_figures(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        s.decode.engine.step_tokens = 3
        await s.generate(text="hello")
        door.board.publish(PoolStatus(2, 1, 1, 0), PoolStatus(1, 1), "prefill: 2, for the queue")
        await door.client.scale(parsed(["decode=1"]))
        done = await hocket("status", "--address", door.address)
        assert done.exit_code == 0, done.output
        for part in (
            "fox, gateway up",
            "prefill  2      1      1         0",
            "1, 0.",
            "the autoscaler decides",
            "  prefill: 2, for the queue",
            s.prefill.description.worker_id,
            s.decode.description.address,
            "1 OK",
            "ms (mean of 1)",
            "4.0 KiB over memory",
            "(acceptance length)",
        ):
            assert part in done.stdout, done.stdout


async def test_json_has_numbers_words_and_no_unset_field(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        await s.generate(text="hello")
        done = await hocket("status", "--json", "--address", door.address)
        told = json.loads(done.stdout)
        assert told["gateway"]["requests"] == {"OK": 1}
        assert told["gateway"]["hand_off_bytes"] == {"memory": 4096}
        assert [w["worker"]["role"] for w in told["workers"]] == ["prefill", "decode"]
        assert told["workers"][1]["worker"]["load"]["num_blocks"] == 0
        assert told["workers"][1]["worker"]["epoch"] == 1
        assert told["store_fault"] == ""
        assert "pools" not in told


async def test_a_store_that_is_away_is_said_and_the_rest_shown(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        door.board.is_away = True
        await door.view.refresh()
        done = await hocket("status", "--address", door.address)
        assert done.exit_code == 0
        assert "Pool sizes are not known: the store is away: Connection refused" in done.stdout
        assert s.prefill.description.worker_id in done.stdout


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
async def test_watching_shows_it_again_and_again(
    serving: Any, until: Any, monkeypatch: pytest.MonkeyPatch, as_json: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr(status_command, "_WATCH_S", 0.01)
    page = io.StringIO()
    monkeypatch.setattr("sys.stdout", page)
    console = Console(file=page, force_terminal=is_terminal, width=160, height=10)
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        watching = asyncio.create_task(status_command.watch(door.address, console, as_json))
        address = s.decode.description.address
        await until(lambda: page.getvalue().count(address) >= 3)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert ("last interval" in page.getvalue()) == (is_terminal and not as_json)
        if as_json:
            assert all(json.loads(line)["model"] == "fox" for line in page.getvalue().splitlines())


async def test_a_worker_that_gets_no_requests_says_why(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        bad = await s.add(Role.DECODE, {"canary_fails_with": HandOffFailed("no way there")})
        done = await hocket("status", "--address", door.address)
        (row,) = [x for x in done.stdout.splitlines() if x.startswith(bad.description.worker_id)][
            :1
        ]
        assert "kept out" in row
        name = bad.description.worker_id
        assert f"{name} gets no requests: it failed its canary: {name} at" in done.stdout
        assert "no way there" in done.stdout
        told = json.loads((await hocket("status", "--json", "--address", door.address)).stdout)
        kept_out = {w["worker"]["worker_id"]: w["kept_out"] for w in told["workers"]}
        assert {n for n, why in kept_out.items() if why} == {name}


def test_ranks_stand_below_their_group() -> None:
    status = cluster.ClusterStatus(model="m")
    for number in (0, 1):
        worker = WorkerDescription(
            worker_id=f"decode-0.{number}", group="decode-0", rank=number, group_size=2
        )
        worker.role, worker.load.num_blocks, worker.load.free_blocks = (
            RoleMessage.ROLE_DECODE,
            100,
            63,
        )
        worker.load.decode_batch_sum, worker.load.emitted_tokens = 50, 124
        status.workers.add(worker=worker, is_connected=True, is_listed=True)
    lines = [line.strip() for line in shown(status).splitlines() if line]
    (at,) = [i for i, line in enumerate(lines) if line.startswith("decode-0: 2 ranks")]
    assert lines[at + 1].startswith("rank 0")
    assert lines[at + 2].startswith("rank 1")
    assert "37 %" in lines[at + 1]
    assert "2.48" in lines[at + 1]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"is_connected": False, "is_listed": True}, "not reachable"),
        ({"is_connected": True, "is_listed": False}, "not registered"),
        ({"is_connected": True, "is_listed": True}, "ready"),
    ],
)
def test_the_state_of_a_worker_is_a_word(fields: dict[str, bool], state: str) -> None:
    status = cluster.ClusterStatus(model="m")
    status.workers.add(worker=WorkerDescription(worker_id="decode-0"), **fields)
    assert state in shown(status)


def a_worker(name: str, role: Any, **fields: Any) -> WorkerDescription:
    return WorkerDescription(worker_id=name, role=role, address="127.0.0.1:40123", **fields)


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        (a_worker("prefill-0", RoleMessage.ROLE_PREFILL), ["-"]),
        (a_worker("decode-0", RoleMessage.ROLE_DECODE), ["none", "yet"]),
        (a_worker("decode-0", RoleMessage.ROLE_DECODE, transport="cma"), ["cma"]),
    ],
)
def test_only_a_worker_that_reads_waits_for_a_transport(
    worker: WorkerDescription, words: list[str]
) -> None:
    status = cluster.ClusterStatus(model="m")
    status.workers.add(worker=worker, is_connected=True, is_listed=True)
    (line,) = [line for line in shown(status).splitlines() if worker.worker_id in line]
    assert line.split()[-1 - len(words) : -1] == words


@pytest.mark.parametrize(("unread", "said"), [(1, "1 block unread"), (2, "2 blocks unread")])
def test_one_block_is_no_blocks(unread: int, said: str) -> None:
    status = cluster.ClusterStatus(model="m")
    worker = a_worker("prefill-0", RoleMessage.ROLE_PREFILL)
    worker.load.num_blocks, worker.load.unread_blocks = 10, unread
    status.workers.add(worker=worker)
    assert said in shown(status)


@pytest.mark.parametrize("width", [40, 80])
def test_an_address_is_whole_on_any_terminal(width: int) -> None:
    status = cluster.ClusterStatus(model="m")
    worker = a_worker("decode-10", RoleMessage.ROLE_DECODE, transport="rc_mlx5,cuda_ipc")
    worker.load.num_blocks, worker.load.unread_blocks = 1000, 100
    status.workers.add(worker=worker)
    page = io.StringIO()
    status_command.show(Console(file=page, width=width), status, as_json=False)
    assert worker.address in page.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_watching_goes_on_after_the_gateway_was_away(
    until: Any, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(status_command, "_WATCH_S", 0.01)
    page, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", errors)
    console = Console(file=page, force_terminal=is_terminal, width=160)
    server, port = await bare_door("first", 0)
    address = f"127.0.0.1:{port}"
    watching = asyncio.create_task(status_command.watch(address, console, False))
    await until(lambda: "first" in page.getvalue())
    await server.stop(None)
    told = page if is_terminal else errors
    await until(lambda: "Asking again" in told.getvalue())
    assert f"no gateway answers at '{address}'" in told.getvalue()
    server, _ = await bare_door("second", port)
    await until(lambda: "second" in page.getvalue())
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await server.stop(None)
    assert errors.getvalue().count("Asking again") == (0 if is_terminal else 1), "said once"


async def bare_door(model: str, port: int) -> tuple[grpc.aio.Server, int]:
    """An operator's door that tells no more than a model's name; 0 takes a free port."""

    class Door(ClusterServicer):
        async def GetStatus(self, request: Any, context: Any) -> cluster.ClusterStatus:
            return cluster.ClusterStatus(model=model)

    server = grpc.aio.server()
    add_ClusterServicer_to_server(Door(), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


def test_watching_shows_the_time_in_between_beside_the_whole() -> None:
    before = cluster.GatewayStatus(uptime_s=10, output_tokens=100, requests={"OK": 4})
    before.first_token.count, before.first_token.sum_s = 4, 4.0
    before.drafts.verify_steps, before.drafts.emitted_tokens = 50, 100
    before.drafts.drafted_by_position.extend([50])
    before.drafts.accepted_by_position.extend([40])
    now = cluster.GatewayStatus(uptime_s=12, output_tokens=160, requests={"OK": 5, "OVERLOADED": 1})
    now.first_token.count, now.first_token.sum_s = 5, 4.1
    now.drafts.verify_steps, now.drafts.emitted_tokens = 60, 130
    now.drafts.drafted_by_position.extend([60, 10])
    now.drafts.accepted_by_position.extend([49, 5])
    between = figures_between(now, before)
    assert between["requests"] == "1 OK, 1 OVERLOADED"
    assert between["output tokens"] == "60, 30.0/s"
    assert between["time to first token"] == "100.0 ms (mean of 1)"
    assert between["tokens per step"] == "3.00 (acceptance length)"
    assert between["survival by position"] == "0.90 0.50"
    assert between["drafts accepted"] == "0.70"
    assert figures_between(now)["time to first token"] == "820.0 ms (mean of 5)"


def test_what_went_wrong_unseen_by_clients_is_shown_once_it_has_happened() -> None:
    before = cluster.GatewayStatus(prompt_tokens=100)
    now = cluster.GatewayStatus(prompt_tokens=300, cached_tokens=50, recomputed_requests=3)
    between = figures_between(now, before)
    assert between["prompt tokens"] == "200, 25 % of them cached"
    assert between["prompts computed twice"] == "3"
    assert "cache promises broken" not in between
    assert figures_between(before)["prompt tokens"] == "100"
    assert "prompts computed twice" not in figures_between(before)


async def test_the_door_tells_what_went_wrong(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        s.decode.engine.joins_with = {"recomputed": True, "recompute_reason": "the READ failed"}
        usage = (await s.generate(text="hello there")).finish.usage
        gateway = (await door.client.get_status()).gateway
        assert (gateway.recomputed_requests, gateway.migrations) == (1, 0)
        assert (gateway.prompt_tokens, gateway.cached_tokens) == (usage.prompt_tokens, 0)


def test_nothing_served_is_said_without_dividing_by_nothing() -> None:
    figures = figures_between(cluster.GatewayStatus())
    assert figures["requests"] == figures["time to first token"] == "none"
    assert figures["tokens per step"] == "no step"


def test_a_gateway_that_was_started_again_is_not_compared_with_itself() -> None:
    before = cluster.ClusterStatus(gateway=cluster.GatewayStatus(gateway_id="a", output_tokens=9))
    now = cluster.ClusterStatus(gateway=cluster.GatewayStatus(gateway_id="b", output_tokens=1))
    assert "last interval" not in shown(now, before)
    now.gateway.gateway_id = "a"
    now.gateway.output_tokens = 10
    assert "last interval" in shown(now, before)


@pytest.mark.parametrize("arguments", [["status"], ["status", "--watch"], ["scale", "prefill=2"]])
def test_nobody_listening_is_one_line(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, [*arguments, "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no gateway answers at '127.0.0.1:1'")
    assert "hocket up" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_sizes_are_asked_for_and_told(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        done = await hocket("scale", "prefill=2", "decode=3", "--address", door.address)
        assert (done.exit_code, done.stdout) == (0, "asked for prefill=2 decode=3\n")
        done = await hocket("scale", "decode=auto", "--address", door.address)
        assert done.stdout == "asked for prefill=2 decode=auto\n"


async def test_a_refused_size_is_one_line_with_value_limit_and_way_out(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        done = await hocket("scale", "decode=9", "--address", door.address)
        assert done.exit_code == 1
        assert done.stderr == (
            "error: decode is 9; it must be from 1 to 8, or auto. "
            "Raise autoscaler.decode.max_workers.\n"
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["foo=2"], "foo=2 is 'foo'; it must be prefill=N or decode=N"),
        (["prefill"], "prefill is ''; it must be a number of workers, or auto"),
        (["prefill=two"], "prefill is 'two'"),
        (["decode=-1"], "decode is '-1'"),
        (["decode=99999999999"], "decode is '99999999999'"),
        (["decode=1", "decode=2"], "it must be one size for decode"),
    ],
)
def test_words_that_are_no_sizes_are_named(words: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(words)
    assert said in str(caught.value)


async def test_waiting_ends_when_the_pools_have_their_sizes(serving: Any) -> None:
    async with serving(TEXT) as s, operator_door(s.gateway) as door:
        door.board.publish(PoolStatus(1, 1), PoolStatus(1, 1))
        following = asyncio.create_task(door.view.run())

        async def grow() -> None:
            """As the scaling loop would: a status now and then."""
            while not door.board.asked:
                await asyncio.sleep(0.01)
            while True:
                door.board.publish(PoolStatus(2, 2), PoolStatus(1, 1))
                await asyncio.sleep(0.05)

        loop = asyncio.create_task(grow())
        done = await hocket("scale", "prefill=2", "--wait", "--address", door.address)
        assert done.exit_code == 0, done.output
        lines = done.stdout.splitlines()
        assert lines[0] == "asked for prefill=2"
        assert lines[-2:] == ["prefill: 2 of 2 ready; decode: 1 of 1 ready", "done"]
        for task in (loop, following):
            task.cancel()


def _status(unix_s: float, ready: int, **pools: Any) -> cluster.ClusterStatus:
    status = cluster.ClusterStatus()
    status.pools.CopyFrom(cluster.PoolsStatus(unix_s=unix_s, **pools))
    for pool in (status.pools.prefill, status.pools.decode):
        pool.size, pool.ready = 2, ready
    return status


def test_a_status_from_before_the_request_does_not_end_the_wait() -> None:
    following = Following(parsed(["prefill=2"]))
    assert not following.take(_status(1.0, 2))
    assert not following.take(_status(1.0, 2))
    assert not following.take(_status(2.0, 2))
    assert following.take(_status(3.0, 2))


def test_a_pool_that_starts_or_drains_is_waited_for() -> None:
    following = Following(parsed(["prefill=2"]))
    for unix_s in (1.0, 2.0, 3.0):
        following.take(_status(unix_s, 1))
    draining = _status(4.0, 2)
    draining.pools.prefill.draining = 1
    assert not following.take(draining)
    draining.pools.prefill.draining, draining.pools.decode.draining = 0, 1
    assert following.take(draining), "nothing was asked of the other pool"


def test_a_wait_ends_when_nobody_runs_the_pools() -> None:
    following = Following(parsed(["prefill=2"]))
    with pytest.raises(StoreUnavailable, match=r"nobody runs the pools.*31 s old"):
        following.take(_status(1.0, 1, age_s=31))
    with pytest.raises(StoreUnavailable, match="no status of theirs"):
        following.take(cluster.ClusterStatus())
    assert not following.take(cluster.ClusterStatus(store_fault="away")), "it may come back"
