"""The console script: reads the command line, then imports what the subcommand needs.

Nothing heavy is imported here, so that `--help` and `--version` answer at once. The work is in
`hocket.commands`. A `HocketError` ends a command with one line on stderr and exit code 1; wrong
usage with exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hocket.environment import quiet_grpc

app = typer.Typer(
    name="hocket",
    help="Serves mixture-of-experts models from two pools: one reads prompts, one writes replies.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help: in the one with frames a flag looks as if it took a value.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_ADDRESS = "127.0.0.1:50051"
_ADMIN_ADDRESS = "127.0.0.1:50052"

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file; without one, every key's default.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated."),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the logs of all processes.")]


MinTokens = Annotated[int | None, typer.Option(help="Fewest tokens to generate.")]
Repetition = Annotated[float | None, typer.Option(help="Above 1: repeat less; default 1.")]
Frequency = Annotated[float | None, typer.Option(help="For each time that a token came; -2 to 2.")]
Presence = Annotated[float | None, typer.Option(help="For tokens that came at all; -2 to 2.")]
SchemaFile = Annotated[Path | None, typer.Option(help="File: the output is JSON of this schema.")]
EbnfFile = Annotated[Path | None, typer.Option(help="File: the output follows this grammar.")]
Stops = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="<str>", help="End before this; repeatable."),
]
Choices = Annotated[
    list[str] | None,
    typer.Option("--choice", metavar="<str>", help="The output is one of these; repeatable."),
]
Epsilon = Annotated[
    float | None,
    typer.Option(help="Lossy: keep drafts of this probability, or of delta * exp(-entropy)."),
]
Delta = Annotated[float | None, typer.Option(help="Lossy, as --typical-epsilon.")]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"hocket {version('hocket')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def up(
    config: ConfigFile = None,
    overrides: Overrides = None,
    log_dir: Annotated[
        str, typer.Option(help="Keep the processes' logs there; as --set telemetry.log_folder=DIR.")
    ] = "",
    verbose: Verbose = False,
) -> None:
    """Start the whole set-up here and serve until Ctrl-C."""
    from hocket.commands import up as command

    settings = [*(overrides or []), *command.log_settings(log_dir)]
    raise typer.Exit(command.run(config, settings, verbose=verbose))


@app.command()
def demo(config: ConfigFile = None, overrides: Overrides = None, verbose: Verbose = False) -> None:
    """Start everything, answer two requests, stop everything."""
    from hocket.commands import demo as command

    raise typer.Exit(command.run(config, overrides or [], verbose=verbose))


@app.command()
def generate(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help='The prompt; "-" reads it from stdin.')
    ],
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's chat message.")] = False,
    model: Annotated[str, typer.Option(help="Name of a served model.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep this share of probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Stops = None,
    drafts: Annotated[int | None, typer.Option(help="Most draft tokens per step.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Completions of the prompt.")] = None,
    min_tokens: MinTokens = None,
    repetition_penalty: Repetition = None,
    frequency_penalty: Frequency = None,
    presence_penalty: Presence = None,
    json_schema: SchemaFile = None,
    regex: Annotated[str | None, typer.Option(help="The output matches this.")] = None,
    ebnf: EbnfFile = None,
    choice: Choices = None,
    typical_epsilon: Epsilon = None,
    typical_delta: Delta = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    address: Annotated[str, typer.Option(help="host:port of the gateway.")] = _ADDRESS,
) -> None:
    """Generate text and print it as it is made."""
    quiet_grpc()
    from hocket.commands import generate as command

    # What is no text stays recognisable, as in the arguments, and is refused with them.
    prompt = sys.stdin.buffer.read().decode(errors="surrogateescape") if text == "-" else text
    options = command.GenerateOptions(
        text=prompt,
        is_chat=chat,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
        max_draft_tokens=drafts,
        n=n,
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        json_schema=json_schema,
        regex=regex,
        ebnf=ebnf,
        choices=tuple(choice or ()),
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
    )
    raise typer.Exit(command.run(options, address, as_json=as_json))


AdminAddress = Annotated[str, typer.Option(help="host:port of the operator's door.")]


@app.command()
def status(
    address: AdminAddress = _ADMIN_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second.")] = False,
) -> None:
    """Show pools, workers, latencies, drafts, sizing reasons."""
    quiet_grpc()
    from hocket.commands import status as command

    raise typer.Exit(command.run(address, as_json=as_json, is_watching=watch))


@app.command()
def scale(
    sizes: Annotated[
        list[str], typer.Argument(metavar="POOL=N", help="As in prefill=2 decode=3; N may be auto.")
    ],
    address: AdminAddress = _ADMIN_ADDRESS,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the pools have these sizes.")
    ] = False,
) -> None:
    """Set the sizes of the pools, or leave them to the autoscaler."""
    quiet_grpc()
    from hocket.commands import scale as command

    raise typer.Exit(command.run(sizes, address, is_waiting=wait))


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
