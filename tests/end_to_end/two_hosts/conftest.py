"""Both workers on hosts of their own, and what the engine in one process answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.execution.local_engine import LocalEngine, LocalEngineLimits, LocalRequest
from hocket.model.model_config import ModelConfig
from hocket.model.weights import load_model
from hocket.request_params import SamplingParams, StoppingParams
from hocket.types import Leg, RequestKey, StartRequest
from tests.end_to_end.two_hosts.hosts import Pair, Worker
from tests.end_to_end.two_hosts.network import Network, why_not

NUM_BLOCKS = 128
PROGRESS_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 4.0
OVERRIDES = (
    f"prefill.num_blocks={NUM_BLOCKS}",
    f"decode.num_blocks={NUM_BLOCKS}",
    # A block per chunk: a hand-off has as many steps as it can have.
    "prefill.chunk_tokens=64",
    f"transfer.progress_timeout_s={PROGRESS_TIMEOUT_S}",
    f"transfer.read_timeout_s={READ_TIMEOUT_S}",
    "transfer.open_timeout_s=5",
    # A READ that will never end holds its blocks until its agent is rebuilt.
    "transfer.max_quarantine_share=0.01",
)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def running_pair(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("hosts")
    workers = [Worker(network, role, folder, OVERRIDES) for role in ("prefill", "decode")]
    try:
        for worker in workers:
            worker.wait_until_serving()
        yield Pair(network, *workers)
        assert [worker.stop() for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.process.kill()


@pytest.fixture
def pair(running_pair: Pair) -> Iterator[Pair]:
    """With a good link before and after."""
    running_pair.network.mend()
    yield running_pair
    running_pair.network.mend()


@pytest.fixture(scope="session")
def make_request() -> Callable[..., StartRequest]:
    """A request for the prefill leg, its prompt and noise determined by its name."""
    config = ModelConfig.from_checkpoint(Config().model.checkpoint())

    def make(name: str, prompt_tokens: int, max_tokens: int = 12) -> StartRequest:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        prompt = torch.randint(3, config.vocab_size, (prompt_tokens,), generator=generator)
        return StartRequest(
            key=RequestKey(name),
            token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(temperature=0.9, top_p=0.95, seed=prompt_tokens),
            stopping=StoppingParams(max_tokens),
            leg=Leg.PREFILL,
            deadline_s=60.0,
        )

    return make


@pytest.fixture(scope="session")
def expected() -> Callable[[StartRequest], tuple[int, ...]]:
    """What the engine in one process answers."""
    torch.set_num_threads(1)
    model = load_model(Config().model.checkpoint(), batch_invariant=True)
    engine = LocalEngine(model, LocalEngineLimits(num_blocks=NUM_BLOCKS))

    def answer(request: StartRequest) -> tuple[int, ...]:
        local: Any = LocalRequest(request.token_ids, request.sampling, request.stopping)
        return engine.generate([local])[0].token_ids

    return answer
