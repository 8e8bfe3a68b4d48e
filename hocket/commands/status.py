"""`hocket status`: what a gateway knows of the cluster, as tables for people or as JSON.

`ask` fetches one `ClusterStatus` from the operator's door, `tables` shows it. With `--watch` it is
fetched again and again, and figures of the time in between stand beside those since the start.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hocket.commands.doors import OPERATOR, check_address, explained
from hocket.errors import DeadlineExceeded, HocketError, WorkerUnavailable
from hocket.rpc import cluster_pb2 as cluster
from hocket.rpc.clients import ClusterClient
from hocket.rpc.worker_pb2 import Load, Role

_WATCH_S = 1.0
_LONG_LINE = 160
_ROLES = {Role.ROLE_PREFILL: "prefill", Role.ROLE_DECODE: "decode"}


async def ask(client: ClusterClient, address: str) -> cluster.ClusterStatus:
    """One status. Raises HocketError; when nobody answers, one that says what to look at."""
    try:
        return await client.get_status()
    except HocketError as error:
        raise explained(error, address, OPERATOR) from error


def run(address: str, *, as_json: bool, is_watching: bool) -> int:
    """The command; returns its exit code."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # Nobody reads along: lines are better long than folded.
        console.width = _LONG_LINE
    command = watch if is_watching else _once
    try:
        check_address(address)
        asyncio.run(command(address, console, as_json))
    except HocketError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if is_watching else 130
    return 0


async def _once(address: str, console: Console, as_json: bool) -> None:
    client = ClusterClient(address)
    try:
        show(console, await ask(client, address), as_json)
    finally:
        await client.close()


async def watch(address: str, console: Console, as_json: bool) -> None:
    """Until it is interrupted, or there is no gateway at first; one that goes is waited for."""
    client = ClusterClient(address)
    try:
        before = await ask(client, address)
        if as_json or not console.is_terminal:
            await _watch_lines(client, address, console, before, as_json)
        first = Group(*tables(before))
        with Live(first, console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                await asyncio.sleep(_WATCH_S)
                now = await _ask_again(client, address)
                if isinstance(now, HocketError):
                    away = Text(f"{now} Asking again. What was seen last:", style="red")
                    live.update(Group(away, Text(), *tables(before)), refresh=True)
                    continue
                live.update(Group(*tables(now, before)), refresh=True)
                before = now
    finally:
        await client.close()


async def _watch_lines(
    client: ClusterClient,
    address: str,
    console: Console,
    first: cluster.ClusterStatus,
    as_json: bool,
) -> NoReturn:
    """For a pipe or a file: one status after the other; that nobody answers is said once."""
    status: cluster.ClusterStatus | HocketError = first
    is_away = False
    while True:
        if not isinstance(status, HocketError):
            show(console, status, as_json)
        elif not is_away:
            print(f"{status} Asking again.", file=sys.stderr, flush=True)
        is_away = isinstance(status, HocketError)
        await asyncio.sleep(_WATCH_S)
        status = await _ask_again(client, address)


async def _ask_again(client: ClusterClient, address: str) -> cluster.ClusterStatus | HocketError:
    """A status, or that there is no answer now. Raises HocketError when none will come."""
    try:
        return await ask(client, address)
    except (WorkerUnavailable, DeadlineExceeded) as error:
        return error


def show(console: Console, status: cluster.ClusterStatus, as_json: bool) -> None:
    """Prints one status, for people or as a line of JSON."""
    if as_json:
        print(json.dumps(as_dict(status)), flush=True)
        return
    for part in tables(status):
        console.print(part, crop=False)


def as_dict(message: Message) -> dict[str, Any]:
    """A message as JSON has it: every field but an unset optional one; 64-bit numbers are numbers,
    not strings as in protobuf's own JSON; a role is a word."""
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(field: Any, value: Any) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [as_dict(one) if kind is not None else one for one in value]
    if kind is not None:
        return as_dict(value)
    if field.enum_type is not None:
        return _ROLES.get(value, "unknown") if field.name == "role" else value
    return value


def tables(
    status: cluster.ClusterStatus, before: cluster.ClusterStatus | None = None
) -> list[RenderableType]:
    """Pools, workers and figures; `before` is an earlier status of the same gateway."""
    gateway = status.gateway
    head = f"[bold]{status.model}[/], gateway up {_span(gateway.uptime_s)}: "
    head += f"{gateway.requests_in_flight} requests in flight"
    if gateway.requests_queued:
        head += f", {gateway.requests_queued} of them wait for the first token"
    if before is not None and before.gateway.gateway_id != gateway.gateway_id:
        before = None
    return [
        Text.from_markup(head),
        Text(),
        _pools(status),
        *_reasons(status),
        Text(),
        _workers(status.workers),
        *_kept_out(status.workers),
        *_synthetic(status.workers),
        Text(),
        _figures(gateway, before.gateway if before is not None else None),
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pools(status: cluster.ClusterStatus) -> Table:
    table = _table("pool", "asked", "ready", "starting", "draining", "operator")
    for name in ("prefill", "decode"):
        target = _target(status.targets, name)
        if not status.HasField("pools"):
            table.add_row(name, "?", "?", "?", "?", target)
            continue
        pool: cluster.PoolStatus = getattr(status.pools, name)
        counts = (pool.size, pool.ready, pool.starting, pool.draining)
        table.add_row(name, *map(str, counts), target)
    return table


def _target(targets: cluster.ScaleTargets, name: str) -> str:
    """What an operator asked of a pool, in words."""
    if not targets.HasField(name):  # pyright: ignore[reportArgumentType]
        return ""
    target: cluster.PoolTarget = getattr(targets, name)
    size = "auto" if target.size.WhichOneof("size") == "auto" else str(target.size.workers)
    return f"{size}, {_span(target.age_s)} ago"


def _reasons(status: cluster.ClusterStatus) -> Iterator[Text]:
    """Who decides on sizes, and what was said last."""
    if status.store_fault:
        yield Text(f"Pool sizes are not known: {status.store_fault}", style="red")
        return
    if not status.HasField("pools"):
        yield Text("Pool sizes are not known: nobody has published them.", style="red")
        return
    pools = status.pools
    who = "the autoscaler decides" if pools.is_autoscaled else "only operators change sizes"
    yield Text(f"{who}; seen {_span(pools.age_s)} ago", style="dim")
    for reason in pools.reasons:
        yield Text(f"  {reason}")


def _workers(workers: Sequence[cluster.WorkerStatus]) -> Table:
    """The ranks of a group stand below its name."""
    columns = ("worker", "state", "runs", "waits", "KV used", "tokens per step", "KV over")
    table = _table(*columns, "address")
    table.columns[1].min_width = len("registered")
    # Addresses are copied: other columns fold, and where that is not enough lines are too long.
    table.columns[-1].min_width = max((len(s.worker.address) for s in workers), default=1)
    table.columns[-1].no_wrap = True
    group = ""
    for status in workers:
        worker, load = status.worker, status.worker.load
        if worker.group and worker.group != group:
            table.add_row(f"{worker.group}: {worker.group_size} ranks")
        group = worker.group
        used = load.num_blocks - load.free_blocks
        share = f"{100 * used / load.num_blocks:.0f} %" if load.num_blocks else "?"
        if load.unread_blocks:
            share += f", {load.unread_blocks} block{'s' * (load.unread_blocks != 1)} unread"
        table.add_row(
            f"  rank {worker.rank}" if group else worker.worker_id,
            _state(status),
            str(load.running_requests),
            str(load.waiting_requests),
            share,
            _tokens_per_step(load),
            worker.transport or ("-" if worker.role == Role.ROLE_PREFILL else "none yet"),
            worker.address,
        )
    if not workers:
        table.add_row("none", "no worker is registered")
    return table


def _kept_out(workers: Sequence[cluster.WorkerStatus]) -> Iterator[Text]:
    """Why workers that are there get no requests."""
    for status in workers:
        if status.kept_out and status.is_connected:
            text = f"{status.worker.worker_id} gets no requests: it {status.kept_out}"
            yield Text(text, style="red")


def _synthetic(workers: Sequence[cluster.WorkerStatus]) -> Iterator[Text]:
    """Whose output is not the model's."""
    for status in workers:
        worker = status.worker
        if worker.synthetic_acceptance > 0:
            text = (
                f"{worker.worker_id} accepts drafts at random (SYNTHETIC, "
                f"{worker.synthetic_acceptance:.2f}): what it says is not the model's"
            )
            yield Text(text, style="red")


def _tokens_per_step(load: Load) -> str:
    """Since the worker's start: its acceptance length; prefill workers have none."""
    batch = load.decode_batch_sum
    return f"{load.emitted_tokens / batch:.2f}" if batch else ""


def _state(status: cluster.WorkerStatus) -> str:
    if not status.is_connected:
        return "not reachable"
    if status.worker.is_draining:
        return "draining"
    if status.kept_out:
        return "kept out"
    return "ready" if status.is_listed else "not registered"


def _figures(gateway: cluster.GatewayStatus, before: cluster.GatewayStatus | None) -> Table:
    """Since the gateway's start and, with an earlier status, of the time in between."""
    table = _table("gateway", "since its start", *(["last interval"] if before is not None else []))
    spans = [figures_between(gateway)]
    if before is not None:
        spans.append(figures_between(gateway, before))
    for name in spans[0]:
        table.add_row(name, *(span[name] for span in spans))
    return table


def figures_between(
    now: cluster.GatewayStatus, before: cluster.GatewayStatus | None = None
) -> dict[str, str]:
    """Figures in words, of the time between two statuses, or since the start."""
    before = before or cluster.GatewayStatus()
    requests = _grown(now.requests, before.requests)
    moved = _grown(now.hand_off_bytes, before.hand_off_bytes)
    tokens = now.output_tokens - before.output_tokens
    seconds = now.uptime_s - before.uptime_s
    return {
        "requests": ", ".join(f"{n:,} {outcome}" for outcome, n in requests.items()) or "none",
        "time to first token": _mean(now.first_token, before.first_token),
        "between tokens": _mean(now.inter_token, before.inter_token),
        "hand-off": _mean(now.hand_off, before.hand_off),
        "KV moved": ", ".join(f"{_bytes(n)} over {t or '?'}" for t, n in moved.items()) or "none",
        "prompt tokens": _prompt_tokens(now, before),
        "output tokens": f"{tokens:,}" + (f", {tokens / seconds:.1f}/s" if seconds > 0 else ""),
        **_draft_figures(now.drafts, before.drafts),
        **_troubles(now, before),
    }


def _prompt_tokens(now: cluster.GatewayStatus, before: cluster.GatewayStatus) -> str:
    tokens = now.prompt_tokens - before.prompt_tokens
    cached = now.cached_tokens - before.cached_tokens
    return f"{tokens:,}" + (f", {100 * cached / tokens:.0f} % of them cached" if cached else "")


def _troubles(now: cluster.GatewayStatus, before: cluster.GatewayStatus) -> dict[str, str]:
    """What was served although something went wrong; docs/metrics.md says what it means. A line
    for what has happened since the gateway's start."""
    names = {
        "recomputed_requests": "prompts computed twice",
        "broken_prefix_promises": "cache promises broken",
        "migrations": "outputs moved to another worker",
    }
    return {
        words: f"{getattr(now, field) - getattr(before, field):,}"
        for field, words in names.items()
        if getattr(now, field)
    }


def _draft_figures(now: cluster.DraftStatus, before: cluster.DraftStatus) -> dict[str, str]:
    """Both rates that circulate, each under its own name, and the acceptance length."""
    drafted = _grown_each(now.drafted_by_position, before.drafted_by_position)
    accepted = _grown_each(now.accepted_by_position, before.accepted_by_position)
    steps = now.verify_steps - before.verify_steps
    emitted = now.emitted_tokens - before.emitted_tokens
    survival = [f"{a / d:.2f}" if d else "-" for a, d in zip(accepted, drafted, strict=True)]
    return {
        "tokens per step": f"{emitted / steps:.2f} (acceptance length)" if steps else "no step",
        "drafts accepted": f"{sum(accepted) / sum(drafted):.2f}"
        if sum(drafted)
        else "none drafted",
        "survival by position": " ".join(survival) or "none drafted",
    }


def _grown(now: Any, before: Any) -> dict[str, int]:
    grown = {key: now[key] - before.get(key, 0) for key in sorted(now)}
    return {key: number for key, number in grown.items() if number}


def _grown_each(now: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = [*before, *[0] * (len(now) - len(before))]
    return [a - b for a, b in zip(now, padded, strict=True)]


def _mean(now: cluster.Latency, before: cluster.Latency) -> str:
    count = now.count - before.count
    if count <= 0:
        return "none"
    return f"{(now.sum_s - before.sum_s) / count * 1e3:.1f} ms (mean of {count:,})"


def _bytes(number: int) -> str:
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
