"""One TOML file becomes frozen dataclasses, one per table; nothing else configures Hocket.

`load_config(path, overrides)` reads the file, lays `section.key=value` overrides over it and
checks every value. An unknown key is an error that names the nearest known one; a wrong value is
an error that names the key, the value and what is allowed. A key that is left out has the default
written below, so the empty file is a working set-up: the embedded model, one prefill and one
decode worker, everything on loopback. Next: `hocket.cli` hands a `Config` to
`control_plane.cluster`, which gives each worker its `WorkerSettings`. All of it pickles.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hocket.autoscaler_settings import AutoscalerSettings, check_pool
from hocket.errors import ConfigError
from hocket.grammar_settings import GrammarSettings
from hocket.toml_tables import at_least, between, build, lay_over, one_of, wrong
from hocket.transfer_settings import FaultSettings, TransferSettings, check_transfer
from hocket.types import Role

EMBEDDED_MODEL = "hocket-tiny"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """[model]: what is served.

    path: a checkpoint folder as Hugging Face ships it, or "hocket-tiny", the embedded model.
    served_name: what clients call it; empty: the last part of `path`.
    dtype: of weights and KV cache; "auto" is the checkpoint's own.
    device: "auto" is cuda when there is one, else cpu.
    batch_invariant: a token's logits are bit-equal whatever its company; on an x86 CPU this
        mostly costs 0 to 25 % of a step; elsewhere it was not measured, and products run in tiles.
    max_context_tokens: prompt and output together; 0: what the checkpoint allows.
    """

    path: str = EMBEDDED_MODEL
    served_name: str = ""
    dtype: str = one_of("auto", "float32", "bfloat16")
    device: str = one_of("auto", "cpu", "cuda")
    batch_invariant: bool = True
    max_context_tokens: int = at_least(0, 0)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or Path(self.path).name

    def checkpoint(self) -> Path:
        """The folder of the checkpoint; the embedded one lies inside the package.

        Raises:
            ConfigError: there is no such folder.
        """
        if self.path == EMBEDDED_MODEL:
            folder = Path(__file__).parent / "checkpoints" / EMBEDDED_MODEL
        else:
            folder = Path(self.path).expanduser()
        if not (folder / "config.json").is_file():
            limit = f"a checkpoint folder or {EMBEDDED_MODEL!r}"
            limit += f"; {_why_no_checkpoint(self.path, folder)}"
            raise wrong("model.path", self.path, limit)
        return folder


def _why_no_checkpoint(path: str, folder: Path) -> str:
    if folder.is_dir():
        return f"{folder} has no config.json"
    if path.count("/") == 1 and not path.startswith(("/", "~", ".")):
        return "there is no such folder, and Hub names are not fetched: download it and give that"
    return f"there is no folder {folder}"


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """[prefill.placement], [decode.placement]: what Ray must find for one worker.

    num_cpus: CPUs set aside for it in Ray's books (not a limit; fractions are fine).
    num_gpus: GPUs given to it.
    resources: custom Ray resources, for example {prefill = 1.0}.
    labels: Ray node labels the worker's node must have, for example {"hocket.pool" = "prefill"}.
    together: a Ray node label that has the same value on all nodes of one worker, for example
        "ray.io/node-id": all ranks on one node; empty: wherever there is room, close together.
    """

    num_cpus: float = at_least(0, 0.1)
    num_gpus: float = at_least(0, 0.0)
    resources: dict[str, float] = field(default_factory=dict[str, float])
    labels: dict[str, str] = field(default_factory=dict[str, str])
    together: str = ""


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """[prefill]: the pool that reads prompts. All counts are per worker but `workers`.

    workers: how many; 0: none, decode workers read their prompts themselves (aggregated serving).
    chunk_tokens: most prompt tokens that one step computes.
    max_batch: most prompts that one step works on.
    max_waiting: most requests that wait for admission; beyond it RESOURCE_EXHAUSTED.
    prefix_cache: requests share the KV blocks of equal beginnings, also after the first one ended.
    num_blocks: KV blocks of the pool; 0: as many as fit into kv_memory_gib.
    kv_memory_gib: GiB of KV cache when num_blocks is 0.
    threads: compute threads; 0: locally the cores are shared, else placement.num_cpus.
    placement: where Ray may put a worker.
    """

    workers: int = between(0, 4096, 1)
    chunk_tokens: int = between(16, 65536, 512)
    max_batch: int = between(1, 4096, 16)
    max_waiting: int = at_least(0, 1024)
    prefix_cache: bool = True
    num_blocks: int = at_least(0, 0)
    kv_memory_gib: float = at_least(0.001, 0.25)
    threads: int = between(0, 1024, 0)
    placement: PlacementSettings = field(default_factory=PlacementSettings)


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """[decode]: the pool that writes replies. Keys as in [prefill], but these:

    workers: how many.
    group_size: ranks (processes) of one worker; above 1 they share the experts among them, and
        every rank has its own requests, KV blocks and address. Other counts are per rank.
    group_timeout_s: a rank that does not come to the next step for this long ends its group.
    draft_tokens: most draft tokens a step proposes per request (k); 0 turns drafting off; -1: 5
        where the checkpoint has MTP heads, else none.
    adaptive_drafts: each step drafts what is worth its time, up to draft_tokens; false: always
        draft_tokens.
    interactivity: tokens per second that each request shall get, by how many run at most, for
        example {"8" = 50.0, "64" = 20.0}: drafts are then chosen to meet that first.
    synthetic_acceptance: FOR SPEED BENCHMARKS ONLY: keep drafts at this rate whatever the model
        says; the output means nothing, and every answer says so. 0: off.
    chunk_tokens: most prompt tokens a step computes, when decode has to compute a prompt itself.
    max_batch: most requests that run at once.
    reserve_output_share: share of max_tokens that a request gets KV blocks for at its start; it
        grows from there, and when blocks run out the latest request gives way to earlier ones and
        is computed again. 1: all of max_tokens, so that nobody ever gives way.
    """

    workers: int = between(1, 4096, 1)
    group_size: int = between(1, 1024, 1)
    group_timeout_s: float = at_least(1, 20.0)
    draft_tokens: int = between(-1, 16, -1)
    adaptive_drafts: bool = True
    interactivity: dict[str, float] = field(default_factory=dict[str, float])
    synthetic_acceptance: float = between(0.0, 1.0, 0.0)
    chunk_tokens: int = between(16, 65536, 512)
    max_batch: int = between(1, 4096, 64)
    max_waiting: int = at_least(0, 1024)
    reserve_output_share: float = between(0.0, 1.0, 0.25)
    prefix_cache: bool = True
    num_blocks: int = at_least(0, 0)
    kv_memory_gib: float = at_least(0.001, 0.25)
    threads: int = between(0, 1024, 0)
    placement: PlacementSettings = field(default_factory=PlacementSettings)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """[gateway]: the public doors, gRPC and OpenAI's HTTP, and the operator's.

    host, port: where gRPC listens; port 0 takes a free one.
    http_port: where HTTP listens on `host`; 0 takes a free one, -1 closes this door.
    admin_host, admin_port: where `hocket status` and `hocket scale` are answered, by gRPC too;
        port 0 takes a free one, -1 closes this door. Whoever reaches it may resize the pools.
    default_max_tokens: output limit of a request that does not say.
    max_message_bytes: largest request taken.
    deadline_s: time a request gets when its client sets no deadline.
    """

    host: str = "127.0.0.1"
    port: int = between(0, 65535, 50051)
    http_port: int = between(-1, 65535, 8000)
    admin_host: str = "127.0.0.1"
    admin_port: int = between(-1, 65535, 50052)
    default_max_tokens: int = at_least(1, 256)
    max_message_bytes: int = between(1024, 2**31 - 1, 4 * 2**20)
    deadline_s: float = at_least(0.1, 600.0)


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """[redis]: where workers register.

    url: of a Redis-compatible server; empty: an embedded one, started and stopped by `up`.
    prefix: of every key.
    lease_s: a worker that has not renewed for this long is taken off the list.
    renew_s: how often a worker renews its entry, and gateways look at the list.
    """

    url: str = ""
    prefix: str = "hocket"
    lease_s: float = at_least(0.2, 5.0)
    renew_s: float = at_least(0.05, 1.0)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """[cluster]: the Ray cluster that runs the processes.

    ray_address: of a running cluster; empty: a local one, started and stopped by `up`.
    host: that workers bind and advertise; empty: loopback locally, else each node's own address.
    startup_timeout_s: everything must serve within this time.
    drain_s: time that requests in flight get when a worker or everything is stopped.
    stuck_s: a worker that does not answer for this long is killed and started again.
    kubernetes: "auto": in a pod of a RayCluster that has a token, sizes are the replicas of its
        groups; "off": never.
    """

    ray_address: str = ""
    host: str = ""
    startup_timeout_s: float = at_least(1, 120.0)
    drain_s: float = at_least(0, 10.0)
    stuck_s: float = at_least(1, 20.0)
    kubernetes: str = one_of("auto", "off")


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """[parallel]: ways to split one model. Attention is data-parallel: both must be 1 for now.

    tensor, context: parallel sizes.
    """

    tensor: int = between(1, 1, 1)
    context: int = between(1, 1, 1)


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """[telemetry]: what processes tell about themselves.

    log_level: least important level that is written.
    log_folder: every process writes `<its name>.jsonl` there, on its own machine; empty: locally a
        folder that ends with `up`, on a joined Ray only what Ray keeps of stderr.
    metrics_host: where the Prometheus pages (/metrics) listen; empty: on the process's own host.
    metrics_port: of the gateway's page, 0 takes a free one, as workers do; -1: no page anywhere.
    """

    log_level: str = one_of("info", "debug", "warning", "error")
    log_folder: str = ""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = between(-1, 65535, 0)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything. Each field is one table of the file."""

    model: ModelSettings = field(default_factory=ModelSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    grammar: GrammarSettings = field(default_factory=GrammarSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    autoscaler: AutoscalerSettings = field(default_factory=AutoscalerSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    faults: FaultSettings = field(default_factory=FaultSettings)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Which rank of which expert-parallel group a process is, and where the ranks meet.

    All ranks of one life of a group have the same epoch. `redis` holds the rendezvous: it lies
    outside of the ranks, so that any of them may die.
    """

    name: str
    rank: int
    size: int
    redis: RedisSettings
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What one worker process is started with; it pickles.

    `pool` is the settings of the worker's own role. `worker_id` names the place ("prefill-0") and
    survives restarts; `epoch` never repeats. The worker binds `host` on a free port when `port`
    is 0, and advertises what it bound. Neither `host` nor `threads` is left open here. `group` is
    None for a worker of one process.
    """

    role: Role
    worker_id: str
    epoch: int
    model: ModelSettings
    pool: PrefillSettings | DecodeSettings
    transfer: TransferSettings = field(default_factory=TransferSettings)
    grammar: GrammarSettings = field(default_factory=GrammarSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    max_message_bytes: int = 4 * 2**20
    group: GroupSettings | None = None


def worker_settings(
    config: Config, role: Role, index: int, *, epoch: int, rank: int = 0
) -> WorkerSettings:
    """The settings of worker `index` of the pool `role`, of its rank `rank` where it has several:
    one thread, loopback if not told."""
    pool = config.prefill if role is Role.PREFILL else config.decode
    name, group = f"{role.value}-{index}", None
    if isinstance(pool, DecodeSettings) and pool.group_size > 1:
        group = GroupSettings(name, rank, pool.group_size, config.redis, pool.group_timeout_s)
    return WorkerSettings(
        role=role,
        worker_id=name if group is None else f"{name}.{rank}",
        epoch=epoch,
        model=config.model,
        pool=pool,
        transfer=config.transfer,
        grammar=config.grammar,
        telemetry=config.telemetry,
        faults=config.faults,
        host=config.cluster.host or "127.0.0.1",
        threads=pool.threads or 1,
        max_message_bytes=config.gateway.max_message_bytes,
        group=group,
    )


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Reads `path` (None: all defaults), then applies `section.key=value` overrides in order.

    The value of an override is TOML; what is not TOML is taken as a string, so quotes are rarely
    needed: `gateway.port=0`, `model.path=/data/model`, `prefill.placement.resources={a=1}`.

    Raises:
        ConfigError: no such file, not TOML, unknown key, wrong type or value.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}.") from error
    for override in overrides:
        lay_over(table, override)
    config = build(Config, table, "")
    _check_together(config)
    return config


def _check_together(config: Config) -> None:
    """What no single key can tell, or no range."""
    if config.model.max_context_tokens == 1:
        limit = "0, or at least 2: a prompt and an output of one token each"
        raise wrong("model.max_context_tokens", 1, limit)
    gateway = config.gateway
    if gateway.admin_port > 0 and gateway.admin_port in (gateway.port, gateway.http_port):
        limit = "another port than gateway.port and gateway.http_port; 0 takes a free one"
        raise wrong("gateway.admin_port", gateway.admin_port, limit)
    lease_s, renew_s = config.redis.lease_s, config.redis.renew_s
    if renew_s * 2 > lease_s:
        limit = f"at least twice redis.renew_s ({renew_s}), so that one late renewal is forgiven"
        raise wrong("redis.lease_s", lease_s, limit)
    check_transfer(config.transfer, config.faults)
    for most, tokens_per_s in config.decode.interactivity.items():
        if not re.fullmatch("[1-9][0-9]{0,8}", most):
            limit = "a table whose keys are numbers of requests: 8, not 08"
            raise wrong("decode.interactivity", most, limit)
        if not tokens_per_s > 0:
            raise wrong(f"decode.interactivity.{most}", tokens_per_s, "above 0")
    if config.decode.synthetic_acceptance > 0 and config.decode.draft_tokens == 0:
        limit = "0 where decode.draft_tokens is 0: there are no drafts to accept"
        raise wrong("decode.synthetic_acceptance", config.decode.synthetic_acceptance, limit)
    if config.autoscaler.enabled:
        check_pool("prefill", config.prefill.workers, config.autoscaler.prefill)
        check_pool("decode", config.decode.workers, config.autoscaler.decode)
