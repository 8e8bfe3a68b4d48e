"""How a client wants its output chosen, checked: `Sampling` and its like in, `SamplingParams` out.

Part of `control_plane.validation`. Whether a grammar can be compiled, workers find out: they fail
the request with the same kind of error.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.model_limits import ModelLimits
from hocket.errors import InvalidRequest
from hocket.request_params import Grammar, GrammarKind, SamplingParams, TypicalAcceptance
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.convert_start import grammar_from_message

MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GRAMMAR_CHOICES = 1024
# The method's own (arXiv 2401.10774, section 3.3.1).
TYPICAL_EPSILON, TYPICAL_DELTA = 0.3, 0.09


@dataclass(frozen=True, slots=True)
class _Range:
    """Values from `low` to `high`; `is_above`: `low` itself is out."""

    low: float
    high: float
    is_above: bool = False

    def checked(self, field: str, value: float) -> float:
        """The value. Raises InvalidRequest when it is outside or NaN."""
        # Written so that a NaN is refused too.
        shown = _shown(value)
        if self.low <= shown <= self.high and not (self.is_above and value == self.low):
            return value
        limit = f"between {self.low:g} and {self.high:g}"
        if self.is_above:
            limit = f"above {self.low:g} and at most {self.high:g}"
        raise InvalidRequest(field, shown, limit)


_TEMPERATURE = _Range(0, 100)
_SHARE = _Range(0, 1)
_POSITIVE_SHARE = _Range(0, 1, is_above=True)
_FACTOR = _Range(0.01, 2)
_PENALTY = _Range(-2, 2)
_BIAS = _Range(-100, 100)


def check_sampling(message: generation.GenerateRequest, limits: ModelLimits) -> SamplingParams:
    """Everything of a request that says how tokens are chosen and what is told of them.

    Raises InvalidRequest.
    """
    sampling = message.sampling
    if sampling.top_k > limits.vocabulary_size:
        limit = f"at most {limits.vocabulary_size}, the size of the vocabulary"
        raise InvalidRequest("sampling.top_k", sampling.top_k, limit, "0 keeps all tokens.")
    repetition = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    return SamplingParams(
        temperature=_TEMPERATURE.checked(
            "sampling.temperature",
            sampling.temperature if sampling.HasField("temperature") else 1.0,
        ),
        top_k=sampling.top_k,
        top_p=_POSITIVE_SHARE.checked(
            "sampling.top_p", sampling.top_p if sampling.HasField("top_p") else 1.0
        ),
        min_p=_SHARE.checked("sampling.min_p", sampling.min_p),
        seed=sampling.seed,
        top_logprobs=_logprobs(message, "top_logprobs", limits),
        prompt_logprobs=_logprobs(message, "prompt_logprobs", limits),
        repetition_penalty=_FACTOR.checked("sampling.repetition_penalty", repetition),
        frequency_penalty=_PENALTY.checked("sampling.frequency_penalty", frequency),
        presence_penalty=_PENALTY.checked("sampling.presence_penalty", presence),
        logit_bias=_logit_bias(sampling, limits),
        grammar=_grammar(message),
        acceptance=_acceptance(message),
    )


def _logprobs(message: generation.GenerateRequest, field: str, limits: ModelLimits) -> int | None:
    if not message.HasField(field):
        return None
    number: int = getattr(message, field)
    most = min(MAX_TOP_LOGPROBS, limits.vocabulary_size)
    if number > most:
        raise InvalidRequest(field, number, f"at most {most}")
    return number


def _logit_bias(
    sampling: generation.Sampling, limits: ModelLimits
) -> tuple[tuple[int, float], ...]:
    field, bias = "sampling.logit_bias", sorted(sampling.logit_bias.items())
    if len(bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(field, f"{len(bias)} tokens", f"at most {MAX_BIASED_TOKENS} tokens")
    for token_id, value in bias:
        if token_id >= limits.vocabulary_size:
            limit = f"of tokens below {limits.vocabulary_size}, the size of the vocabulary"
            raise InvalidRequest(field, f"of token {token_id}", limit)
        _BIAS.checked(f"{field}[{token_id}]", value)
    return tuple(bias)


def _grammar(message: generation.GenerateRequest) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    kind = message.grammar.WhichOneof("grammar")
    if kind is None:
        raise InvalidRequest("grammar", None, "one of json_schema, regex, ebnf or choice")
    grammar = grammar_from_message(message.grammar)
    if grammar.kind is GrammarKind.CHOICE:
        _check_choices(tuple(message.grammar.choice.strings))
    num_bytes = len(grammar.source.encode())
    if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
        limit = f"at least one byte and at most {MAX_GRAMMAR_BYTES}"
        raise InvalidRequest(f"grammar.{kind}", f"{num_bytes} bytes", limit)
    return grammar


def _check_choices(strings: tuple[str, ...]) -> None:
    field = "grammar.choice.strings"
    if not 0 < len(strings) <= MAX_GRAMMAR_CHOICES:
        limit = f"1 to {MAX_GRAMMAR_CHOICES} strings"
        raise InvalidRequest(field, f"{len(strings)} strings", limit)
    seen: set[str] = set()
    for index, string in enumerate(strings):
        if not string or string in seen:
            raise InvalidRequest(f"{field}[{index}]", string, "not empty and there only once")
        seen.add(string)


def _acceptance(message: generation.GenerateRequest) -> TypicalAcceptance | None:
    if not message.HasField("typical_acceptance"):
        return None
    typical = message.typical_acceptance
    epsilon = typical.epsilon if typical.HasField("epsilon") else TYPICAL_EPSILON
    delta = typical.delta if typical.HasField("delta") else TYPICAL_DELTA
    return TypicalAcceptance(
        _POSITIVE_SHARE.checked("typical_acceptance.epsilon", epsilon),
        _POSITIVE_SHARE.checked("typical_acceptance.delta", delta),
    )


def _shown(value: float) -> float:
    """A float32 from the wire as the client wrote it: 1.1, not 1.100000023841858."""
    return float(f"{value:.7g}")
