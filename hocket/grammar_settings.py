"""The [grammar] table of the configuration: what structured output may cost a worker.

`hocket.config` loads it; `hocket.execution.grammars.compiler` keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.toml_tables import at_least


@dataclass(frozen=True, slots=True)
class GrammarSettings:
    """[grammar]: compiling what an output must look like. Clients write grammars, so each is tried
    out first in a process that can be killed.

    compile_timeout_s: a grammar that takes longer to compile is refused.
    compile_memory_bytes: and one that takes more memory.
    max_source_bytes: the longest schema, regular expression, list of choices or EBNF grammar.
    max_waiting: grammars that wait to be compiled; beyond them requests are refused for now.
    cache_bytes: compiled grammars that are kept for the next request that asks for the same.
    """

    compile_timeout_s: float = at_least(0.01, 30.0)
    compile_memory_bytes: int = at_least(64 << 20, 1 << 30)
    max_source_bytes: int = at_least(1, 128 << 10)
    max_waiting: int = at_least(1, 64)
    cache_bytes: int = at_least(0, 256 << 20)
