"""A worker gets requests once a canary has gone all the way through it, and not before."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from control_plane.canary import OUTPUT_TOKENS, PROMPT_TOKENS, canary_need
from control_plane.cluster_status import workers_status
from control_plane.readiness import CanaryTimes
from control_plane.router.proofs import Proofs
from control_plane.router.snapshot import Placement
from hocket.errors import HandOffFailed, Overloaded, WorkerUnavailable
from hocket.types import Leg, Role, WorkerDescription
from tests.control_plane.conftest import FINGERPRINT, ScriptedWorker, is_canary

TEXT = " the quick brown fox jumps over the lazy dog"
QUICK = CanaryTimes(timeout_s=0.3, look_s=0.005, pause_s=0.02, most_pause_s=0.05)


def count_submitted(worker: ScriptedWorker) -> None:
    """Lets the engine note canaries for good: `settle` forgets those in `submitted`."""
    seen: list[Any] = []
    submit = worker.engine.submit

    def note(request: Any) -> None:
        seen.append(request)
        submit(request)

    worker.engine.submit = note  # type: ignore[method-assign]
    worker.seen = seen  # type: ignore[attr-defined]


def reason(s: Any, worker: ScriptedWorker) -> str:
    return s.gateway.unready().get(worker.description.worker_id, "")


def value(s: Any, name: str, **labels: str) -> float:
    return s.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_a_canary_goes_the_whole_path_and_is_read_to_its_end(
    serving: Any, until: Any
) -> None:
    async with serving(canary=QUICK) as s:
        count_submitted(s.prefill)
        count_submitted(s.decode)
        s.renew(s.prefill, s.decode)
        assert set(s.gateway.unready()) == {w.description.worker_id for w in s.workers}
        await until(lambda: not s.gateway.unready())
        (prefill,), (decode,) = s.prefill.seen, s.decode.seen
        assert (prefill.leg, decode.leg) == (Leg.PREFILL, Leg.DECODE)
        assert prefill.key == decode.key
        assert is_canary(prefill.key)
        assert decode.export is not None
        assert len(prefill.token_ids) == PROMPT_TOKENS
        assert prefill.stopping.max_tokens == OUTPUT_TOKENS
        assert prefill.sampling.is_greedy
        assert s.prefill.engine.cancelled == s.decode.engine.cancelled == []
        assert s.is_idle


async def test_no_two_canaries_are_alike_for_a_cache(serving: Any, until: Any) -> None:
    async with serving(canary=QUICK) as s:
        count_submitted(s.decode)
        for _ in range(3):
            s.renew(s.decode)
            await until(lambda: not s.gateway.unready())
        assert len({r.tenant_salt for r in s.decode.seen}) == len(s.decode.seen) == 3


async def test_canaries_count_nowhere_among_requests(
    serving: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving(canary=QUICK) as s:
        s.renew(s.prefill, s.decode)
        await until(lambda: not s.gateway.unready())
        figures = s.gateway.metrics.figures()
        assert figures.requests_by_outcome == {}
        assert figures.arrived_requests == figures.output_tokens == figures.hand_off.count == 0
        assert figures.hand_off_bytes_by_transport == {}
        assert "request ended" not in caplog.text
        assert value(s, "hocket_canaries_total", outcome="passed") == 2


async def test_the_first_worker_of_a_pool_waits_for_one_of_the_other(
    serving: Any, until: Any
) -> None:
    async with serving(canary=QUICK) as s:
        s.renew(s.prefill)
        s.directory.set([s.prefill.description])
        await until(lambda: "no decode worker is there yet" in reason(s, s.prefill))
        s.directory.set([w.description for w in s.workers])
        await until(lambda: not s.gateway.unready())
        assert value(s, "hocket_canaries_total", outcome="failed") == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_b5_an_address_that_peers_cannot_reach_fails_readiness_loudly(
    serving: Any, until: Any, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which worker it is, and at which address, stands in the error, the status, a metric and one
    warning; when it can be reached at last, it serves."""
    async with serving(canary=QUICK) as s:
        address = s.prefill.description.address
        fault = HandOffFailed(f"No answer from the prefill worker at {address}")
        s.decode.engine.canary_fails_with = fault
        faulty = s.prefill if role == "prefill" else s.decode
        s.renew(faulty)
        await until(lambda: value(s, "hocket_canaries_total", outcome="failed") >= 3)
        name = faulty.description.worker_id
        said = f"failed its canary: {s.decode.description.worker_id} at .*{address}"
        with pytest.raises(WorkerUnavailable, match=f"no {role} worker .*: {name} {said}"):
            await s.generate(text="x")
        (status,) = [w for w in workers_status(s.gateway.snapshots()) if w.kept_out]
        assert status.worker.worker_id == name
        assert address in status.kept_out
        assert value(s, "hocket_workers_kept_out", pool=role) == 1
        warned = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert [name in r.getMessage() and address in r.getMessage() for r in warned] == [True]
        with pytest.raises(TimeoutError):
            await s.gateway.wait_until_serving(0.01)
        s.decode.engine.canary_fails_with = None
        await until(lambda: not s.gateway.unready())
        assert (await s.generate(text="x")).text == TEXT
        assert value(s, "hocket_workers_kept_out", pool=role) == 0


async def test_a_worker_that_fails_is_kept_out_and_the_others_serve(serving: Any) -> None:
    async with serving(canary=QUICK) as s:
        bad = await s.add(Role.DECODE, {"canary_fails_with": HandOffFailed("cut")})
        assert "cut" in reason(s, bad)
        for _ in range(4):
            assert (await s.generate(text="x")).text == TEXT
        assert not any(not is_canary(r.key) for r in bad.engine.submitted)
        assert len(s.decode.engine.submitted) == 4


async def test_a_broken_partner_does_not_keep_a_good_worker_out(serving: Any, until: Any) -> None:
    """All are new: prefill is tried with the broken one first, or not, and passes all the same."""
    async with serving(canary=QUICK) as s:
        others = [await s.add(Role.DECODE) for _ in range(2)]
        for bad in (s.decode, others[0]):
            bad.engine.canary_fails_with = HandOffFailed("cut")
        s.renew(*s.workers)
        await until(lambda: s.gateway._pool.can_serve())
        assert not reason(s, s.prefill)
        assert not reason(s, others[1])
        assert reason(s, s.decode)
        assert reason(s, others[0])


@pytest.mark.parametrize(
    ("joined", "told"),
    [
        ({"recomputed": True, "imported_bytes": 0}, "had to compute the prompt itself"),
        ({"imported_bytes": 0}, "imported no bytes from"),
    ],
)
async def test_kv_that_did_not_cross_is_a_failure_though_all_tokens_came(
    serving: Any, until: Any, joined: dict[str, Any], told: str
) -> None:
    async with serving(canary=QUICK) as s:
        s.decode.engine.joins_with = joined
        s.renew(s.decode)
        await until(lambda: told in reason(s, s.decode))
        assert s.prefill.description.address in reason(s, s.decode)
        await until(lambda: s.is_idle)


@pytest.mark.parametrize(
    ("stalls", "told"),
    [
        ("prefill", "has not begun within 0.3 s"),
        ("joining", "has not got the KV of"),
        ("decode", "has not answered within 0.3 s"),
    ],
)
async def test_a_canary_that_gets_stuck_says_where(
    serving: Any, until: Any, stalls: str, told: str
) -> None:
    async with serving(canary=QUICK) as s:
        engine = s.prefill.engine if stalls == "prefill" else s.decode.engine
        never = asyncio.Event()

        async def stall(request: Any, index: int) -> None:
            if index >= (0 if stalls == "joining" else 1):
                await never.wait()

        async def silent(request: Any) -> None:
            await never.wait()

        if stalls == "prefill":
            engine.prefill = silent
        else:
            engine.stall = stall
        s.renew(s.decode)
        await until(lambda: told in reason(s, s.decode))
        del engine.__dict__["prefill" if stalls == "prefill" else "stall"]
        await until(lambda: not s.gateway.unready())
        await until(lambda: s.is_idle)


async def test_legs_that_differ_about_a_token_do_not_serve(serving: Any, until: Any) -> None:
    async with serving(canary=QUICK) as s:
        s.decode.engine.script = [t + 1 for t in s.prefill.engine.script]
        s.renew(s.decode)
        await until(lambda: "differ about output token 0" in reason(s, s.decode))


async def test_a_worker_that_is_full_is_tried_again(serving: Any, until: Any) -> None:
    async with serving(canary=QUICK) as s:
        s.decode.engine.canary_fails_with = Overloaded("decode is full")
        s.renew(s.decode)
        await until(lambda: "decode is full" in reason(s, s.decode))
        s.decode.engine.canary_fails_with = None
        await until(lambda: not s.gateway.unready())


async def test_a_worker_that_is_proven_stays_so_until_its_next_life(
    serving: Any, until: Any
) -> None:
    async with serving(canary=QUICK) as s:
        s.decode.engine.canary_fails_with = HandOffFailed("cut")
        s.directory.set([replace(w.description, transport="cma") for w in s.workers])
        await asyncio.sleep(5 * QUICK.look_s)
        assert s.gateway.unready() == {}
        s.renew(s.decode)
        await until(lambda: "cut" in reason(s, s.decode))


async def test_in_aggregated_serving_a_canary_is_a_whole_request(serving: Any, until: Any) -> None:
    async with serving(canary=QUICK, is_aggregated=True) as s:
        assert s.gateway.unready() == {}, "a prefill worker is nobody's business here"
        count_submitted(s.decode)
        s.decode.engine.joins_with = {"imported_bytes": 0, "transport": ""}
        s.renew(s.decode)
        await until(lambda: not reason(s, s.decode))
        assert [r.leg for r in s.decode.seen] == [Leg.WHOLE]
        assert (await s.generate(text="x")).text == TEXT


def test_a_canary_fits_into_small_workers() -> None:
    def need(max_prompt: int, max_context: int) -> tuple[int, int]:
        worker = WorkerDescription(
            *("p", 1, Role.PREFILL, "h:1", FINGERPRINT, "m", 1, 64, 1),
            max_context_tokens=max_context,
            max_prompt_tokens=max_prompt,
            max_draft_tokens=0,
            has_mtp=False,
        )
        found = canary_need(Placement(worker, worker))
        return found.prompt_tokens, found.max_tokens

    assert need(100, 200) == (PROMPT_TOKENS, OUTPUT_TOKENS)
    assert need(2, 200) == (2, OUTPUT_TOKENS)
    assert need(100, 5) == (2, OUTPUT_TOKENS)
    assert need(1, 3) == (1, 2)
    assert need(1, 2) == (1, 1)


def test_a_late_word_on_an_earlier_life_changes_nothing() -> None:
    proofs = Proofs()
    first = WorkerDescription(
        *("p", 1, Role.PREFILL, "h:1", FINGERPRINT, "m", 1, 64, 1, 64, 64, 0), has_mtp=False
    )
    second = replace(first, epoch=2)
    proofs.passed(first)
    assert proofs.kept_out(second)
    proofs.passed(second)
    proofs.failed(first, "failed its canary: late")
    assert proofs.kept_out(second) == ""
    proofs.keep_only([])
    assert proofs.kept_out(second)
