"""From settings to a worker's draft controller: its policy, and what steps cost on this machine."""

from __future__ import annotations

from hocket.clock import SystemClock
from hocket.config import DecodeSettings, WorkerSettings
from hocket.execution.drafting.step_measurements import measure_step_costs
from hocket.execution.model_setup import ModelSetup
from hocket.scheduling.draft_controller import DraftController, DraftPolicy, SpeedTarget
from hocket.scheduling.step_costs import StepCosts


def set_up_drafts(settings: WorkerSettings, model: ModelSetup) -> DraftController:
    """A decode worker's controller. Where it has something to decide, steps are measured first: on
    a rank of a group, whose steps are everyone's, made-up ones stand in until real ones come."""
    pool = settings.pool
    assert isinstance(pool, DecodeSettings), settings.role
    targets = tuple(SpeedTarget(int(most), speed) for most, speed in pool.interactivity.items())
    min_passes = max(1, len(model.runner.model.mtp))
    policy = DraftPolicy(model.max_draft_tokens, pool.adaptive_drafts, targets, min_passes)
    if model.rank is None and policy.adaptive and policy.max_drafts:
        costs = measure_step_costs(model.runner, pool.max_batch, policy.max_drafts, SystemClock())
    else:
        costs = StepCosts.from_points(draft=[(1, 0.002)], verify=[(1, 0.02)])
    return DraftController(policy, costs)
