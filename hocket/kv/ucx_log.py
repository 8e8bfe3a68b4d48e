"""Which transport UCX chose, read from UCX's own account of it.

With UCX_PROTO_INFO=y UCX writes a table for every kind of operation when it first chooses how to
do it; with UCX_LOG_FILE they go to a file. Only the reader's own agent's tables count, and only
remote reads into the pool's kind of memory:

    | imp-4570e4a4db764cb492047527eae intra-node cfg#1                 |
    | remote memory read by ucp_get*(multi) into host memory from host |
    +--------+-------------+-------------------------------------------+
    | Range  | Description |                  Config                   |
    +--------+-------------+-------------------------------------------+
    | 0..inf | zero-copy   | cma/memory                                |

The last row of a table is the one for large operations. Several lanes or peers may use several
transports; all are named.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

# UCX cuts names at 31 characters, without a word.
MAX_AGENT_NAME = 31

_TITLE = re.compile(r"\|\s+(?P<agent>\S+)\s+(?P<where>self|intra-node|inter-node)\s+cfg#\d+")
_READ_INTO = re.compile(r"\|\s+remote memory read by \S+ into (?P<memory>\w+)")
_ROW = re.compile(r"\|\s*\w+\.\.\w+\s*\|[^|]*\|(?P<config>[^|]*)\|")
_LANE = re.compile(r"([a-z]\w*)/")


def transports_in_log(text: str, agent: str, memory: str) -> str:
    """The transports of `agent`'s READs into `memory` ("cpu" or "cuda"), joined by "+"; "" when
    the log has no word on it. "cma", "tcp", "rc_mlx5", "cuda_ipc", ... as UCX names them."""
    kind = "host" if memory == "cpu" else memory
    found: dict[str, None] = {}
    is_ours = is_read = False
    last_row = ""
    for line in [*text.splitlines(), "| - self cfg#0"]:
        if title := _TITLE.search(line):
            found |= dict.fromkeys(_LANE.findall(last_row))
            is_ours = title["agent"] == agent[:MAX_AGENT_NAME] and title["where"] != "self"
            is_read, last_row = False, ""
        elif is_ours and (reading := _READ_INTO.search(line)):
            is_read = reading["memory"].startswith(kind)
        elif is_read and (row := _ROW.search(line)):
            last_row = row["config"]
    return "+".join(found)


def read_log_of_this_process(log_file: str) -> str:
    """What UCX has written in this process so far, when UCX_LOG_FILE is `log_file` (%p is the
    process id); "" when there is no such file."""
    path = Path(log_file.replace("%p", str(os.getpid())))
    if not path.is_file():
        return ""
    # UCX writes through C's buffered streams and flushes them only when they are full.
    ctypes.CDLL(None).fflush(None)
    return path.read_text(errors="replace")
