"""The bytes of single tokens, for logprobs: one token need not be whole characters.

Built once per gateway from the model's tokenizer. Byte-level vocabularies spell each byte as one
printable character, the others spell a lone byte as <0xE4> and a space as a low line; both are
undone here. The text of an output comes from `control_plane.detokenizer` instead.
"""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from control_plane.detokenizer import decoder_kinds

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenTexts:
    """Bytes and names of tokens. Special tokens are spelled out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {i: t.content for i, t in added.items()}
        self._special = frozenset(i for i, t in added.items() if t.special)
        is_byte_level = "ByteLevel" in decoder_kinds(tokenizer)
        self._character_to_byte = _byte_alphabet() if is_byte_level else None

    def is_special(self, token_id: int) -> bool:
        """Whether the token is in no text."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; empty for an id that the tokenizer does not know."""
        token = self._added.get(token_id)
        if token is not None:
            return token.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._character_to_byte is not None:
            return bytes(self._character_to_byte.get(character, 63) for character in token)
        lone = _LONE_BYTE.fullmatch(token)
        return bytes([int(lone[1], 16)]) if lone else token.replace(_SPACE, " ").encode()


def shown(token: bytes) -> str:
    """A token as OpenAI shows it: its text, or its bytes in hexadecimal when they are none."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _byte_alphabet() -> dict[str, int]:
    """The inverse of GPT-2's spelling: printable bytes are themselves, the others follow 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + rank): byte for rank, byte in enumerate(others)}
