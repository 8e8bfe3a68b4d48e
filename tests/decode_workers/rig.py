"""A decode engine under a hand-moved clock, and as much of a prefill worker as it needs to hear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from decode_workers.import_stream import EventArrived, ImportMessage, SendUpdate
from hocket.execution.engine_thread import StepOutput
from hocket.kv.memory_transfer import MemoryExporter
from hocket.kv.wire import pool_to_message
from hocket.request_params import SamplingParams, StoppingParams
from hocket.rpc import worker_pb2 as worker
from hocket.rpc.convert import bundle_to_message
from hocket.types import (
    Bundle,
    Event,
    ExportHandle,
    Failed,
    Finished,
    FinishReason,
    Leg,
    RequestKey,
    StartRequest,
    Tokens,
    Usage,
)

BLOCK_TOKENS = 16
HIDDEN_STATE = bytes(16 * 4)


@dataclass
class Rig:
    """Events and messages of the engine are kept as they come. `worker` is a `TinyWorker`."""

    worker: Any
    events: list[Event] = field(default_factory=list[Event])
    messages: list[ImportMessage] = field(default_factory=list[ImportMessage])
    now: float = 1.0

    def __post_init__(self) -> None:
        self.engine, self.runner = self.worker.engine, self.worker.runner
        self.exporter = MemoryExporter(self.worker.fabric, [bytes(8)] * 16, 4, first_epoch=1)

    def turn(self, count: int = 1) -> StepOutput[ImportMessage]:
        """`count` turns, at least one; what the last one told."""
        outputs = [self.engine.step(self.now) for _ in range(count)]
        for output in outputs:
            self.events += output.events
            self.messages += output.messages
        return outputs[-1]

    def turn_until(self, is_true: Callable[[], bool], most: int = 2000) -> None:
        for _ in range(most):
            if is_true():
                return
            self.turn()
        raise AssertionError(f"not so after {most} turns: {self.events[-5:]}")

    def start(self, name: str, prompt: int = 20, max_tokens: int = 8, **changes: object) -> None:
        """A greedy whole request; those of one length have the same prompt."""
        request = StartRequest(
            key=RequestKey(name),
            token_ids=tuple(i % 50 for i in range(prompt)),
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens),
            leg=Leg.WHOLE,
            deadline_s=30.0,
        )
        self.engine.take(replace(request, **changes), self.now)  # type: ignore[arg-type]

    def import_(self, name: str, prompt: int = 20, weights: str = "w", **changes: Any) -> None:
        fingerprint = replace(self.worker.fingerprint, weights=weights)
        num_blocks = -(-prompt // BLOCK_TOKENS)
        handle = ExportHandle("p", 1, "p:1", 0, 1, fingerprint, num_blocks)
        self.start(name, prompt, leg=Leg.DECODE, export=handle, **changes)

    def prefill_says(self, name: str, event: worker.ExportEvent) -> None:
        self.engine.take(EventArrived(RequestKey(name), event), self.now)

    def prefill_hands_over(
        self,
        name: str,
        num_blocks: int = 2,
        cached_tokens: int = 0,
        finish_reason: FinishReason | None = None,
    ) -> None:
        """All that comes down the stream of an export, at once."""
        opened = pool_to_message(self.exporter.describe())
        self.prefill_says(name, worker.ExportEvent(opened=opened))
        chunk = worker.ChunkReady(first_block=0, blocks=range(num_blocks))
        self.prefill_says(name, worker.ExportEvent(chunk=chunk))
        usage = Usage(prompt_tokens=1, output_tokens=1, cached_tokens=cached_tokens)
        bundle = bundle_to_message(Bundle(7, None, finish_reason, usage, HIDDEN_STATE))
        self.prefill_says(name, worker.ExportEvent(bundle=bundle))

    def of(self, kind: type) -> list[str]:
        return [event.key.request_id for event in self.events if isinstance(event, kind)]

    def output(self, name: str) -> tuple[int, ...]:
        """A request's tokens, told in order, none twice and none missing."""
        found: list[int] = []
        for event in self.events:
            if isinstance(event, Tokens) and event.key.request_id == name:
                assert event.output_index == len(found)
                found += event.token_ids
        return tuple(found)

    def usage(self, name: str) -> Usage:
        (finished,) = [
            e for e in self.events if isinstance(e, Finished) and e.key.request_id == name
        ]
        return finished.usage

    def failures(self) -> list[tuple[str, str]]:
        failed = [event for event in self.events if isinstance(event, Failed)]
        return [(event.key.request_id, event.reason) for event in failed]

    def said(self, name: str) -> list[str]:
        """What went up the stream of this import, by kind."""
        updates = [
            m for m in self.messages if isinstance(m, SendUpdate) and m.key.request_id == name
        ]
        return [str(message.update.WhichOneof("update")) for message in updates]

    @property
    def num_preemptions(self) -> int:
        return self.worker.scheduler.counters.preemptions

    @property
    def free_blocks(self) -> int:
        return self.runner.cache.pool.num_free

    @property
    def is_at_rest(self) -> bool:
        """Every block is free, and nothing is left of any request."""
        pool = self.runner.cache.pool
        return (
            pool.num_free == pool.num_blocks
            and not self.worker.scheduler.keys()
            and self.worker.imports.is_idle
        )
