"""The safetensors files of a checkpoint folder: their index, headers, tensors and digest.

`Checkpoint` finds the shards (`model.safetensors.index.json`, or one `model.safetensors`), reads
only headers until a tensor is asked for, and checks the whole list of expected tensors at once.
`weights` builds the model from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hocket.errors import CheckpointError
from hocket.model.checkpoint_tensors import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FULL_DIGEST_LIMIT_BYTES = 64 * 2**20
_SAMPLE_BYTES = 1024
_NAMES_SHOWN = 8
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_VOLATILE_KEYS = ("transformers_version", "_name_or_path", "use_cache")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


class Checkpoint:
    """Read access to a checkpoint's tensors. Raises CheckpointError, naming what is wrong."""

    def __init__(self, path: Path | str) -> None:
        self._folder = Path(path)
        self._tensors: dict[str, _StoredTensor] = {}
        for file in self._shards():
            self._tensors |= _read_header(file)
        self._open: tuple[Path, Any] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check(self, expected: Mapping[str, TensorSpec], architecture: str) -> None:
        """Every expected tensor is there, has its shape, and holds floats."""
        problems = [
            f"{name} is missing (shape {list(spec.shape)})"
            for name, spec in expected.items()
            if not spec.is_optional and name not in self._tensors
        ]
        for name, spec in expected.items():
            stored = self._tensors.get(name)
            if stored is None:
                continue
            if stored.dtype not in _FLOAT_DTYPES:
                problems.append(f"{name} is stored as {stored.dtype}; quantised is not supported")
            elif stored.shape != spec.shape:
                problems.append(
                    f"{name} has shape {list(stored.shape)}, expected {list(spec.shape)}"
                )
        if problems:
            shown = "; ".join(problems[:_NAMES_SHOWN])
            more = f"; and {len(problems) - _NAMES_SHOWN} more" * (len(problems) > _NAMES_SHOWN)
            raise CheckpointError(
                f"{self._folder} does not hold the tensors that its config.json ({architecture}) "
                f"asks for: {shown}{more}.",
                path=self._folder,
                problems=len(problems),
            )

    def read(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the host."""
        file = self._tensors[name].file
        if self._open is None or self._open[0] != file:
            self._open = (file, safe_open(file, framework="pt", device="cpu"))
        return self._open[1].get_tensor(name)

    def digest(self, config: Mapping[str, Any]) -> str:
        """A stable name of config and weights, 32 hexadecimal digits.

        Covers the config (but for keys that do not touch the computation), every tensor's name,
        dtype and shape, and the bytes: all of them up to 64 MB, beyond that the first and the
        middle kilobyte of each tensor. The division into shards does not enter.
        """
        kept = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
        sha = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
        total = sum(tensor.num_bytes for tensor in self._tensors.values())
        for name in sorted(self._tensors):
            tensor = self._tensors[name]
            sha.update(f"\n{name} {tensor.dtype} {tensor.shape}\n".encode())
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                if total <= FULL_DIGEST_LIMIT_BYTES:
                    sha.update(stream.read(tensor.num_bytes))
                    continue
                sha.update(stream.read(min(_SAMPLE_BYTES, tensor.num_bytes)))
                stream.seek(tensor.start + tensor.num_bytes // 2)
                sha.update(stream.read(min(_SAMPLE_BYTES, tensor.num_bytes // 2)))
        return sha.hexdigest()[:32]

    def _shards(self) -> list[Path]:
        index = self._folder / INDEX_FILE
        if index.exists():
            names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [self._folder / name for name in sorted(set(names.values()))]
        else:
            files = [self._folder / SINGLE_FILE]
        for file in files:
            if not file.exists():
                raise CheckpointError(f"No file {file}; the checkpoint needs it.", path=file)
        return files


def _read_header(file: Path) -> dict[str, _StoredTensor]:
    """The safetensors header: an 8-byte length, then JSON."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size - 8:
            raise CheckpointError(f"{file} is no complete safetensors file.", path=file)
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    tensors: dict[str, _StoredTensor] = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        if 8 + length + last > size:
            raise CheckpointError(f"{file} ends before tensor {name} does.", path=file)
        tensors[name] = _StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first
        )
    return tensors
