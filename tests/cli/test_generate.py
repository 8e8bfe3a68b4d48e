"""`hocket generate` against a gateway that answers from a script: what a user sees."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from hocket.cli import app
from hocket.commands.generate import GenerateOptions, build_request
from hocket.errors import HocketError, InvalidRequest, Overloaded, WorkerUnavailable
from hocket.rpc import generation_pb2 as generation
from hocket.rpc.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from hocket.rpc.status import abort


class ScriptedGateway(GenerationServicer):
    """Answers with "One two", or with an error; keeps the requests. Runs on its own thread."""

    def __init__(self) -> None:
        self.requests: list[generation.GenerateRequest] = []
        self.error: HocketError | None = None
        self.is_cut_short = False
        self.is_stopped_midway = False
        self.acceptance = generation.ACCEPTANCE_EXACT
        self.address = ""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        add_GenerationServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def Generate(self, request: generation.GenerateRequest, context: Any) -> None:
        self.requests.append(request)
        if self.error is not None:
            await abort(context, self.error)
        for choice in range(1, request.n):
            other = generation.GenerateResponse(
                request_id="r", choice=choice, text=f"Other {choice}"
            )
            other.finish.reason = generation.FINISH_REASON_LENGTH
            await context.write(other)
        await context.write(generation.GenerateResponse(request_id="r", token_ids=[1], text="One"))
        if self.is_cut_short:
            return
        if self.is_stopped_midway:
            self._stopping = asyncio.create_task(self._server.stop(None))
            await asyncio.Event().wait()
        last = generation.GenerateResponse(request_id="r", output_index=1, token_ids=[2, 3, 4])
        last.text = " twö"
        last.finish.reason = generation.FINISH_REASON_STOP
        last.finish.seed = 2**63 + 1
        last.finish.acceptance = self.acceptance
        last.finish.usage.output_tokens = 4
        last.finish.usage.verify_steps = 2
        last.finish.usage.emitted_tokens = 3
        last.finish.hand_off.bytes = 4096
        last.finish.hand_off.transport = "cma"
        await context.write(last)


@pytest.fixture
def gateway() -> Iterator[ScriptedGateway]:
    running = ScriptedGateway()
    yield running
    running.stop()


def generate(gateway: ScriptedGateway, *arguments: str, stdin: str | bytes = "") -> Any:
    command = ["generate", *arguments, "--address", gateway.address]
    return CliRunner().invoke(app, command, input=stdin)


def test_text_is_printed_and_followed_by_the_closing_line(gateway: ScriptedGateway) -> None:
    done = generate(gateway, "Count")
    assert done.exit_code == 0
    text, closing = done.stdout.strip().split("\n\n")
    assert text == "One twö"
    for part in (
        "4 tokens, stop",
        "TTFT ",
        "inter-token ",
        "tokens/s",
        "acceptance length 1.50",
        "4 KiB KV moved over cma",
        f"seed {2**63 + 1}",
    ):
        assert part in closing


def test_every_option_reaches_its_field(gateway: ScriptedGateway) -> None:
    arguments = (
        "Hi --chat --model m --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 "
        "--seed 18446744073709551615 --stop x --stop yy --drafts 2 --n 1 --min-tokens 3 "
        "--repetition-penalty 1.5 --frequency-penalty 0.5 --presence-penalty -0.5 --regex a+"
    )
    assert generate(gateway, *arguments.split()).exit_code == 0
    expected = generation.GenerateRequest(
        model="m",
        chat=generation.Chat(messages=[generation.ChatMessage(role="user", content="Hi")]),
        sampling=generation.Sampling(
            temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=2**64 - 1,
            repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.5,
        ),
        stopping=generation.Stopping(max_tokens=5, stop=["x", "yy"], min_tokens=3),
        max_draft_tokens=2,
        n=1,
        grammar=generation.Grammar(regex="a+"),
    )  # fmt: skip
    assert gateway.requests == [expected]


def test_choices_grammars_and_lossy_acceptance_reach_their_fields(
    gateway: ScriptedGateway, tmp_path: Path
) -> None:
    ebnf = tmp_path / "sum.ebnf"
    ebnf.write_text('root ::= "1+1"')
    lossy = ("--typical-epsilon", "0.25", "--typical-delta", "0.5")
    assert generate(gateway, "Hi", "--choice", "yes", "--choice", "no", *lossy).exit_code == 0
    assert generate(gateway, "Hi", "--ebnf", str(ebnf)).exit_code == 0
    first, second = gateway.requests
    assert list(first.grammar.choice.strings) == ["yes", "no"]
    assert (first.typical_acceptance.epsilon, first.typical_acceptance.delta) == (0.25, 0.5)
    assert second.grammar.ebnf == 'root ::= "1+1"'
    assert not second.HasField("typical_acceptance")
    both = generate(gateway, "Hi", "--choice", "yes", "--ebnf", str(ebnf))
    assert "must be absent beside ebnf" in both.stderr
    missing = generate(gateway, "Hi", "--ebnf", str(tmp_path / "none"))
    assert missing.stderr.startswith("error: ebnf is ")


def test_what_is_not_given_is_left_to_the_server(gateway: ScriptedGateway) -> None:
    generate(gateway, "Hi")
    (request,) = gateway.requests
    assert request.text == "Hi"
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()
    assert not request.HasField("max_draft_tokens")
    assert not request.HasField("grammar")
    assert request.n == 0


def test_several_completions_are_shown_one_after_the_other(gateway: ScriptedGateway) -> None:
    done = generate(gateway, "Count", "--n", "3")
    assert done.exit_code == 0
    parts = done.stdout.strip().split("\n\n")
    assert parts[::2] == ["[0]\nOne twö", "[1]\nOther 1", "[2]\nOther 2"]
    assert all("acceptance length" in closing for closing in parts[1::2])
    told = json.loads(generate(gateway, "Count", "--n", "3", "--json").stdout)
    assert [c["text"] for c in told["choices"]] == ["One twö", "Other 1", "Other 2"]
    assert [c["reason"] for c in told["choices"]] == ["stop", "length", "length"]


def test_a_schema_is_read_from_its_file(gateway: ScriptedGateway, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert generate(gateway, "Hi", "--json-schema", str(schema)).exit_code == 0
    assert gateway.requests[0].grammar.json_schema == '{"type": "object"}'
    both = generate(gateway, "Hi", "--json-schema", str(schema), "--regex", "a")
    assert both.stderr == "error: regex is 'a'; it must be absent beside json_schema.\n"
    empty = generate(gateway, "Hi", "--json-schema", str(schema), "--regex", "")
    assert empty.stderr == "error: regex is ''; it must be absent beside json_schema.\n"
    schema.write_bytes(b"\xff")
    for path in (schema, tmp_path / "none.json"):
        done = generate(gateway, "Hi", "--json-schema", str(path))
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert "json_schema" in done.stderr


@pytest.mark.parametrize(
    ("acceptance", "words"),
    [("EXACT", ""), ("TYPICAL", "could change this output"), ("SYNTHETIC", "means nothing")],
)
def test_an_output_that_is_not_exact_is_labelled(
    gateway: ScriptedGateway, acceptance: str, words: str
) -> None:
    gateway.acceptance = generation.Acceptance.Value(f"ACCEPTANCE_{acceptance}")
    done = generate(gateway, "Hi", "--json")
    assert words in done.stderr
    assert bool(done.stderr) == bool(words)
    assert json.loads(done.stdout)["acceptance"] == acceptance.lower()


def test_a_dash_reads_the_prompt_from_stdin(gateway: ScriptedGateway) -> None:
    generate(gateway, "-", stdin="from a pipe")
    assert gateway.requests[0].text == "from a pipe"


def test_json_is_one_object_with_whole_numbers(gateway: ScriptedGateway) -> None:
    done = generate(gateway, "Count", "--json")
    told = json.loads(done.stdout)
    assert told["text"] == "One twö"
    assert told["token_ids"] == [1, 2, 3, 4]
    assert told["reason"] == "stop"
    assert told["seed"] == 2**63 + 1
    assert told["hand_off"]["bytes"] == 4096
    assert told["measured"]["acceptance_length"] == 1.5


def test_an_error_is_one_line_with_field_value_and_limit(gateway: ScriptedGateway) -> None:
    gateway.error = InvalidRequest("sampling.temperature", -1.0, "from 0 to 100")
    done = generate(gateway, "Hi", "--temperature", "-1")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == "error: sampling.temperature is -1.0; it must be from 0 to 100.\n"


def test_an_error_in_json_keeps_its_reason_and_metadata(gateway: ScriptedGateway) -> None:
    gateway.error = Overloaded("full", limit=3)
    done = generate(gateway, "Hi", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "error": {"reason": "OVERLOADED", "code": 8, "message": "full", "limit": "3"}
    }


def test_a_stream_without_an_end_is_an_error(gateway: ScriptedGateway) -> None:
    gateway.is_cut_short = True
    done = generate(gateway, "Hi")
    assert done.exit_code == 1
    assert "ended without a finish" in done.stderr


def test_a_gateway_that_stops_midway_is_said_on_a_line_of_its_own(
    gateway: ScriptedGateway,
) -> None:
    gateway.is_stopped_midway = True
    done = generate(gateway, "Hi")
    assert done.exit_code == 1
    assert done.stdout == "One\n"
    assert done.stderr == (
        "error: the gateway stopped before the answer was complete (cancelling all calls).\n"
    )


def test_in_json_a_gateway_that_stops_midway_is_one_object(gateway: ScriptedGateway) -> None:
    gateway.is_stopped_midway = True
    told = json.loads(generate(gateway, "Hi", "--json").stdout)
    assert told["error"]["reason"] == "WORKER_UNAVAILABLE"
    assert "before the answer was complete" in told["error"]["message"]


def test_a_gateway_that_has_no_worker_is_not_called_absent(gateway: ScriptedGateway) -> None:
    gateway.error = WorkerUnavailable("no decode worker is ready; ask again.")
    assert generate(gateway, "Hi").stderr == "error: no decode worker is ready; ask again.\n"


def test_nobody_listening_is_one_line() -> None:
    done = CliRunner().invoke(app, ["generate", "Hi", "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no gateway answers at '127.0.0.1:1'")
    assert "hocket up" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions("\udcff"), "text"),
        (GenerateOptions("\udcff", is_chat=True), "content"),
        (GenerateOptions("x", model="\udcff"), "model"),
        (GenerateOptions("x", stop=("ok", "\udcff")), "stop"),
    ],
)
def test_bytes_that_are_no_text_are_named(options: GenerateOptions, field: str) -> None:
    """The shell hands them over as surrogates."""
    with pytest.raises(InvalidRequest, match="UTF-8") as caught:
        build_request(options)
    assert caught.value.field == field


def test_a_pipe_with_bytes_that_are_no_text_is_one_line(gateway: ScriptedGateway) -> None:
    done = generate(gateway, "-", stdin=b"caf\xe9")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: text is ")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (GenerateOptions("x", max_tokens=-1), "max_tokens"),
        (GenerateOptions("x", top_k=2**40), "top_k"),
        (GenerateOptions("x", seed=2**64), "seed"),
        (GenerateOptions("x", max_draft_tokens=-3), "max_draft_tokens"),
        (GenerateOptions("x", n=-1), "n"),
    ],
)
def test_a_number_no_message_can_hold_is_named(options: GenerateOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(options)
    assert caught.value.field == field


def test_a_wrong_configuration_is_one_line() -> None:
    done = CliRunner().invoke(app, ["up", "--set", "gateway.prot=1"])
    assert done.exit_code == 1
    assert done.stderr == "error: gateway.prot is not a known key; did you mean gateway.port?\n"


def test_help_and_version_import_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from hocket.cli import app\n"
        "for option in ('--help', '--version'):\n"
        "    assert CliRunner().invoke(app, [option]).exit_code == 0\n"
        "print({'torch', 'ray', 'grpc', 'redis', 'control_plane'} & set(sys.modules) or 'none')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "none"
