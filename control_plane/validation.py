"""What a client sent, checked: a `GenerateRequest` in, a `ValidRequest` or an error out.

First step of `request_flow`. Everything that can be known without the tokenizer is checked by
`validate`, with `control_plane.param_checks`; the lengths follow in `check_lengths` once the prompt
has been tokenised. Every error names the field, the value and the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.model_limits import ModelLimits
from control_plane.param_checks import check_sampling
from hocket.errors import InvalidRequest, ModelNotFound
from hocket.request_params import SamplingParams
from hocket.rpc import generation_pb2 as generation

MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_REQUEST_ID_LENGTH = 128
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenised as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, put into words by the model's template."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request in which nothing is wrong so far.

    `request_id` is the client's, or empty. `has_seed` False: the seed in `sampling` means nothing
    yet. `max_tokens` and `max_draft_tokens` None: the client left them to the server.
    """

    request_id: str
    prompt: Prompt
    num_choices: int
    sampling: SamplingParams
    has_seed: bool
    max_tokens: int | None
    min_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    max_draft_tokens: int | None


def validate(message: generation.GenerateRequest, limits: ModelLimits) -> ValidRequest:
    """Checks all but lengths in tokens.

    Raises:
        ModelNotFound: another model was asked for.
        InvalidRequest: names the first field that is wrong.
    """
    check_model(message.model, limits)
    if len(message.request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(
            "request_id", message.request_id, f"at most {MAX_REQUEST_ID_LENGTH} characters long"
        )
    if message.n > MAX_CHOICES:
        raise InvalidRequest("n", message.n, f"at most {MAX_CHOICES}")
    sampling = check_sampling(message, limits)
    stopping = message.stopping
    if sampling.grammar is not None:
        _check_grammar_ends(stopping)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidRequest(
            "stopping.max_tokens", 0, "at least 1", "Leave it out for the server's default."
        )
    return ValidRequest(
        request_id=message.request_id,
        prompt=check_prompt(message, limits),
        num_choices=max(1, message.n),
        sampling=sampling,
        has_seed=message.sampling.HasField("seed"),
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_strings=_stop_strings(stopping),
        stop_token_ids=_stop_token_ids(stopping, limits),
        ignore_eos=stopping.ignore_eos,
        include_stop=stopping.include_stop,
        max_draft_tokens=_max_draft_tokens(message, limits),
    )


def check_model(name: str, limits: ModelLimits) -> None:
    """Raises ModelNotFound unless `name` is empty or the served model's."""
    if name and name != limits.name:
        raise ModelNotFound(
            f"model {name!r} is not served here; {limits.name!r} is.",
            model=name,
            served=limits.name,
        )


def check_prompt(
    message: generation.GenerateRequest | generation.TokenizeRequest, limits: ModelLimits
) -> Prompt:
    """The prompt, which must be there and not be empty. Raises InvalidRequest."""
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text:
                raise InvalidRequest("text", "", "at least one character long")
            return TextPrompt(message.text)
        case "chat":
            return _chat(message.chat)
        case "token_ids":
            assert isinstance(message, generation.GenerateRequest)
            return _token_prompt(message.token_ids, limits)
        case _:
            raise InvalidRequest("prompt", None, "one of text, chat or token_ids")


def check_lengths(num_prompt: int, request: ValidRequest, limits: ModelLimits) -> int:
    """How many tokens may be generated after a prompt of `num_prompt` tokens: what was asked for,
    else the server's default or what the context leaves, whichever is less.

    Raises InvalidRequest when prompt, or prompt and output, are too long, or the output can't get
    as long as it must.
    """
    if num_prompt > limits.most_prompt_tokens:
        raise prompt_too_long(f"{num_prompt} tokens", limits.most_prompt_tokens)
    room = limits.max_context_tokens - num_prompt
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = min(limits.default_max_tokens, room)
    elif max_tokens > room:
        raise InvalidRequest(
            "stopping.max_tokens",
            max_tokens,
            f"at most {room} after a prompt of {num_prompt} tokens",
            f"The context holds {limits.max_context_tokens} tokens of prompt and output together.",
        )
    if request.min_tokens > max_tokens:
        limit = f"at most {max_tokens}, the most tokens of the output"
        raise InvalidRequest("stopping.min_tokens", request.min_tokens, limit)
    return max_tokens


def prompt_too_long(length: str, most_tokens: int) -> InvalidRequest:
    """The error for a prompt of this length ("5000 tokens")."""
    limit = f"at most {most_tokens} tokens"
    return InvalidRequest("prompt", length, limit, "Send a shorter prompt.")


def _check_grammar_ends(stopping: generation.Stopping) -> None:
    """A grammar alone says where its output may end. Raises InvalidRequest."""
    if stopping.min_tokens:
        raise InvalidRequest(
            "stopping.min_tokens", stopping.min_tokens, "0 with a grammar",
            "An output that is complete has nothing to go on with.",
        )  # fmt: skip
    if stopping.ignore_eos:
        raise InvalidRequest(
            "stopping.ignore_eos", True, "false with a grammar",
            "Once the output is complete, the end token is the only one left.",
        )  # fmt: skip


def _max_draft_tokens(message: generation.GenerateRequest, limits: ModelLimits) -> int | None:
    if not message.HasField("max_draft_tokens"):
        return None
    if message.max_draft_tokens and not limits.has_mtp:
        raise InvalidRequest(
            "max_draft_tokens", message.max_draft_tokens, "0 or absent",
            f"{limits.name!r} has no multi-token prediction heads.",
        )  # fmt: skip
    return message.max_draft_tokens


def _stop_strings(stopping: generation.Stopping) -> tuple[str, ...]:
    if len(stopping.stop) > MAX_STOP_STRINGS:
        limit = f"at most {MAX_STOP_STRINGS} strings"
        raise InvalidRequest("stopping.stop", f"{len(stopping.stop)} strings", limit)
    for index, stop in enumerate(stopping.stop):
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            limit = f"1 to {MAX_STOP_LENGTH} characters long"
            raise InvalidRequest(f"stopping.stop[{index}]", stop, limit)
    return tuple(stopping.stop)


def _stop_token_ids(stopping: generation.Stopping, limits: ModelLimits) -> frozenset[int]:
    token_ids = stopping.stop_token_ids
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        limit = f"at most {MAX_STOP_TOKEN_IDS} token ids"
        raise InvalidRequest("stopping.stop_token_ids", f"{len(token_ids)} token ids", limit)
    limits.check_vocabulary("stopping.stop_token_ids", token_ids)
    return frozenset(token_ids)


def _chat(chat: generation.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("chat.messages", [], "at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            limit = "one of " + ", ".join(ROLES)
            raise InvalidRequest(f"chat.messages[{index}].role", message.role, limit)
    return ChatPrompt(tuple(ChatMessage(m.role, m.content) for m in chat.messages))


def _token_prompt(message: generation.TokenIds, limits: ModelLimits) -> TokenPrompt:
    token_ids = tuple(message.ids)
    if not token_ids:
        raise InvalidRequest("token_ids.ids", [], "at least one token id")
    limits.check_vocabulary("token_ids.ids", token_ids)
    return TokenPrompt(token_ids)
