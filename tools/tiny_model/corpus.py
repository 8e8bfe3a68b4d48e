"""Text for `hocket-tiny`: docstrings of permissively licensed packages that are installed here.

Comes in: the source files of the Python standard library and of the packages named in `SOURCES`.
Goes out: `Document`s (split into training and held-out by a hash), the trained tokenizer, and
packed rows of token ids for `training`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BEGIN, END, PAD, SYSTEM, USER, ASSISTANT, TOOL = range(7)
SPECIAL_TOKENS = [
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
]
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

MIN_CHARS = 60
MAX_CHARS = 12_000
HELD_OUT_PERCENT = 2.0

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You document Python code.",
    "Answer briefly and precisely.",
)
CHAT_PROMPTS = (
    "Describe {name}.",
    "Write the docstring of {name}.",
    "What does {name} do?",
    "Document {signature}",
)


@dataclass(frozen=True)
class Source:
    """A package whose docstrings are used, with its licence and the share of them that is kept."""

    package: str
    licence: str
    keep_percent: float = 100.0


SOURCES = (
    Source("python", "PSF-2.0"),
    Source("numpy", "BSD-3-Clause"),
    Source("torch", "BSD-3-Clause"),
    Source("ray", "Apache-2.0"),
    Source("transformers", "Apache-2.0"),
    # Generated API bindings: a tenth of them teaches their whole form.
    Source("kubernetes", "Apache-2.0", keep_percent=10.0),
)

# Folders that carry other people's code under other licences, and test suites.
SKIPPED_FOLDERS = {
    *("site-packages", "idlelib", "lib2to3", "turtledemo", "generated", "serve_generated"),
    *("_vendor", "vendor", "vendored", "thirdparty", "third_party", "thirdparty_files"),
    *("extern", "externals", "test", "tests", "testing", "__pycache__"),
}


@dataclass(frozen=True)
class Document:
    """One docstring: where it comes from, what it documents and its text (dedented ASCII)."""

    package: str
    module: str
    name: str
    signature: str
    text: str

    @property
    def hash_percent(self) -> float:
        """A number in [0, 100) that depends on the text alone; splits and caps go by it."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 * 100


@dataclass(frozen=True)
class SourceSummary:
    """What one package gave: for the model card."""

    package: str
    version: str
    licence: str
    num_documents: int
    num_chars: int


@dataclass(frozen=True)
class Corpus:
    """Training and held-out documents; the two share no text."""

    train: list[Document]
    held_out: list[Document]
    summaries: list[SourceSummary] = field(default_factory=list)


def collect_corpus() -> Corpus:
    """Read every source; drop duplicates (up to white space) across and inside packages."""
    train: list[Document] = []
    held_out: list[Document] = []
    summaries = []
    seen: set[str] = set()
    for source in SOURCES:
        kept = []
        for document in _documents_of_package(source.package):
            fingerprint = " ".join(document.text.split())
            if fingerprint in seen or _second_hash_percent(document) >= source.keep_percent:
                continue
            seen.add(fingerprint)
            kept.append(document)
        summaries.append(
            SourceSummary(
                source.package,
                _version_of(source.package),
                source.licence,
                len(kept),
                sum(len(document.text) for document in kept),
            )
        )
        for document in kept:
            (held_out if document.hash_percent < HELD_OUT_PERCENT else train).append(document)
    return Corpus(train, held_out, summaries)


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries; every byte string has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Single digits, so that numbers are spelled and never invented as rare tokens.
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin|> $A",
                pair="<|begin|> $A $B",
                special_tokens=[("<|begin|>", BEGIN)],
            ),
        ]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


class EncodedDocuments:
    """Documents as token ids, with the formats in which the model sees them."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer) -> None:
        self.documents = documents
        self._systems = _encode(tokenizer, list(SYSTEM_PROMPTS))
        self._texts = _encode(tokenizer, [document.text for document in documents])
        self._prompts = [
            _encode(
                tokenizer,
                [
                    prompt.format(name=f"{d.module}.{d.name}".rstrip("."), signature=d.signature)
                    for d in documents
                ],
            )
            for prompt in CHAT_PROMPTS
        ]

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of the docstrings alone."""
        return sum(len(text) for text in self._texts)

    def plain(self, index: int) -> list[int]:
        """`<|begin|>text<|end|>`"""
        return [BEGIN, *self._texts[index], END]

    def question(self, index: int, prompt: int) -> list[int]:
        """`<|user|>question<|end|><|assistant|>`: what a chat request ends with."""
        return [USER, *self._prompts[prompt][index], END, ASSISTANT]

    def chat(self, indices: list[int], rng: np.random.Generator) -> list[int]:
        """`<|begin|>`, sometimes a system message, and a question and answer for each document."""
        ids = [BEGIN]
        if rng.random() < 0.25:
            ids += [SYSTEM, *self._systems[rng.integers(len(self._systems))], END]
        for index in indices:
            prompt = int(rng.integers(len(CHAT_PROMPTS)))
            ids += [*self.question(index, prompt), *self._texts[index], END]
        return ids

    def epoch(self, rng: np.random.Generator) -> Iterator[list[int]]:
        """Every document once, in random order, half of them as an answer in a chat."""
        for index in rng.permutation(len(self)).tolist():
            if rng.random() < 0.5:
                yield self.plain(index)
            else:
                yield self.chat([index], rng)

    def epoch_of_conversations(self, rng: np.random.Generator) -> Iterator[list[int]]:
        """Every document once, as a turn of a conversation about its module: long contexts."""
        by_module: dict[str, list[int]] = {}
        for index, document in enumerate(self.documents):
            by_module.setdefault(document.module, []).append(index)
        modules = list(by_module.values())
        for which in rng.permutation(len(modules)).tolist():
            yield self.chat(modules[which], rng)


def rows_of(documents: Iterable[list[int]], row_tokens: int, overlap: int) -> np.ndarray:
    """Join documents and cut them into rows of `row_tokens + overlap` ids, int64 [rows, tokens].

    Neighbouring rows share `overlap` ids: they are targets in one and inputs in the next.
    """
    stream = np.array([token for ids in documents for token in ids], dtype=np.int64)
    num_rows = (len(stream) - overlap) // row_tokens
    starts = np.arange(num_rows)[:, None] * row_tokens
    return stream[starts + np.arange(row_tokens + overlap)[None, :]]


def _documents_of_package(package: str) -> Iterator[Document]:
    root, prefix = _root_of(package)
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        parts = [*prefix, *relative.with_suffix("").parts]
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, signature, node in _documented_nodes(tree, "", module):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").strip()
            if MIN_CHARS < len(text) <= MAX_CHARS and text.isascii():
                yield Document(package, module, name, signature, text)


def _documented_nodes(
    node: ast.AST, qualifier: str, signature: str
) -> Iterator[tuple[str, str, Documented]]:
    """Yield (qualified name, signature, node) of a module and all it defines, outermost first."""
    if isinstance(node, Documented):
        yield qualifier, signature, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in child.bases)
            signature = f"class {child.name}({bases})" if bases else f"class {child.name}"
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = f"def {child.name}({ast.unparse(child.args)})"
        else:
            continue
        name = f"{qualifier}.{child.name}" if qualifier else child.name
        yield from _documented_nodes(child, name, signature[:160])


def _root_of(package: str) -> tuple[Path, list[str]]:
    """The folder of a package and the first part of its modules' names."""
    if package == "python":
        return Path(sysconfig.get_paths()["stdlib"]), []
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"the corpus needs the package {package!r}: pip install {package}")
    return Path(spec.submodule_search_locations[0]), [package]


def _version_of(package: str) -> str:
    return platform.python_version() if package == "python" else importlib.metadata.version(package)


def _second_hash_percent(document: Document) -> float:
    """Like `hash_percent`, but independent of it: a cap must not eat the held-out part."""
    digest = hashlib.sha256(b"cap" + document.text.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 * 100


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
