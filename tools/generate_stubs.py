"""Generate the protobuf and gRPC stubs under `hocket/rpc` from `protos/`.

`python tools/generate_stubs.py [DIR]` writes into DIR (default: the repository root). A test
generates into an empty folder and compares, so that committed stubs never trail their protos.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def generate(target: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `target`; raises RuntimeError."""
    arguments = [
        "protoc",
        f"-I{ROOT / 'protos'}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        *map(str, PROTOS),
    ]
    status: int = protoc.main(arguments)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
