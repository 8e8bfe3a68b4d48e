"""The soak in its short form, on the real cluster; and that each thing it looks for is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from soak_load import Cancel, Outcome, Try, Wish, make_wishes
from soak_report import Expected, Record, faults, growth, summary, table
from soak_watch import Kill, Memory, Rest, gateway_left

from hocket.request_params import SamplingParams
from hocket.rpc import cluster_pb2 as cluster
from hocket.types import FinishReason

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_short_soak_with_cancels_and_a_killed_worker_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    report = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--json", str(report)]
    options = ["--requests", "60", "--kill-every-s", "1", "--max-kills", "1", "--seed", "3"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(report.read_text())
    assert told["faults"] == told["left_at_rest"] == []
    assert told["completed"] + told["cancelled"] == told["requests"] == 60
    assert told["cancelled"] > 0
    assert len(told["kills"]) == 1
    assert {one["name"] for one in told["memory"]} >= {"gateway", "prefill-0", "decode-1"}


WISH = Wish(0, (5, 6, 7), 3, SamplingParams(temperature=0.0), True, None, None)
EXPECTED = Expected((11, 12, 13), FinishReason.LENGTH)
WHOLE = Try(1.0, [11, 12, 13], "completed", 2.0, FinishReason.LENGTH, 3)
LOST = Try(1.0, [11], "failed", 2.0, None, 0, "WORKER_UNAVAILABLE", "gone", is_retryable=True)
KILL = Kill("decode-0", 77, at_s=1.5, back_s=5.0)


def record(*tries: Try, **changes: Any) -> Record:
    plain = Record([WISH], [Outcome(0, list(tries))], [EXPECTED], [], [], Rest(0.1, (), {}), 9.0, 2)
    return replace(plain, **changes)


def test_what_the_engine_says_is_right_also_in_part() -> None:
    leaving = replace(WISH, cancel=Cancel(after_tokens=1))
    left = Try(1.0, [11, 12], "cancelled", 2.0)
    assert faults(record(WHOLE)) == []
    assert faults(record(left, wishes=[leaving])) == []
    assert faults(record(LOST, WHOLE, kills=[KILL])) == []


WRONG: dict[str, tuple[Record, str]] = {
    "another token": (record(replace(WHOLE, token_ids=[11, 99, 13])), "token 1 of 3"),
    "another token before a cancel": (
        record(
            Try(1.0, [11, 99], "cancelled", 2.0),
            wishes=[replace(WISH, cancel=Cancel(after_tokens=2))],
        ),
        "token 1 of 2",
    ),
    "another token before a failure": (
        record(replace(LOST, token_ids=[99]), WHOLE, kills=[KILL]),
        "token 0 of 1",
    ),
    "too few tokens": (record(replace(WHOLE, token_ids=[11, 12])), "2 tokens"),
    "too many tokens": (record(replace(WHOLE, token_ids=[11, 12, 13, 14])), "token 3 of 4"),
    "another count": (record(replace(WHOLE, output_tokens=4)), "4 counted"),
    "another reason": (record(replace(WHOLE, finish_reason=FinishReason.STOP)), "STOP"),
    "no finish": (record(replace(WHOLE, end="cancelled")), "ended without a finish"),
    "failed for good": (
        record(replace(LOST, is_retryable=False, reason="INTERNAL"), kills=[KILL]),
        "failed for good: INTERNAL",
    ),
    "failed before the kill": (
        record(LOST, WHOLE, kills=[replace(KILL, at_s=3.0)]),
        "failed without a kill",
    ),
    "failed long after the kill": (
        record(replace(LOST, began_s=30.0, ended_s=31.0), WHOLE, kills=[KILL]),
        "failed without a kill",
    ),
    "never answered": (record(LOST, LOST, kills=[KILL]), "never answered, 2 tries"),
    "never back": (record(WHOLE, kills=[replace(KILL, back_s=None)]), "never came back"),
    "left": (record(WHOLE, rest=Rest(60.0, ("decode-0: 7 of 8 blocks free",), {})), "7 of 8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    wrong, words = WRONG[name]
    assert any(words in fault for fault in faults(wrong)), faults(wrong)


def test_growth_is_told_from_warming_up_and_from_noise() -> None:
    def memory(mib_at: Any, ends_at: int = 4500) -> Memory:
        return Memory("gateway", 7, [(n, int(mib_at(n) * MIB)) for n in range(0, ends_at, 10)])

    warming = memory(lambda n: 100 + min(n, 990) / 10)
    leaking = memory(lambda n: 100 + n * 0.005 + (n % 7))
    stepping = memory(lambda n: 100 + 3 * (n > 3000))
    young = memory(lambda n: 100 + n, ends_at=1500)
    assert growth(warming).mib_per_1000 == 0.0
    assert growth(leaking).mib_per_1000 == pytest.approx(5.0, abs=0.2)
    assert growth(stepping).mib_per_1000 == pytest.approx(0.0, abs=2.0)
    assert growth(young).mib_per_1000 is None
    (fault,) = faults(record(WHOLE, memories=[leaking, warming, young]))
    assert "gateway (7) grows by 5" in fault


def test_the_gateways_books_count_as_left() -> None:
    clean = cluster.ClusterStatus(workers=[cluster.WorkerStatus()])
    assert gateway_left(clean, 1) == []
    clean.gateway.requests_in_flight = 1
    clean.workers[0].gateway_requests = 2
    assert len(gateway_left(clean, 2)) == 3


def test_wishes_are_mixed_and_the_same_for_the_same_seed() -> None:
    wishes = make_wishes(400, 0.2, seed=5)
    assert wishes == make_wishes(400, 0.2, seed=5)
    assert 40 < sum(wish.cancel is not None for wish in wishes) < 120
    assert 100 < sum(wish.sampling.is_greedy for wish in wishes) < 300
    lengths = [len(wish.token_ids) for wish in wishes]
    assert min(lengths) < 10
    assert max(lengths) > 1000
    assert len({wish.token_ids[:320] for wish in wishes if len(wish.token_ids) > 400}) < 300


def test_the_table_names_what_is_wrong() -> None:
    told = summary(record(LOST, WHOLE, kills=[replace(KILL, back_s=None)]))
    assert told["tries_failed_by_reason"] == {"WORKER_UNAVAILABLE": 1}
    assert "WRONG: decode-0 never came back" in table(told)
