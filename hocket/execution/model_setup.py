"""From settings to a model that can take steps: the part of start-up that both workers share.

Reads the checkpoint, sizes the KV pool, builds the runner and the fingerprint that says which
workers this one can pair with. Next: `prefill_workers/server.py` and `decode_workers/server.py`
put a transfer, a table and an engine on top.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hocket.config import DecodeSettings, WorkerSettings
from hocket.errors import ConfigError
from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.model_runner import ModelRunner
from hocket.execution.passes import GroupPasses, take_part_in
from hocket.kv.layout import KVLayout
from hocket.kv.nixl_agent import RegisteredPool
from hocket.kv.paged_cache import PagedCache
from hocket.model.model_config import ModelConfig
from hocket.model.weights import load_model, weights_digest
from hocket.parallel.expert_dispatch import AllToAllDispatcher
from hocket.parallel.expert_placement import ExpertPlacement
from hocket.parallel.lockstep import Lockstep
from hocket.parallel.rank_group import RankGroup, RedisStore
from hocket.scheduling.request_limits import RequestLimits
from hocket.types import Fingerprint, WorkerDescription

AUTO_DRAFT_TOKENS = 5
"""Most drafts where the configuration leaves them open: beyond it few checkpoints' drafts live."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupRank:
    """This process's place in its expert-parallel group."""

    group: RankGroup
    lockstep: Lockstep


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A loaded model with its KV pool, and what follows from the two.

    `max_draft_tokens` is 0 where nothing drafts. `synchronize` returns when the device has
    finished all work given to it. `rank` is None for a worker of one process.
    """

    runner: ModelRunner
    fingerprint: Fingerprint
    limits: RequestLimits
    max_draft_tokens: int
    synchronize: Callable[[], None]
    rank: GroupRank | None = None

    def registered_pool(self) -> RegisteredPool:
        """The KV pool as a transfer registers it."""
        cache = self.runner.cache
        return RegisteredPool(
            base_address=cache.base_address,
            block_bytes=cache.layout.block_bytes,
            num_blocks=cache.num_blocks,
            memory=cache.device.type,
            device=cache.device.index or 0,
        )

    def description(self, settings: WorkerSettings, address: str) -> WorkerDescription:
        """The worker as it introduces itself."""
        layout = self.runner.cache.layout
        return WorkerDescription(
            worker_id=settings.worker_id,
            epoch=settings.epoch,
            role=settings.role,
            address=address,
            fingerprint=self.fingerprint,
            model=settings.model.name,
            num_blocks=self.limits.num_blocks,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            max_context_tokens=self.limits.max_context_tokens,
            max_prompt_tokens=self.limits.max_prompt_tokens,
            max_draft_tokens=self.max_draft_tokens,
            has_mtp=self.runner.model.has_mtp,
            has_prefix_cache=settings.pool.prefix_cache,
            synthetic_acceptance=_synthetic_acceptance(settings),
            group=settings.group.name if settings.group else "",
            rank=settings.group.rank if settings.group else 0,
            group_size=settings.group.size if settings.group else 1,
        )


def set_up_model(
    settings: WorkerSettings, wake_others: Callable[[int], None] | None = None
) -> ModelSetup:
    """Loads the checkpoint and reserves the KV pool; takes seconds to minutes. A rank of a group
    meets the others first; `wake_others` is how it wakes them (`Lockstep`).

    Raises:
        CheckpointError: the checkpoint cannot be served.
        ConfigError: the settings cannot work on this machine.
        GroupLost: another rank left meanwhile.
    """
    torch.set_num_threads(settings.threads)
    folder = settings.model.checkpoint()
    config = ModelConfig.from_checkpoint(folder)
    device = _device(settings)
    dtype = config.dtype if settings.model.dtype == "auto" else settings.model.dtype
    group = dispatcher = rank = passes = None
    if settings.group is not None:
        placement = ExpertPlacement(config.num_experts, settings.group.size)
        store = RedisStore(settings.group, settings.epoch)
        group = RankGroup(store, settings.group, settings.host, device)
        dispatcher = AllToAllDispatcher(group, placement)
    model = load_model(folder, dtype, device, settings.model.batch_invariant, dispatcher)
    if group is not None:
        assert wake_others is not None, "a rank of a group must be able to wake the others"
        lockstep = Lockstep(group, config.num_mtp_layers, take_part_in(model), wake_others)
        rank, passes = GroupRank(group, lockstep), GroupPasses(model, lockstep)
    layout = model.kv_layout()
    cache = PagedCache(layout, _num_blocks(settings, layout), device)
    max_draft_tokens = _max_draft_tokens(settings, config)
    draft_source = MTPDraftSource(model, cache, passes) if max_draft_tokens else None
    runner = ModelRunner(model, cache, draft_source, passes, _synthetic_acceptance(settings))
    fingerprint = Fingerprint(
        weights=weights_digest(folder),
        kv_layout=layout.describe(),
        block_tokens=layout.block_tokens,
        dtype=dtype,
        numerics=model.numerics,
    )
    limits = RequestLimits(
        max_context_tokens=_context_tokens(settings, config),
        vocabulary_size=config.vocab_size,
        num_blocks=cache.pool.num_blocks,
        block_tokens=layout.block_tokens,
    )
    return ModelSetup(runner, fingerprint, limits, max_draft_tokens, _synchronizer(device), rank)


def _device(settings: WorkerSettings) -> torch.device:
    wanted = settings.model.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device is 'cuda', but torch finds no CUDA device here; use 'cpu' or 'auto'.",
            field="model.device",
        )
    return torch.device(wanted)


def _num_blocks(settings: WorkerSettings, layout: KVLayout) -> int:
    pool = settings.pool
    num_blocks = pool.num_blocks or int(pool.kv_memory_gib * 2**30) // layout.block_bytes
    if num_blocks < 1:
        key = f"{settings.role.value}.kv_memory_gib"
        raise ConfigError(
            f"{key} is {pool.kv_memory_gib}: one block of {layout.block_tokens} tokens takes "
            f"{layout.block_bytes} bytes; give at least that.",
            field=key,
        )
    return num_blocks


def _max_draft_tokens(settings: WorkerSettings, config: ModelConfig) -> int:
    """0 on a prefill worker, which needs no drafts to write the MTP layer's entries."""
    if not isinstance(settings.pool, DecodeSettings) or settings.pool.draft_tokens == 0:
        return 0
    wanted = settings.pool.draft_tokens
    if config.num_mtp_layers:
        return AUTO_DRAFT_TOKENS if wanted == -1 else wanted
    if wanted > 0:
        raise ConfigError(
            f"decode.draft_tokens is {wanted}, but the checkpoint has no MTP module "
            "(num_nextn_predict_layers is 0 or absent); use 0, or -1 for what the checkpoint has.",
            field="decode.draft_tokens",
        )
    if settings.pool.synthetic_acceptance > 0:
        raise ConfigError(
            f"decode.synthetic_acceptance is {settings.pool.synthetic_acceptance}, but the "
            "checkpoint has no MTP module: there are no drafts to accept; set it to 0, or take a "
            "checkpoint with MTP modules.",
            field="decode.synthetic_acceptance",
        )
    _logger.info("The checkpoint has no MTP module: every step emits one token.")
    return 0


def _synthetic_acceptance(settings: WorkerSettings) -> float:
    return settings.pool.synthetic_acceptance if isinstance(settings.pool, DecodeSettings) else 0.0


def _context_tokens(settings: WorkerSettings, config: ModelConfig) -> int:
    wanted, limit = settings.model.max_context_tokens, config.max_position_embeddings
    if wanted > limit:
        raise ConfigError(
            f"model.max_context_tokens is {wanted}; the checkpoint allows {limit}.",
            field="model.max_context_tokens",
        )
    return wanted or limit


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
