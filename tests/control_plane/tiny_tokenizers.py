"""A tiny tokenizer of each kind that checkpoints have, and what their tokens' bytes are."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "</s>"


def byte_level() -> Tokenizer:
    """As GPT-2 and most models of today: every token is some bytes of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges = [("a", "b"), ("ab", "a"), ("Ġ", "a"), ("Ã", "©"), ("ä", "\u00b8")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _ended(tokenizer)


def byte_fallback() -> Tokenizer:
    """As sentencepiece models have it: words with a leading mark, unknown text byte by byte."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"▁a": 256, "▁b": 257, "c": 258, "ab": 259, "▁": 260, "世": 261}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _ended(tokenizer)


def metaspace() -> Tokenizer:
    """Words with a leading mark, the first one's dropped, no lone bytes."""
    words = ["<unk>", "▁a", "▁b", "c", "ab", "▁", "▁▁", "世", "é"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return _ended(tokenizer)


def word_piece() -> Tokenizer:
    """As BERT: a space before every token but those that say ## and the first."""
    words = ["[UNK]", "a", "##a", "b", "##b", "ab", "##世", ".", "n't"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _ended(tokenizer)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, byte_fallback, metaspace, word_piece)
}


def _ended(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer
