from hocket.rpc import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class Leg(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEG_UNSPECIFIED: _ClassVar[Leg]
    LEG_PREFILL: _ClassVar[Leg]
    LEG_DECODE: _ClassVar[Leg]
    LEG_WHOLE: _ClassVar[Leg]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
LEG_UNSPECIFIED: Leg
LEG_PREFILL: Leg
LEG_DECODE: Leg
LEG_WHOLE: Leg

class WakeRequest(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "group", "rank", "group_size", "fingerprint", "protocol_version", "model", "num_blocks", "block_tokens", "max_context_tokens", "max_prompt_tokens", "max_draft_tokens", "load", "is_draining", "transport", "has_mtp", "block_bytes", "address", "metrics_address", "has_prefix_cache", "synthetic_acceptance")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HAS_MTP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: Role
    group: str
    rank: int
    group_size: int
    fingerprint: Fingerprint
    protocol_version: int
    model: str
    num_blocks: int
    block_tokens: int
    max_context_tokens: int
    max_prompt_tokens: int
    max_draft_tokens: int
    load: Load
    is_draining: bool
    transport: str
    has_mtp: bool
    block_bytes: int
    address: str
    metrics_address: str
    has_prefix_cache: bool
    synthetic_acceptance: float
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., group: _Optional[str] = ..., rank: _Optional[int] = ..., group_size: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., num_blocks: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., is_draining: _Optional[bool] = ..., transport: _Optional[str] = ..., has_mtp: _Optional[bool] = ..., block_bytes: _Optional[int] = ..., address: _Optional[str] = ..., metrics_address: _Optional[str] = ..., has_prefix_cache: _Optional[bool] = ..., synthetic_acceptance: _Optional[float] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("weights", "kv_layout", "block_tokens", "dtype", "numerics")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    weights: str
    kv_layout: str
    block_tokens: int
    dtype: str
    numerics: str
    def __init__(self, weights: _Optional[str] = ..., kv_layout: _Optional[str] = ..., block_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "queued_prompt_tokens", "free_blocks", "num_blocks", "unread_blocks", "steps", "busy_s", "computed_prompt_tokens", "decode_steps", "decode_step_s", "decode_batch_sum", "emitted_tokens")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_BATCH_SUM_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    queued_prompt_tokens: int
    free_blocks: int
    num_blocks: int
    unread_blocks: int
    steps: int
    busy_s: float
    computed_prompt_tokens: int
    decode_steps: int
    decode_step_s: float
    decode_batch_sum: int
    emitted_tokens: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., unread_blocks: _Optional[int] = ..., steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., computed_prompt_tokens: _Optional[int] = ..., decode_steps: _Optional[int] = ..., decode_step_s: _Optional[float] = ..., decode_batch_sum: _Optional[int] = ..., emitted_tokens: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("failed_requests",)
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    failed_requests: int
    def __init__(self, failed_requests: _Optional[int] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class SessionCommand(_message.Message):
    __slots__ = ("sequence", "open", "start", "piece", "cancel", "acknowledge", "batch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    open: OpenSession
    start: Start
    piece: StartPiece
    cancel: Cancel
    acknowledge: AcknowledgeEvents
    batch: CommandBatch
    def __init__(self, sequence: _Optional[int] = ..., open: _Optional[_Union[OpenSession, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., piece: _Optional[_Union[StartPiece, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., acknowledge: _Optional[_Union[AcknowledgeEvents, _Mapping]] = ..., batch: _Optional[_Union[CommandBatch, _Mapping]] = ...) -> None: ...

class CommandBatch(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[SessionCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[SessionCommand, _Mapping]]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session_id", "gateway_id", "protocol_version", "received_events")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    gateway_id: str
    protocol_version: int
    received_events: int
    def __init__(self, session_id: _Optional[str] = ..., gateway_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., received_events: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("key", "prompt_tokens", "token_ids", "sampling", "stopping", "top_logprobs", "max_draft_tokens", "deadline_ms", "leg", "export", "generated_tokens", "tenant_salt", "choice", "prompt_logprobs", "grammar", "typical_acceptance")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    prompt_tokens: int
    token_ids: bytes
    sampling: _generation_pb2.Sampling
    stopping: _generation_pb2.Stopping
    top_logprobs: int
    max_draft_tokens: int
    deadline_ms: int
    leg: Leg
    export: ExportHandle
    generated_tokens: int
    tenant_salt: bytes
    choice: int
    prompt_logprobs: int
    grammar: _generation_pb2.Grammar
    typical_acceptance: _generation_pb2.TypicalAcceptance
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_generation_pb2.Stopping, _Mapping]] = ..., top_logprobs: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., leg: _Optional[_Union[Leg, str]] = ..., export: _Optional[_Union[ExportHandle, _Mapping]] = ..., generated_tokens: _Optional[int] = ..., tenant_salt: _Optional[bytes] = ..., choice: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[_generation_pb2.Grammar, _Mapping]] = ..., typical_acceptance: _Optional[_Union[_generation_pb2.TypicalAcceptance, _Mapping]] = ...) -> None: ...

class StartPiece(_message.Message):
    __slots__ = ("key", "offset", "token_ids")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    offset: int
    token_ids: bytes
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., offset: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ...) -> None: ...

class AcknowledgeEvents(_message.Message):
    __slots__ = ("received_events",)
    RECEIVED_EVENTS_FIELD_NUMBER: _ClassVar[int]
    received_events: int
    def __init__(self, received_events: _Optional[int] = ...) -> None: ...

class SessionEvents(_message.Message):
    __slots__ = ("sequence", "worker_epoch", "received_commands", "events", "load")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    worker_epoch: int
    received_commands: int
    events: _containers.RepeatedCompositeFieldContainer[Event]
    load: Load
    def __init__(self, sequence: _Optional[int] = ..., worker_epoch: _Optional[int] = ..., received_commands: _Optional[int] = ..., events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("key", "begun", "joined", "tokens", "finished", "failed", "prompt_logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    begun: Begun
    joined: Joined
    tokens: Tokens
    finished: Finished
    failed: Failed
    prompt_logprobs: PromptLogprobs
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., joined: _Optional[_Union[Joined, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("export",)
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    export: ExportHandle
    def __init__(self, export: _Optional[_Union[ExportHandle, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("imported_bytes", "transport", "cached_tokens", "recomputed", "recompute_reason")
    IMPORTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    imported_bytes: int
    transport: str
    cached_tokens: int
    recomputed: bool
    recompute_reason: str
    def __init__(self, imported_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., recomputed: _Optional[bool] = ..., recompute_reason: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("output_index", "token_ids", "logprobs", "step")
    OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    output_index: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_generation_pb2.TokenLogprobs]
    step: VerifyStep
    def __init__(self, output_index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_generation_pb2.TokenLogprobs, _Mapping]]] = ..., step: _Optional[_Union[VerifyStep, _Mapping]] = ...) -> None: ...

class VerifyStep(_message.Message):
    __slots__ = ("drafted_tokens", "accepted_tokens")
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafted_tokens: int
    accepted_tokens: int
    def __init__(self, drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    def __init__(self, reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "retryable", "reason", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retryable: bool
    reason: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., reason: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ExportHandle(_message.Message):
    __slots__ = ("worker_id", "worker_epoch", "address", "slot", "slot_epoch", "fingerprint", "num_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SLOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    address: str
    slot: int
    slot_epoch: int
    fingerprint: Fingerprint
    num_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., address: _Optional[str] = ..., slot: _Optional[int] = ..., slot_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ExportUpdate(_message.Message):
    __slots__ = ("open", "acknowledge", "progress", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenExport
    acknowledge: AcknowledgeBlocks
    progress: Progress
    close: CloseExport
    def __init__(self, open: _Optional[_Union[OpenExport, _Mapping]] = ..., acknowledge: _Optional[_Union[AcknowledgeBlocks, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., close: _Optional[_Union[CloseExport, _Mapping]] = ...) -> None: ...

class OpenExport(_message.Message):
    __slots__ = ("key", "export", "worker_id", "worker_epoch", "fingerprint", "first_block")
    KEY_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    key: RequestKey
    export: ExportHandle
    worker_id: str
    worker_epoch: int
    fingerprint: Fingerprint
    first_block: int
    def __init__(self, key: _Optional[_Union[RequestKey, _Mapping]] = ..., export: _Optional[_Union[ExportHandle, _Mapping]] = ..., worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AcknowledgeBlocks(_message.Message):
    __slots__ = ("first_block", "num_blocks")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    num_blocks: int
    def __init__(self, first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class CloseExport(_message.Message):
    __slots__ = ("reason",)
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[CloseExport.Reason]
        REASON_DONE: _ClassVar[CloseExport.Reason]
        REASON_CANCELLED: _ClassVar[CloseExport.Reason]
        REASON_FAILED: _ClassVar[CloseExport.Reason]
    REASON_UNSPECIFIED: CloseExport.Reason
    REASON_DONE: CloseExport.Reason
    REASON_CANCELLED: CloseExport.Reason
    REASON_FAILED: CloseExport.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: CloseExport.Reason
    def __init__(self, reason: _Optional[_Union[CloseExport.Reason, str]] = ...) -> None: ...

class ExportEvent(_message.Message):
    __slots__ = ("opened", "chunk", "bundle", "aborted", "progress")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    opened: ExportOpened
    chunk: ChunkReady
    bundle: Bundle
    aborted: ExportAborted
    progress: Progress
    def __init__(self, opened: _Optional[_Union[ExportOpened, _Mapping]] = ..., chunk: _Optional[_Union[ChunkReady, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ..., aborted: _Optional[_Union[ExportAborted, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class ExportOpened(_message.Message):
    __slots__ = ("agent", "agent_metadata", "base_address", "block_bytes", "num_blocks", "device", "memory", "epoch_address", "num_slots")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    agent_metadata: bytes
    base_address: int
    block_bytes: int
    num_blocks: int
    device: int
    memory: str
    epoch_address: int
    num_slots: int
    def __init__(self, agent: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., device: _Optional[int] = ..., memory: _Optional[str] = ..., epoch_address: _Optional[int] = ..., num_slots: _Optional[int] = ...) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("first_block", "blocks", "checksums")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_block: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("first_token", "logprobs", "finish_reason", "usage", "hidden_state")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    logprobs: _generation_pb2.TokenLogprobs
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    hidden_state: bytes
    def __init__(self, first_token: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.TokenLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., hidden_state: _Optional[bytes] = ...) -> None: ...

class ExportAborted(_message.Message):
    __slots__ = ("code", "message", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
