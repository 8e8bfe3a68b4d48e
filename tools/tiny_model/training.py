"""The two stages of training, limited by wall time.

1. *Joint*: next-token cross entropy of the main model plus `MTP_LOSS_WEIGHT` times that of the MTP
   module, whose gradient also reaches the main model.
2. *Drafts*: the main model is rounded to bf16 and frozen. The MTP module learns to imitate it: it
   runs `DRAFT_PASSES` times on its own output, and every pass is pulled towards the main model's
   own distribution at that place, on corpus text and on texts that the main model wrote itself.

Comes in: `EncodedDocuments`. Goes out: a trained `TinyModel`, checkpoints on the way, and a
`TrainingLog` for the card.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .corpus import BEGIN, CHAT_PROMPTS, EncodedDocuments, rows_of
from .export import round_to_bf16
from .generation import generate, until_end
from .kernels import IGNORE, distillation, head_cross_entropy
from .network import Router, TinyModel, document_ids, document_mask
from .optim import Optimiser
from .ranks import Group

RANK_STEP_TOKENS = 2048
ROW_TOKENS = 256
LONG_EVERY = 8
JOINT_LONG_ROW_TOKENS = 2048
DRAFT_LONG_ROW_TOKENS = 1024

JOINT_SHARE = 0.68
WARM_UP_STEPS = 60
JOINT_RATES = (0.007, 0.004)
DRAFT_RATES = (0.004, 0.002)
MTP_LOSS_WEIGHT = 0.5
BALANCE_STEP = 0.002

DRAFT_PASSES = 3
PASS_WEIGHTS = (1.0, 0.7, 0.5)
ARGMAX_SHARE = 0.3
ROLLOUT_ROWS = 96
ROLLOUT_POSITIONS = 224

FIRST_CHECKPOINT_S = 150.0
CHECKPOINT_EVERY_S = 300.0
EVALUATE_EVERY_S = 120.0


@dataclass
class TrainingLog:
    """What happened, for training_log.json and the card."""

    settings: dict[str, object] = field(default_factory=dict)
    points: list[dict[str, float | str]] = field(default_factory=list)
    joint_steps: int = 0
    draft_steps: int = 0
    joint_tokens: int = 0
    draft_tokens: int = 0
    rollout_tokens: int = 0
    num_ranks: int = 1
    wall_s: float = 0.0
    python: str = platform.python_version()
    torch: str = torch.__version__


class Deadline:
    """Progress through a stretch of wall time, in [0, 1], the same in every rank."""

    def __init__(self, start_s: float, seconds: float) -> None:
        self._start_s = start_s
        self._seconds = seconds
        self.agreed = torch.zeros(1)

    def propose(self) -> Tensor:
        """This rank's clock, to be averaged over the ranks in place."""
        self.agreed.fill_((time.monotonic() - self._start_s) / self._seconds)
        return self.agreed

    @property
    def progress(self) -> float:
        return min(self.agreed.item(), 1.0)


class Trainer:
    """Runs both stages; `save` is called with the model whenever a checkpoint is due."""

    def __init__(
        self,
        model: TinyModel,
        train: EncodedDocuments,
        held_out: EncodedDocuments,
        seed: int,
        group: Group,
        save: Callable[[TinyModel], None],
    ) -> None:
        self.model = model
        self.group = group
        self.train = train
        self.log = TrainingLog(settings=_settings(), num_ranks=group.num_ranks)
        self._save = save
        self._rng = np.random.default_rng([seed, group.rank])
        self._probe = _probe_rows(held_out)
        self._start_s = time.monotonic()
        self._next_save_s = self._next_point_s = self._start_s
        self._averages: dict[str, float] = {}

    def run(self, minutes: float) -> TrainingLog:
        """Train for `minutes` of wall time."""
        self._start_s = time.monotonic()
        self._next_save_s = self._start_s + min(FIRST_CHECKPOINT_S, minutes * 10)
        seconds = minutes * 60
        self._joint_stage(Deadline(self._start_s, seconds * JOINT_SHARE))
        round_to_bf16(self.model)
        self._draft_stage(Deadline(time.monotonic(), seconds * (1 - JOINT_SHARE)))
        self.log.wall_s = time.monotonic() - self._start_s
        if self.group.rank == 0:
            self._record_point("end")
        return self.log

    def _joint_stage(self, deadline: Deadline) -> None:
        optimiser = Optimiser(self.model.named_parameters())
        routers = [module for module in self.model.modules() if isinstance(module, Router)]
        rows = self._mixed_rows(JOINT_LONG_ROW_TOKENS)
        self.model.train()
        while (progress := deadline.progress) < 1.0:
            ids = next(rows)
            main_loss, mtp_loss = self._joint_losses(ids)
            (main_loss + MTP_LOSS_WEIGHT * mtp_loss).backward()
            loads = [router.load for router in routers]
            self.group.average(self.model.parameters(), [*loads, deadline.propose()])
            rate = min(1.0, (self.log.joint_steps + 1) / WARM_UP_STEPS, (1 - progress) / 0.65)
            optimiser.step(*(rate * peak for peak in JOINT_RATES))
            for router in routers:
                router.balance(BALANCE_STEP * min(1.0, (1 - progress) / 0.5))
            self.log.joint_steps += 1
            self.log.joint_tokens += RANK_STEP_TOKENS * self.group.num_ranks
            self._observe("joint", {"main": main_loss.item(), "mtp": mtp_loss.item()})

    def _joint_losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropies of the main model and the first MTP pass; `ids` [B, T + passes + 1]."""
        length = ids.shape[1] - DRAFT_PASSES - 1
        head = self.model.lm_head.weight
        mask = document_mask(ids[:, :length])
        hidden = self.model.hidden_states(ids[:, :length], mask)
        main = head_cross_entropy(hidden.flatten(0, 1), head, _targets(ids, length, 1).flatten())
        z = self.model.mtp_pass(hidden, ids[:, 1 : length + 1], mask, [])
        return main, head_cross_entropy(z.flatten(0, 1), head, _targets(ids, length, 2).flatten())

    def _draft_stage(self, deadline: Deadline) -> None:
        model = self.model
        optimiser = Optimiser(model.mtp.named_parameters())
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in model.mtp.parameters():
            parameter.requires_grad_(True)
        # Routing of the frozen model must not depend on what is seen from now on.
        model.eval()
        corpus, rollouts = self._mixed_rows(DRAFT_LONG_ROW_TOKENS), self._rollout_rows()
        steps = 0
        while (progress := deadline.progress) < 1.0:
            loss, agreement, overlap = self._draft_losses(next(rollouts if steps % 2 else corpus))
            loss.backward()
            self.group.average(model.mtp.parameters(), [deadline.propose()])
            rate = min(1.0, (steps + 1) / WARM_UP_STEPS, 1 - progress)
            optimiser.step(*(rate * peak for peak in DRAFT_RATES))
            steps += 1
            self.log.draft_steps += 1
            self.log.draft_tokens += RANK_STEP_TOKENS * self.group.num_ranks
            kind = "rollout" if steps % 2 == 0 else "corpus"
            values = {f"{kind}_equal_{p + 1}": v for p, v in enumerate(agreement.tolist())}
            values |= {f"{kind}_overlap_{p + 1}": v for p, v in enumerate(overlap.tolist())}
            self._observe("drafts", values)

    def _draft_losses(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distillation of all passes; `ids` [B, T + passes + 1]. See `kernels.distillation`."""
        model = self.model
        length = ids.shape[1] - DRAFT_PASSES - 1
        with torch.no_grad():
            hidden = model.hidden_states(ids[:, :-1], document_mask(ids[:, :-1]))
        mask = document_mask(ids[:, :length])
        chain: list[tuple[Tensor, Tensor]] = []
        z, outputs, valid = hidden[:, :length], [], []
        for depth in range(1, DRAFT_PASSES + 1):
            z = model.mtp_pass(z, ids[:, depth : depth + length], mask, chain)
            outputs.append(z)
            valid.append(_targets(ids, length, depth + 1) != IGNORE)
        return distillation(
            torch.stack(outputs),
            hidden,
            model.lm_head.weight,
            torch.stack(valid),
            PASS_WEIGHTS,
            ARGMAX_SHARE,
        )

    def _mixed_rows(self, long_row_tokens: int) -> Iterator[Tensor]:
        """Steps of short rows; every `LONG_EVERY`th of rows from long conversations."""
        short = self._corpus_rows(self.train.epoch, ROW_TOKENS)
        long = self._corpus_rows(self.train.epoch_of_conversations, long_row_tokens)
        while True:
            for _ in range(LONG_EVERY - 1):
                yield next(short)
            yield next(long)

    def _corpus_rows(
        self, epoch: Callable[[np.random.Generator], Iterator[list[int]]], row_tokens: int
    ) -> Iterator[Tensor]:
        while True:
            rows = rows_of(epoch(self._rng), row_tokens, DRAFT_PASSES + 1)
            yield from self._batches(rows, row_tokens)

    def _rollout_rows(self) -> Iterator[Tensor]:
        """Rows of texts that the main model wrote: half greedily, half sampled at temperature 1."""
        temperatures = (torch.arange(ROLLOUT_ROWS) % 2).float()
        written: list[list[int]] = []
        while True:
            prompts = [self._prompt() for _ in range(ROLLOUT_ROWS)]
            seed = int(self._rng.integers(2**31))
            ids = generate(self.model, prompts, ROLLOUT_POSITIONS, temperatures, seed)
            written += [
                until_end(row, len(prompt)) for row, prompt in zip(ids, prompts, strict=True)
            ]
            self.log.rollout_tokens += sum(map(len, written[-ROLLOUT_ROWS:]))
            if sum(map(len, written)) < 4 * RANK_STEP_TOKENS + ROW_TOKENS:
                continue
            yield from self._batches(rows_of(written, ROW_TOKENS, DRAFT_PASSES + 1), ROW_TOKENS)
            written = []

    def _prompt(self) -> list[int]:
        """The start of a training document: a question, or its first 4 to 40 tokens."""
        index = int(self._rng.integers(len(self.train)))
        if self._rng.random() < 0.5:
            prompt = int(self._rng.integers(len(CHAT_PROMPTS)))
            return [BEGIN, *self.train.question(index, prompt)][:100]
        return self.train.plain(index)[: int(self._rng.integers(4, 41))]

    def _batches(self, rows: np.ndarray, row_tokens: int) -> Iterator[Tensor]:
        rows = self._rng.permutation(rows)
        size = RANK_STEP_TOKENS // row_tokens
        for start in range(0, len(rows) - size + 1, size):
            yield torch.from_numpy(rows[start : start + size])

    def _observe(self, stage: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            average = self._averages.get(name, value)
            self._averages[name] = average + 0.03 * (value - average)
        if self.group.rank > 0:
            return
        now = time.monotonic()
        if now >= self._next_point_s:
            self._next_point_s = now + EVALUATE_EVERY_S
            self._record_point(stage)
        if now >= self._next_save_s:
            self._next_save_s = now + CHECKPOINT_EVERY_S
            self._save(self.model)

    @torch.no_grad()
    def _record_point(self, stage: str) -> None:
        was_training = self.model.training
        self.model.eval()
        losses = [self._joint_losses(ids) for ids in self._probe.split(8)]
        self.model.train(was_training)
        point: dict[str, float | str] = {
            "stage": stage,
            "minutes": round((time.monotonic() - self._start_s) / 60, 2),
            "step": self.log.joint_steps + self.log.draft_steps,
            "tokens": self.log.joint_tokens + self.log.draft_tokens,
            "held_out_main": round(float(np.mean([main.item() for main, _ in losses])), 4),
            "held_out_mtp": round(float(np.mean([mtp.item() for _, mtp in losses])), 4),
        }
        point |= {name: round(value, 4) for name, value in sorted(self._averages.items())}
        self.log.points.append(point)
        print(" ".join(f"{key}={value}" for key, value in point.items()), flush=True)


def _targets(ids: Tensor, length: int, offset: int) -> Tensor:
    """Tokens `offset` later [B, length], `IGNORE` where that is another document."""
    documents = document_ids(ids)
    same = documents[:, :length] == documents[:, offset : offset + length]
    return torch.where(same, ids[:, offset : offset + length], IGNORE)


def _probe_rows(held_out: EncodedDocuments) -> Tensor:
    """Up to 32 fixed rows of held-out text."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(rows_of(held_out.epoch(rng), ROW_TOKENS, DRAFT_PASSES + 1)[:32])


def _settings() -> dict[str, object]:
    names = [name for name in globals() if name.isupper() and name not in ("BEGIN", "IGNORE")]
    return {name.lower(): globals()[name] for name in names if name != "CHAT_PROMPTS"}


def log_to_json(log: TrainingLog) -> dict[str, object]:
    """Plain values for training_log.json."""
    return dataclasses.asdict(log)
