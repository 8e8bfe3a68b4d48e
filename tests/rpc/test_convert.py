"""Every value survives the way through protobuf bytes and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.request_params import (
    Grammar,
    GrammarKind,
    SamplingParams,
    StoppingParams,
    TypicalAcceptance,
)
from hocket.rpc import convert, convert_start
from hocket.rpc import worker_pb2 as worker
from hocket.types import (
    Begun,
    Bundle,
    DraftCounts,
    Event,
    ExportHandle,
    Failed,
    Fingerprint,
    Finished,
    FinishReason,
    Joined,
    Leg,
    Load,
    PromptLogprobs,
    RequestKey,
    Role,
    StartRequest,
    TokenLogprobs,
    Tokens,
    Usage,
    VerifyStep,
    WorkerDescription,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
REASON = st.sampled_from([None, *FinishReason])
IDS = st.lists(U32, max_size=20).map(tuple)
COUNTS = st.lists(U32, max_size=4).map(tuple)

KEY = st.builds(RequestKey, TEXT, U32)
FINGERPRINT = st.builds(Fingerprint, TEXT, TEXT, U32, TEXT, TEXT)
HANDLE = st.builds(ExportHandle, TEXT, U64, TEXT, U32, U64, FINGERPRINT, U32)
LOGPROBS = st.builds(TokenLogprobs, U32, F32, st.lists(st.tuples(U32, F32), max_size=3).map(tuple))
DRAFTS = st.builds(DraftCounts, U32, U32, COUNTS, COUNTS)
USAGE = st.builds(Usage, U32, U32, U32, DRAFTS).filter(
    lambda u: max(u.drafts.drafted_tokens, u.drafts.accepted_tokens) < 2**32
)
LOAD = st.builds(Load, U32, U32, U64, U32, U32, U32, U64)
METADATA = st.dictionaries(TEXT, TEXT, max_size=3).map(lambda d: tuple(sorted(d.items())))
EVENT = st.one_of(
    st.builds(Begun, KEY, HANDLE),
    st.builds(Joined, KEY, U64, TEXT, U32, st.booleans(), TEXT),
    st.builds(PromptLogprobs, KEY, U32, st.lists(LOGPROBS, max_size=3).map(tuple)),
    st.builds(
        Tokens,
        KEY,
        U32,
        IDS,
        st.lists(LOGPROBS, max_size=3).map(tuple),
        st.none() | st.builds(VerifyStep, U32, U32),
    ),
    st.builds(Finished, KEY, REASON, USAGE),
    st.builds(Failed, KEY, st.integers(1, 16), TEXT, TEXT, st.booleans(), METADATA),
)
DESCRIPTION = st.builds(
    WorkerDescription,
    **{f.name: TEXT if f.type == "str" else U32 for f in dataclasses.fields(WorkerDescription)}
    | {"epoch": U64, "block_bytes": U64, "role": st.sampled_from(Role), "load": LOAD}
    | {"fingerprint": FINGERPRINT}
    | {"synthetic_acceptance": F32}
    | dict.fromkeys(("has_mtp", "has_prefix_cache", "is_draining"), st.booleans()),
)
GRAMMAR = st.one_of(
    st.builds(Grammar, st.sampled_from([k for k in GrammarKind if k.value != "choice"]), TEXT),
    st.lists(TEXT, max_size=3).map(lambda texts: Grammar(GrammarKind.CHOICE, json.dumps(texts))),
)
SAMPLING = st.builds(
    SamplingParams,
    *(F32, U32, F32, F32, U64, U32, st.none() | U32, st.none() | U32, F32, F32, F32),
    st.dictionaries(U32, F32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    st.none() | GRAMMAR,
    st.none() | st.builds(TypicalAcceptance, F32, F32),
)
START = st.builds(
    StartRequest,
    key=KEY,
    token_ids=IDS,
    sampling=SAMPLING,
    stopping=st.builds(StoppingParams, U32, st.frozensets(U32, max_size=3), U32),
    leg=st.sampled_from(Leg),
    deadline_s=st.integers(0, 10**9).map(lambda ms: ms / 1000),
    export=st.none() | HANDLE,
    max_draft_tokens=st.none() | U32,
    generated_tokens=U32,
    tenant_salt=st.binary(max_size=4),
)
BUNDLE = st.builds(Bundle, U32, st.none() | LOGPROBS, REASON, USAGE, st.binary(max_size=8))


def sent(message: Any) -> Any:
    """The message as the other side parses it."""
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("key", KEY),
        ("fingerprint", FINGERPRINT),
        ("handle", HANDLE),
        ("load", LOAD),
        ("description", DESCRIPTION),
        ("logprobs", LOGPROBS),
        ("usage", USAGE),
        ("bundle", BUNDLE),
        ("event", EVENT),
    ],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_value_comes_back_as_it_went(
    name: str, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    message = getattr(convert, f"{name}_to_message")(value)
    assert getattr(convert, f"{name}_from_message")(sent(message)) == value


@settings(max_examples=100, deadline=None)
@given(request=START, piece_tokens=st.integers(1, 25))
def test_a_start_and_its_pieces_come_back_as_one_request(
    request: StartRequest, piece_tokens: int
) -> None:
    start, pieces = convert_start.start_to_messages(request, piece_tokens)
    start = sent(start)
    token_ids = list(convert.unpack_tokens(start.token_ids))
    for piece in map(sent, pieces):
        assert piece.offset == len(token_ids)
        assert convert.key_from_message(piece.key) == request.key
        token_ids += convert.unpack_tokens(piece.token_ids)
    assert len(token_ids) == start.prompt_tokens
    assert convert_start.start_from_message(start, tuple(token_ids)) == request


def test_every_kind_of_event_is_covered() -> None:
    kinds = {f.name for f in worker.Event.DESCRIPTOR.oneofs_by_name["event"].fields}
    names = {"PromptLogprobs": "prompt_logprobs"}
    assert kinds == {names.get(k.__name__, k.__name__.lower()) for k in Event.__args__}


def test_tokens_are_little_endian_uint32() -> None:
    assert convert.pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        convert.pack_tokens([2**32])
    with pytest.raises(OverflowError):
        convert.pack_tokens([-1])
    with pytest.raises(ValueError, match="bytes"):
        convert.unpack_tokens(b"\0\0\0")


def test_what_a_peer_must_not_leave_out_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown role"):
        convert.description_from_message(worker.WorkerDescription())
    with pytest.raises(ValueError, match="unknown leg"):
        convert_start.start_from_message(worker.Start(), ())
    with pytest.raises(ValueError, match="unknown kind"):
        convert.event_from_message(worker.Event())
