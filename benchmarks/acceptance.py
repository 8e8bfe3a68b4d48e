"""How often drafts are right when draft and target are sampled with the same noise.

    python benchmarks/acceptance.py --short                         half a minute
    python benchmarks/acceptance.py --json acceptance.json          the long form

The engine in one process decodes the embedded model with its own drafts, sampled, on text it was
not trained on. At every draft that a step reached, both rows of logits are kept: what the draft was
sampled from, and what the target was sampled from there. From them (`coupling.py`) come the best
that any way to draft could do, the bound that the coupling keeps, its exact chance, simulations of
it, and what an argmax draft would do; beside them stands what the engine counted. Exits 1 when a
simulation or the engine is further than 1 % plus three standard errors from the chance.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from acceptance_report import HEADER, Point, faults, format_point
from coupling import (
    Probabilities,
    argmax_acceptance,
    coupled_acceptance,
    filtered,
    lower_bound,
    optimum,
    simulate,
)
from decode_workloads import TINY, commit, docstring_tokens
from torch import Tensor

from hocket.execution.drafting.speculation import MTPDraftSource
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.execution.model_runner import ModelRunner
from hocket.execution.sampling.sampler import Sampler
from hocket.kv.paged_cache import PagedCache
from hocket.model.transformer import Transformer
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams

TEMPERATURES = (0.5, 0.8, 1.0)
TOP_PS = (1.0, 0.95, 0.8)
PROMPT_TOKENS = 64
SEEDS_APART = 1_000_000
"""Between the first seeds of two points: no two share noise."""
REDRAWN = 10**12
"""Between a request's seed and the seeds with which its logged rows are sampled again."""

CHANCES = (optimum, coupled_acceptance, lower_bound, argmax_acceptance)
Params = Sequence[SamplingParams]
Record = Callable[[Tensor, Params, Sequence[int], list[int]], None]


@dataclass(frozen=True)
class Options:
    """`num_draws` of either simulation for each logged position."""

    num_prompts: int
    output_tokens: int
    num_draws: int


class RecordingSampler(Sampler):
    """Samples, then tells what it was given and what it chose."""

    def __init__(self, model: Transformer, record: Record) -> None:
        super().__init__(model.config.vocab_size, model.device)
        self._record = record

    def sample(self, logits_NV: Tensor, params: Params, positions: Sequence[int]) -> Tensor:
        tokens_N = super().sample(logits_NV, params, positions)
        self._record(logits_NV, params, positions, tokens_N.tolist())
        return tokens_N


class RecordingDraftSource(MTPDraftSource):
    def __init__(self, model: Transformer, cache: PagedCache, record: Record) -> None:
        super().__init__(model, cache)
        self._sampler = RecordingSampler(model, record)


class Pair(NamedTuple):
    """One draft that a step reached; both logits are [V]."""

    draft_V: Tensor
    target_V: Tensor
    params: SamplingParams
    position: int
    is_accepted: bool


class PairRecorder:
    """Pairs each draft's logits with the target's at the same position of the same request.

    A request is known by its seed. Drafts behind a wrong one are left out: the target's logits
    there follow a prefix that the output does not have.
    """

    def __init__(self, add: Callable[[int, list[Pair]], None]) -> None:
        """`add` takes a depth, 0 for the first draft of a step, and a step's pairs of it."""
        self._add = add
        self._drafts: dict[tuple[int, int], tuple[Tensor, int]] = {}

    def drafted(
        self, logits_NV: Tensor, params: Params, positions: Sequence[int], tokens: list[int]
    ) -> None:
        for row, token in enumerate(tokens):
            self._drafts[params[row].seed, positions[row]] = (logits_NV[row], token)

    def verified(
        self, logits_NV: Tensor, params: Params, positions: Sequence[int], tokens: list[int]
    ) -> None:
        pairs: dict[int, list[Pair]] = {}
        depth, is_reached = 0, True
        for row, token in enumerate(tokens):
            if row == 0 or params[row].seed != params[row - 1].seed:
                depth, is_reached = 0, True
            draft_V, draft = self._drafts.pop((params[row].seed, positions[row]), (None, -1))
            if draft_V is not None and is_reached:
                is_reached = draft == token
                pair = Pair(draft_V, logits_NV[row], params[row], positions[row], is_reached)
                pairs.setdefault(depth, []).append(pair)
            depth += 1
        assert not self._drafts, f"not verified: {list(self._drafts)}"
        for depth, found in pairs.items():
            self._add(depth, found)


class Tally:
    """What the drafts of one depth come to, step by step."""

    def __init__(self, model: Transformer, num_draws: int) -> None:
        self._sampler = Sampler(model.config.vocab_size, model.device)
        self._num_draws = num_draws
        self._random = np.random.default_rng(0)
        self._chances: list[Probabilities] = []
        self.num_drafts = self.num_accepted = self.num_sampled = self.num_simulated = 0

    def add(self, pairs: list[Pair]) -> None:
        params = [pair.params for pair in pairs]
        target_NV = torch.stack([pair.target_V for pair in pairs])
        draft_NV = torch.stack([pair.draft_V for pair in pairs])
        p_NV, q_NV = (
            filtered(logits_NV.float().cpu().numpy(), params[0].temperature, params[0].top_p)
            for logits_NV in (target_NV, draft_NV)
        )
        self._chances.append(np.stack([chance(p_NV, q_NV) for chance in CHANCES]))
        self.num_drafts += len(pairs)
        self.num_accepted += sum(pair.is_accepted for pair in pairs)
        self.num_simulated += simulate(p_NV, q_NV, self._num_draws, self._random)
        positions = [pair.position for pair in pairs]
        for draw in range(1, self._num_draws + 1):
            fresh = [replace(row, seed=row.seed + REDRAWN * draw) for row in params]
            target_N = self._sampler.sample(target_NV, fresh, positions)
            draft_N = self._sampler.sample(draft_NV, fresh, positions)
            self.num_sampled += int((target_N == draft_N).sum())

    def point(self, k: int, depth: int, params: SamplingParams) -> Point:
        """Standard errors are those of independent draws with the exact chances, which is what the
        engine's are: a position's noise is independent of all that decides its two distributions,
        the tokens before it."""
        optimum_N, coupled_N, bound_N, argmax_N = np.concatenate(self._chances, axis=1)
        error = float(np.sqrt((coupled_N * (1.0 - coupled_N)).sum())) / self.num_drafts
        drawn = self.num_drafts * self._num_draws
        drawn_error = error / self._num_draws**0.5
        return Point(
            k=k,
            depth=depth,
            temperature=params.temperature,
            top_p=params.top_p,
            num_drafts=self.num_drafts,
            optimum=float(optimum_N.mean()),
            coupled=float(coupled_N.mean()),
            bound=float(bound_N.mean()),
            argmax=float(argmax_N.mean()),
            slack=float(min((coupled_N - bound_N).min(), (optimum_N - coupled_N).min())),
            simulated=self.num_simulated / drawn,
            simulated_error=drawn_error,
            sampled=self.num_sampled / drawn,
            sampled_error=drawn_error,
            engine=self.num_accepted / self.num_drafts,
            engine_error=error,
        )


def measure(model: Transformer, options: Options, k: int, params: SamplingParams) -> list[Point]:
    """Decode all prompts with k drafts a step, request i with `params` and the i-th seed from
    theirs on; one point for each depth."""
    tallies = [Tally(model, options.num_draws) for _ in range(k)]
    recorder = PairRecorder(lambda depth, pairs: tallies[depth].add(pairs))
    engine = LocalEngine(model, LocalEngineLimits(num_drafts=k))
    drafting = RecordingDraftSource(model, engine.cache, recorder.drafted)
    engine.runner = ModelRunner(model, engine.cache, drafting)
    engine.runner.choice.sampler = RecordingSampler(model, recorder.verified)
    text = docstring_tokens()
    prompts = [text[i * PROMPT_TOKENS :][:PROMPT_TOKENS] for i in range(options.num_prompts)]
    assert len(prompts[-1]) == PROMPT_TOKENS, f"{len(text)} tokens of text"
    stopping = StoppingParams(options.output_tokens, frozenset(model.config.eos_token_ids))
    results = engine.generate(
        [
            LocalRequest(tuple(prompt), replace(params, seed=params.seed + i), stopping)
            for i, prompt in enumerate(prompts)
        ]
    )
    counts = [result.usage.drafts for result in results]
    drafted = sum(count.drafted_by_position[0] for count in counts if count.drafted_tokens)
    assert drafted == tallies[0].num_drafts, (drafted, tallies[0].num_drafts)
    accepted = sum(count.accepted_by_position[0] for count in counts if count.accepted_tokens)
    assert accepted == tallies[0].num_accepted, (accepted, tallies[0].num_accepted)
    return [tally.point(k, depth, params) for depth, tally in enumerate(tallies)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="few prompts, T 1, top-p 1 and 0.8")
    parser.add_argument("--prompts", type=int, default=None, help="default 440, with k=3 a third")
    parser.add_argument("--threads", type=int, default=1, help="the model is small")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    report = {
        "benchmark": "acceptance",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        },
    }
    num_prompts = arguments.prompts or (30 if arguments.short else 440)
    options = Options(num_prompts, output_tokens=48, num_draws=2)
    temperatures, top_ps = ((1.0,), (1.0, 0.8)) if arguments.short else (TEMPERATURES, TOP_PS)
    model = load_model(TINY, "bfloat16", "cpu", batch_invariant=True)
    points: list[Point] = []
    print(HEADER)
    for k, share in ((1, options), (3, replace(options, num_prompts=max(1, num_prompts // 3)))):
        for temperature, top_p in product(temperatures, top_ps):
            seed = (len(points) + 1) * SEEDS_APART
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
            points += (found := measure(model, share, k, params))
            print("\n".join(format_point(point) for point in found), flush=True)
    wrong = faults(points)
    print("\n".join(wrong), file=sys.stderr)
    if arguments.json is not None:
        report |= {
            "options": asdict(options),
            "points": [asdict(point) for point in points],
            "faults": wrong,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
