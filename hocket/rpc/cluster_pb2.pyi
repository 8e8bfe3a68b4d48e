from hocket.rpc import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("model", "gateway", "workers", "pools", "targets", "store_fault")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    STORE_FAULT_FIELD_NUMBER: _ClassVar[int]
    model: str
    gateway: GatewayStatus
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    pools: PoolsStatus
    targets: ScaleTargets
    store_fault: str
    def __init__(self, model: _Optional[str] = ..., gateway: _Optional[_Union[GatewayStatus, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., pools: _Optional[_Union[PoolsStatus, _Mapping]] = ..., targets: _Optional[_Union[ScaleTargets, _Mapping]] = ..., store_fault: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker", "is_connected", "is_listed", "gateway_requests", "kept_out")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_LISTED_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_OUT_FIELD_NUMBER: _ClassVar[int]
    worker: _worker_pb2.WorkerDescription
    is_connected: bool
    is_listed: bool
    gateway_requests: int
    kept_out: str
    def __init__(self, worker: _Optional[_Union[_worker_pb2.WorkerDescription, _Mapping]] = ..., is_connected: _Optional[bool] = ..., is_listed: _Optional[bool] = ..., gateway_requests: _Optional[int] = ..., kept_out: _Optional[str] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "uptime_s", "requests_in_flight", "requests_queued", "requests", "first_token", "inter_token", "hand_off", "prompt_tokens", "output_tokens", "hand_off_bytes", "drafts", "cached_tokens", "recomputed_requests", "broken_prefix_promises", "migrations")
    class RequestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class HandOffBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_PREFIX_PROMISES_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    uptime_s: float
    requests_in_flight: int
    requests_queued: int
    requests: _containers.ScalarMap[str, int]
    first_token: Latency
    inter_token: Latency
    hand_off: Latency
    prompt_tokens: int
    output_tokens: int
    hand_off_bytes: _containers.ScalarMap[str, int]
    drafts: DraftStatus
    cached_tokens: int
    recomputed_requests: int
    broken_prefix_promises: int
    migrations: int
    def __init__(self, gateway_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., requests_in_flight: _Optional[int] = ..., requests_queued: _Optional[int] = ..., requests: _Optional[_Mapping[str, int]] = ..., first_token: _Optional[_Union[Latency, _Mapping]] = ..., inter_token: _Optional[_Union[Latency, _Mapping]] = ..., hand_off: _Optional[_Union[Latency, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., hand_off_bytes: _Optional[_Mapping[str, int]] = ..., drafts: _Optional[_Union[DraftStatus, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., recomputed_requests: _Optional[int] = ..., broken_prefix_promises: _Optional[int] = ..., migrations: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("count", "sum_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    sum_s: float
    def __init__(self, count: _Optional[int] = ..., sum_s: _Optional[float] = ...) -> None: ...

class DraftStatus(_message.Message):
    __slots__ = ("verify_steps", "emitted_tokens", "drafted_by_position", "accepted_by_position")
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    verify_steps: int
    emitted_tokens: int
    drafted_by_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verify_steps: _Optional[int] = ..., emitted_tokens: _Optional[int] = ..., drafted_by_position: _Optional[_Iterable[int]] = ..., accepted_by_position: _Optional[_Iterable[int]] = ...) -> None: ...

class PoolsStatus(_message.Message):
    __slots__ = ("age_s", "is_autoscaled", "prefill", "decode", "reasons", "unix_s")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IS_AUTOSCALED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    is_autoscaled: bool
    prefill: PoolStatus
    decode: PoolStatus
    reasons: _containers.RepeatedScalarFieldContainer[str]
    unix_s: float
    def __init__(self, age_s: _Optional[float] = ..., is_autoscaled: _Optional[bool] = ..., prefill: _Optional[_Union[PoolStatus, _Mapping]] = ..., decode: _Optional[_Union[PoolStatus, _Mapping]] = ..., reasons: _Optional[_Iterable[str]] = ..., unix_s: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("size", "ready", "starting", "draining")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    size: int
    ready: int
    starting: int
    draining: int
    def __init__(self, size: _Optional[int] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("workers", "auto")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    workers: int
    auto: bool
    def __init__(self, workers: _Optional[int] = ..., auto: _Optional[bool] = ...) -> None: ...

class ScaleTargets(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: PoolTarget
    decode: PoolTarget
    def __init__(self, prefill: _Optional[_Union[PoolTarget, _Mapping]] = ..., decode: _Optional[_Union[PoolTarget, _Mapping]] = ...) -> None: ...

class PoolTarget(_message.Message):
    __slots__ = ("size", "age_s")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    size: PoolSize
    age_s: float
    def __init__(self, size: _Optional[_Union[PoolSize, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("prefill", "decode")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    prefill: PoolSize
    decode: PoolSize
    def __init__(self, prefill: _Optional[_Union[PoolSize, _Mapping]] = ..., decode: _Optional[_Union[PoolSize, _Mapping]] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: ScaleTargets
    def __init__(self, targets: _Optional[_Union[ScaleTargets, _Mapping]] = ...) -> None: ...
