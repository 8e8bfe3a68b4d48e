"""What a client sent, checked: a `GenerateRequest` in, a `ValidRequest` or an error out.

First step of `request_flow`. Everything that can be known without the tokenizer is checked by
`validate`; the lengths follow in `check_lengths` once the prompt has been tokenised. Every error
names the field, the value and the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import InvalidRequest, ModelNotFound
from hocket.rpc import generation_pb2 as generation
from hocket.types import SamplingParams

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_REQUEST_ID_LENGTH = 128
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The served model, as far as requests are checked against it. Sizes in tokens.

    `max_context_tokens`: prompt and output together. `max_prompt_tokens`: what one worker takes.
    """

    name: str
    vocabulary_size: int
    max_context_tokens: int
    max_prompt_tokens: int
    default_max_tokens: int

    @property
    def most_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one token of output."""
        return min(self.max_prompt_tokens, self.max_context_tokens - 1)


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
    sampling: SamplingParams
    has_seed: bool
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
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
    sampling = _sampling(message, limits)
    stopping = message.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidRequest(
            "stopping.max_tokens", 0, "at least 1", "Leave it out for the server's default."
        )
    has_drafts = message.HasField("max_draft_tokens")
    return ValidRequest(
        request_id=message.request_id,
        prompt=check_prompt(message, limits),
        sampling=sampling,
        has_seed=message.sampling.HasField("seed"),
        max_tokens=max_tokens,
        stop_strings=_stop_strings(stopping),
        stop_token_ids=_stop_token_ids(stopping, limits),
        ignore_eos=stopping.ignore_eos,
        max_draft_tokens=message.max_draft_tokens if has_drafts else None,
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


def check_lengths(num_prompt: int, max_tokens: int | None, limits: ModelLimits) -> int:
    """How many tokens may be generated after a prompt of `num_prompt` tokens: what was asked for,
    else the server's default or what the context leaves, whichever is less.

    Raises InvalidRequest when prompt, or prompt and output, are too long.
    """
    if num_prompt > limits.most_prompt_tokens:
        raise prompt_too_long(f"{num_prompt} tokens", limits.most_prompt_tokens)
    room = limits.max_context_tokens - num_prompt
    if max_tokens is None:
        return min(limits.default_max_tokens, room)
    if max_tokens > room:
        raise InvalidRequest(
            "stopping.max_tokens",
            max_tokens,
            f"at most {room} after a prompt of {num_prompt} tokens",
            f"The context holds {limits.max_context_tokens} tokens of prompt and output together.",
        )
    return max_tokens


def prompt_too_long(length: str, most_tokens: int) -> InvalidRequest:
    """The error for a prompt of this length ("5000 tokens")."""
    limit = f"at most {most_tokens} tokens"
    return InvalidRequest("prompt", length, limit, "Send a shorter prompt.")


def _sampling(message: generation.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    sampling = message.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    # Written so that a NaN is refused too.
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        limit = f"between 0 and {MAX_TEMPERATURE:g}"
        raise InvalidRequest("sampling.temperature", _shown(temperature), limit)
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0.0 < top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", _shown(top_p), "above 0 and at most 1")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise InvalidRequest("sampling.min_p", _shown(sampling.min_p), "between 0 and 1")
    if sampling.top_k > limits.vocabulary_size:
        limit = f"at most {limits.vocabulary_size}, the size of the vocabulary"
        raise InvalidRequest("sampling.top_k", sampling.top_k, limit, "0 keeps all tokens.")
    has_logprobs = message.HasField("top_logprobs")
    most = min(MAX_TOP_LOGPROBS, limits.vocabulary_size)
    if message.top_logprobs > most:
        raise InvalidRequest("top_logprobs", message.top_logprobs, f"at most {most}")
    return SamplingParams(
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        top_logprobs=message.top_logprobs if has_logprobs else None,
    )


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
    _check_vocabulary("stopping.stop_token_ids", tuple(token_ids), limits)
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
    _check_vocabulary("token_ids.ids", token_ids, limits)
    return TokenPrompt(token_ids)


def _check_vocabulary(field: str, token_ids: tuple[int, ...], limits: ModelLimits) -> None:
    size = limits.vocabulary_size
    if not token_ids or max(token_ids) < size:
        return
    index = next(i for i, token_id in enumerate(token_ids) if token_id >= size)
    limit = f"below {size}, the size of the vocabulary"
    raise InvalidRequest(f"{field}[{index}]", token_ids[index], limit)


def _shown(value: float) -> float:
    """A float32 from the wire as the client wrote it: 1.1, not 1.100000023841858."""
    return float(f"{value:.7g}")
