"""`hocket demo`: the main job once, from nothing to nothing.

One prefill and one decode worker on the embedded model (or on what the configuration says), one
greedy and one sampled request, printed as they stream, then everything is stopped.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hocket.commands.generate import GenerateOptions, ask, build_request, closing_line, write_now
from hocket.commands.up import Interrupted, Progress, interruptible, running_cluster, show_serving
from hocket.config import EMBEDDED_MODEL, load_config
from hocket.errors import HocketError
from hocket.rpc.clients import GenerationClient

_REQUESTS = (
    (
        "Greedy",
        GenerateOptions("Return a new array with the same shape", max_tokens=96, temperature=0.0),
    ),
    (
        "Sampled",
        GenerateOptions(
            "The function takes a list of", max_tokens=96, temperature=0.8, top_p=0.95, seed=7
        ),
    ),
)

_NOTE = (
    "Greedy text of so small a model repeats itself, and repetition is easy to draft: its card "
    "gives acceptance on text that does not, too."
)


def run(path: Path | None, overrides: Sequence[str], *, verbose: bool) -> int:
    """The command; returns its exit code."""
    console = Console(highlight=False)
    progress = Progress(Console(stderr=True, highlight=False))
    started = time.monotonic()
    try:
        # Beside a running `hocket up` the demo must not ask for the same ports.
        ports = ["gateway.port=0", "gateway.http_port=0", "gateway.admin_port=0"]
        config = load_config(path, [*ports, *overrides])
        with (
            interruptible() as signals,
            running_cluster(config, progress, signals, verbose=verbose) as (_, serving),
        ):
            show_serving(console, config, serving)
            asyncio.run(_ask_all(serving.gateway_address, console))
            if config.model.path == EMBEDDED_MODEL:
                console.print(f"[dim]{_NOTE}[/]\n", soft_wrap=True)
    except Interrupted as signal_name:
        print(f"error: ended by {signal_name}", file=sys.stderr)
        return 130
    except HocketError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(f"Done in {time.monotonic() - started:.0f} s; everything is stopped.")
    return 0


async def _ask_all(address: str, console: Console) -> None:
    client = GenerationClient(address)
    try:
        for title, options in _REQUESTS:
            console.print(f"\n[bold]{title}[/]: {options.text!r}\n")
            write_now(options.text)
            answer = await ask(client, build_request(options), write_now)
            console.print(f"\n\n[dim]{closing_line(answer)}[/]", soft_wrap=True)
        console.print()
    finally:
        await client.close()
